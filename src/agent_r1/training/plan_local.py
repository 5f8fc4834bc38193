"""Estimate memory, disk and time of a run of the local loop on this machine.

In: a configuration and the shape of its model. Out: bytes and seconds. `train --dry-run` prints
them, `doctor.py` compares them with the machine, and `stages.py` refuses a run that does not fit.
`cluster/plan.py` does the same for GPUs.
"""

from __future__ import annotations

from contextlib import suppress

from agent_r1.config import Config
from agent_r1.ground.device import LOGITS
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.shapes import Shape, find_shape
from agent_r1.ground.units import GIB

TOKENS_PER_EPISODE = 115
"""Mean length of an episode of lab/laptop.yaml in training (metrics: sequence_length/mean).

Those of `discover` are longer, because its results have up to six passages and its thoughts
quote them.
"""
EFFICIENCY = 0.55
"""Share of the matmul rate that a whole step reaches, with a computation shared by several episodes
counted for each. At 266 GFLOP/s it predicts 0.36 s for GRPO's step of 16 x 8 and 0.73 s for PPO's
of 128 x 1. Measured there, on two cores of an AMD EPYC in steps 4 to 23: 0.33 s and 0.77 s."""
PROCESS_BYTES = GIB
"""Bytes of Python, PyTorch, packages, a small encoder, and what the allocator cannot reuse."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}
LOGIT_COPIES = 6
"""Copies of a chunk's logits during backward: logits, log-probabilities, and their gradients."""


def model_shape(config: Config) -> Shape:
    """Return the shape of the model that a run trains. It may be one made from nothing.

    Raises ConfigError for an unknown model that is not downloaded yet.
    """
    from agent_r1.workspace import Workspace

    m = config.model
    if m.path:
        return find_shape(m.path, Workspace(config).base_model)
    head, has_tied_embeddings = m.hidden_size // m.heads, True
    return Shape(
        m.layers,
        m.hidden_size,
        m.heads,
        m.kv_heads,
        head,
        m.intermediate_size,
        m.vocab_size,
        has_tied_embeddings,
        m.max_position,
    )


def count_kept_numbers(shape: Shape) -> int:
    """Count the numbers per token that a layer keeps for backward.

    They are the inputs of norms, products and attention.
    """
    return (
        6 * shape.hidden
        + 3 * (shape.heads + shape.kv_heads) * shape.head_dim
        + 4 * shape.intermediate
    )


def local_memory(config: Config, shape: Shape, itemsize: int = 4) -> dict[str, float]:
    """Return the most bytes that the local loop needs, by part.

    The larger of RL and warm start counts; for a verl run only the warm start runs here.
    """
    r, t, c, P = config.rollout, config.trainer, config.cold_start, shape.parameters
    networks = 2 if config.algorithm_has("critic") else 1

    def update(tokens: int) -> dict[str, float]:
        layers = (
            shape.layers * (shape.hidden if t.recompute else count_kept_numbers(shape))
            + count_kept_numbers(shape) * t.recompute
        )
        logits = LOGIT_COPIES * min(tokens * shape.vocab, LOGITS) + shape.vocab * shape.hidden
        return {
            f"activations of {tokens:,} tokens": itemsize * tokens * layers,
            "logits": 4 * logits,
        }

    rl = {
        "weights, gradients, Adam": 16 * P * networks,
        "copy to sample from": 0 if itemsize == 4 else itemsize * P,
        "reference": 4 * P if config.actor.kl_coef else 0,
        "KV cache": shape.cache // 2 * itemsize * r.max_context * r.max_concurrent_episodes,
        **update(max(t.max_tokens_per_microbatch, r.max_context)),
    }
    warm = (
        {"weights, gradients, Adam": 16 * P, **update(max(c.mix_tokens, r.max_context))}
        if c.warm_steps
        else {}
    )
    return {
        "PyTorch, packages": PROCESS_BYTES,
        **max(rl if config.engine == "local" else {}, warm, key=lambda parts: sum(parts.values())),
    }


