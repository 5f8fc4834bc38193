"""Declare the section `verl.*`, and conflicts of what verl does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from agent_r1.cluster.hardware import find_gpu
from agent_r1.config.settings import AtLeast1, OutsideFingerprint, OutsideWhileDefault, Section
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.shapes import check_context, find_known_shape


class VerlConfig(Section):
    """Configure `--engine verl`; the local loop ignores this section."""

    ranks: AtLeast1 = 1
    """Training processes that share the model (FSDP2): one per GPU; on a CPU, any number."""
    tensor_parallel: OutsideFingerprint[AtLeast1] = 1
    """GPUs that one vLLM server spans."""
    agent_workers: OutsideFingerprint[AtLeast1] = 1
    """Processes that run episodes."""
    gpu_memory: OutsideFingerprint[float] = Field(0.5, gt=0, lt=1)
    """Share of a GPU's memory for vLLM, next to the trainer."""
    stall_timeout_s: OutsideFingerprint[AtLeast1] = 600
    """Seconds without progress of any living process, also during start-up, after which the run
    ends."""
    nodes: OutsideFingerprint[AtLeast1] = 1
    """Machines for the ranks; with several, RAY_ADDRESS names the head of a Ray cluster on all of
    them."""
    offload: OutsideFingerprint[bool] = False
    """Keep weights and optimizer in host memory while their network is idle: slower, for small
    GPUs."""
    attention: OutsideWhileDefault[Literal["auto", "flash_attention_2", "varlen", "sdpa"]] = "auto"
    """The trainer's attention. flash_attention_2: the package flash-attn.

    varlen: the same kernel inside PyTorch, which packs rows, too. sdpa: padded rows, which take
    more memory.

    auto: flash_attention_2 on a GPU where flash-attn loads, else varlen. On a CPU sdpa. They round
    differently, so a run keeps its choice, and another one is refused."""
    tis_cap: float | None = None
    """Truncated importance sampling (TIS): vLLM and the trainer round differently, so a token's
    loss is weighted by min(trainer's probability / vLLM's, tis_cap). Unset: 2 in bfloat16, off in
    float32. 0: off."""
    gpu: OutsideFingerprint[str | None] = None
    """The GPU that the preset is sized for, such as H100; used by the plan. `doctor` checks the
    actual GPUs."""

    @staticmethod
    def conflicts(config: Any, trains: bool) -> Iterator[ConfigError]:
        """Find conflicts with verl's limits and unknown GPUs."""
        if config.engine != "verl" or not trains:
            return
        r = config.rollout
        v = config.verl
        updates = {"actor": config.actor.minibatches}
        if config.algorithm_has("critic"):
            updates["critic"] = config.critic.minibatches
        for name, count in updates.items():
            if r.prompts_per_step % count:
                yield ConfigError(
                    f"verl cuts a batch by prompts: rollout.prompts_per_step={r.prompts_per_step} "
                    f"does not divide into {name}.minibatches={count}; choose a divisor of "
                    f"{r.prompts_per_step}",
                    code="indivisible_batch",
                )
            if r.prompts_per_step // count * r.samples_per_prompt % v.ranks:
                yield ConfigError(
                    f"a minibatch of {r.prompts_per_step // count} prompts x "
                    f"{r.samples_per_prompt} samples does not divide among verl.ranks={v.ranks}; "
                    f"change {name}.minibatches or verl.ranks",
                    code="indivisible_ranks",
                )
        if v.ranks % v.nodes:
            yield ConfigError(
                f"verl.ranks={v.ranks} must be a multiple of verl.nodes={v.nodes}",
                code="indivisible_ranks",
            )
        if v.ranks // v.nodes % v.tensor_parallel:
            yield ConfigError(
                f"verl.tensor_parallel={v.tensor_parallel} does not divide the "
                f"{v.ranks // v.nodes} ranks of a machine; "
                "choose a divisor, or another verl.ranks",
                code="indivisible_tensor_parallel",
            )
        if v.tis_cap and v.tis_cap < 1:
            yield ConfigError(
                f"verl.tis_cap={v.tis_cap} would shrink every token's loss; give 1 or more, or 0 "
                "to disable it",
                code="out_of_range",
            )
        if v.stall_timeout_s <= config.env.episode_timeout_s:
            yield ConfigError(
                f"verl.stall_timeout_s={v.stall_timeout_s} would end the run for one episode that "
                "takes its whole "
                f"env.episode_timeout_s={config.env.episode_timeout_s:g}; raise the first or lower "
                "the second",
                code="short_patience",
            )
        if v.gpu is not None:
            find_gpu(v.gpu)
        shape = find_known_shape(config.model.path)
        if shape:
            check_context(r.max_context, v.tensor_parallel, shape)
        if config.trainer.max_tokens_per_microbatch < r.max_context:
            yield ConfigError(
                f"trainer.max_tokens_per_microbatch={config.trainer.max_tokens_per_microbatch} "
                f"cannot hold one conversation of rollout.max_context={r.max_context} tokens; "
                "raise it",
                code="small_microbatch",
            )