def check_free_memory(config: Config) -> None:
    """Raise AgentR1Error if a pretrained model's local run does not fit into free memory."""
    from agent_r1.ground.machine import available_memory, device_names

    device, dtype = device_names(config.trainer.device, config.trainer.dtype)
    if config.engine != "local" or config.model.path is None:
        return
    free = available_memory()
    if device == "cuda":
        import torch

        free = torch.cuda.mem_get_info()[0]
    with suppress(ConfigError):  # the model is not downloaded yet
        parts = local_memory(config, model_shape(config), ITEMSIZE[dtype])
        need = sum(parts.values())
        if free is not None and free < need:
            raise AgentR1Error(
                f"this run needs about {need / GIB:.1f} GiB of memory ({memory_summary(parts)}), "
                f"and {free / GIB:.1f} are free; "
                "close programs, or set trainer.recompute=true or a smaller "
                "rollout.max_concurrent_episodes, "
                "trainer.max_tokens_per_microbatch or cold_start.mix_tokens",
                code="too_little_memory",
            )


def memory_summary(parts: dict[str, float]) -> str:
    """Format the parts in GiB, without the small ones."""
    return ", ".join(
        f"{name} {amount / GIB:.1f}" for name, amount in parts.items() if amount >= GIB / 20
    )


def local_disk(config: Config, shape: Shape) -> float:
    """Return bytes of checkpoints and of a pretrained model's folders.

    Next to the checkpoints that are kept, one is being written, and one is the first agent.
    """
    networks, models = 2 if config.algorithm_has("critic") else 1, 2 if config.model.path else 0
    return shape.parameters * (12 * networks * (config.trainer.keep_checkpoints + 2) + 4 * models)


def local_plan(config: Config) -> str:
    """Describe memory, disk and time of a local run, each with its assumptions."""
    from agent_r1.ground.machine import device_names, gpu_matmul_rate, matmul_rate
    from agent_r1.workspace import Workspace

    device, dtype = device_names(config.trainer.device, config.trainer.dtype)
    r, t, networks = config.rollout, config.trainer, 2 if config.algorithm_has("critic") else 1
    shape = model_shape(config)
    parts = local_memory(config, shape, ITEMSIZE[dtype])
    if config.model.path and config.engine == "local" and Workspace(config).base_model.is_dir():
        from agent_r1.model.files import read_shape

        read_shape(
            Workspace(config).base_model
        )  # raises for architectures that only verl can train
    P = shape.parameters
    # Operations per weight and token: 2 to sample, 6 to train (forward and backward), 2 more to
    # predict values.
    per_token = P * (2 + 6 * config.actor.epochs + (networks - 1) * (2 + 6 * config.critic.epochs))
    rate = gpu_matmul_rate(dtype) if device == "cuda" else matmul_rate(t.threads)
    episodes, greedy = (
        r.prompts_per_step * r.samples_per_prompt,
        config.greedy_episodes,
    )
    seconds = TOKENS_PER_EPISODE * (episodes * per_token + greedy * 2 * P) / (rate * EFFICIENCY)
    return (
        f"\nmodel              {P / 1e6:.2f} M parameters on {device}, {dtype}\n"
        f"memory             {sum(parts.values()) / 2**20:.0f} MiB: {memory_summary(parts)} GiB\n"
        f"disk               {local_disk(config, shape) / 2**20:.0f} MiB of models and checkpoints "
        f"({t.keep_checkpoints} kept)\n"
        f"episodes           {episodes} per "
        f"step{f', and {greedy} greedy ones for comparison' * (greedy > 0)}\n"
        f"time               about {seconds:.2f} s per step, {t.steps * seconds / 60:.1f} min for "
        f"{t.steps} steps "
        f"(a matmul reaches {rate / 1e9:.0f} GFLOP/s now, fewer while other programs run; assumed: "
        f"{TOKENS_PER_EPISODE} tokens per episode, {EFFICIENCY:.0%} of that rate)"
    )
