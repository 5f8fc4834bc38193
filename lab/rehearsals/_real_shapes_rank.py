"""Run one rank of real_shapes.py: verl's worker under torchrun, with GPU settings on a CPU.

    torchrun --nproc-per-node 4 -m lab.rehearsals._real_shapes_rank whole|passes|weights MODEL OUT
    TOKENS

    whole      load, an update in two passes of TOKENS tokens, log-probabilities, save
    passes     memory of an update and of log-probabilities, with TOKENS and with 2 TOKENS tokens in
               a pass
    weights    a model that no process ever has completely, saved by verl's checkpoint manager,
               without Adam; its numbers tell the row that they belong to

Writes OUT/rank_N.json with seconds and bytes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.rehearsals._as_on_a_gpu import CANNOT, merge


def resident() -> int:
    """Return this process's bytes of memory, without pages of files."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+)", status)
    assert match, "Linux writes it for every process"
    return int(match[1]) * 1024


class Peak:
    """Measure a block's seconds, and its peak of `resident` above the start."""

    bytes = seconds = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        before, began, over = resident(), time.monotonic(), threading.Event()

        def watch() -> None:
            while not over.wait(0.01):
                self.bytes = max(self.bytes, resident() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            self.seconds = round(time.monotonic() - began, 1)
            over.set()
            watcher.join()


def compose_preset(model: Path, out: Path, tokens: int, settings: list[str] | None = None):
    """Return verl's configuration of the preset, with passes of `tokens` tokens."""
    from agent_r1.cluster.compose import Sources, compose, overrides
    from agent_r1.config import load_config

    config = load_config(
        "hotpotqa-4xh100", [*small(model, tokens), *(settings or [])], algorithm="grpo"
    )
    ours = merge(overrides(config, Sources(model, out, out, out), "cuda"), CANNOT)
    return compose(ours).actor_rollout_ref


def small(model: Path, tokens: int) -> list[str]:
    """List overrides of the preset."""
    return [
        f"model.path={model}",
        f"rollout.max_context={tokens}",
        f"rollout.max_tokens_per_turn={tokens // 2}",
        f"trainer.max_tokens_per_microbatch={tokens}",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "actor.minibatches=1",
        "actor.warmup_steps=0",
        "actor.kl_coef=0",
        "data.corpus=contexts",
    ]


def batch(tokens: int, rows: int, vocab: int, rank: int):
    """Make `rows` rows as in verl's TransferQueue: a prompt and an answer of random tokens."""
    from verl.utils import tensordict_utils as tu

    g = torch.Generator().manual_seed(rank)
    ids_BT, half = torch.randint(vocab, (rows, tokens), generator=g), tokens // 2
    answers_BT, positions_BT = ids_BT[:, half:], torch.arange(tokens).expand(rows, tokens)
    columns = {
        "input_ids": ids_BT,
        "position_ids": positions_BT,
        "prompts": ids_BT[:, :half],
        "responses": answers_BT,
        "response_mask": torch.ones_like(answers_BT),
        "loss_mask": torch.ones_like(answers_BT),
        "old_log_probs": torch.full(answers_BT.shape, -12.0),
        "advantages": torch.randn(answers_BT.shape, generator=g),
        "episode_tokens": torch.full(answers_BT.shape, tokens - half),
        "minibatch_episodes": torch.full(answers_BT.shape, 4 * rows),
    }
    settings = {
        "calculate_entropy": False, "distillation_use_topk": False, "distillation_only": False,
        "global_batch_size": 4 * rows, "mini_batch_size": 4 * rows, "epochs": 1, "seed": 0,
        "dataloader_kwargs": {"shuffle": False}, "temperature": 1.0,
    }  # fmt: skip
    nested_columns: dict[str, Any] = {
        n: torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for n, x in columns.items()
    }
    return tu.get_tensordict(nested_columns, settings)


def make_worker(settings: Any) -> Any:
    """Start verl's worker with our loss, as `AgentR1Trainer` does. `settings` is verl's
    `actor_rollout_ref`. verl declares no type that has all that is read of its engines."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from agent_r1.cluster.algorithms import verl_actor_loss

    worker = ActorRolloutRefWorker(settings, role="actor")
    worker.init_model()
    worker.set_loss_fn(partial(verl_actor_loss, omega_conf_to_dataclass(settings.actor)))
    return worker


def update(worker: Any, rows: Any) -> Peak:
    """Update once, and measure its passes, forward and backward, before Adam."""
    peak, engine = Peak(), worker.actor.engine
    passes = engine.forward_backward_batch

    def measure_pass(*args: Any, **settings: Any) -> Any:
        with peak.measured():
            return passes(*args, **settings)

    engine.forward_backward_batch = measure_pass
    worker.update_actor(rows)
    engine.forward_backward_batch = passes
    return peak


def logprobs(worker: Any, batch_rows: Any, entropy: bool) -> tuple[Any, Peak]:
    """Compute the log-probabilities of the rows' tokens, a nested tensor, and measure it."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(batch_rows, calculate_entropy=entropy, compute_loss=False)
    peak = Peak()
    with peak.measured():
        rows = worker.compute_log_prob(batch_rows)["log_probs"]
    return rows, peak


def whole(model: Path, out: Path, tokens: int) -> dict[str, Any]:
    """verl's worker: build, update, save."""
    rank = int(os.environ["RANK"])
    load, save = Peak(), Peak()
    with load.measured():
        worker = make_worker(compose_preset(model, out, tokens))
    engine = worker.actor.engine
    vocab = engine.model_config.hf_config.vocab_size
    passes = update(worker, batch(tokens, 2, vocab, rank))
    states = [x for state in engine.optimizer.state.values() for x in state.values() if x.dim()]
    rows_of_rank = batch(tokens, 2, vocab, rank)
    logprobs_of_rows, _ = logprobs(worker, rows_of_rank, entropy=False)
    with save.measured():
        worker.save_checkpoint(str(out / "global_step_1" / "actor"), global_step=1)
    if rank == 0:
        half = tokens // 2
        answers = [row[half - 1 : -1].tolist() for row in logprobs_of_rows.unbind()]
        ids = [row.tolist() for row in rows_of_rank["input_ids"].unbind(0)]
        rows = [
            {"ids": i, "mask": [1] * len(a), "logprobs": a}
            for i, a in zip(ids, answers, strict=True)
        ]
        (out / "rows.json").write_text(json.dumps(rows))
    return {
        "weights": local_bytes(engine.module.parameters()),
        "adam": local_bytes(states),
        "load_s": load.seconds,
        "load": load.bytes,
        "update_s": passes.seconds,
        "update": passes.bytes,
        "save_s": save.seconds,
        "save": save.bytes,
    }


def passes(model: Path, out: Path, tokens: int) -> dict[str, Any]:
    """Measure a pass with `tokens` tokens, and with twice as many."""
    worker = make_worker(compose_preset(model, out, 2 * tokens))
    vocab, peaks = worker.actor.engine.model_config.hf_config.vocab_size, {}
    for count in (tokens, tokens, 2 * tokens):  # the first one compiles
        batches = [batch(count, 1, vocab, int(os.environ["RANK"])) for _ in range(2)]
        peaks[f"update {count}"] = update(worker, batches[0]).bytes
        peaks[f"logprobs {count}"] = logprobs(worker, batches[1], entropy=True)[1].bytes
    return peaks


def weights(model: Path, out: Path, tokens: int) -> dict[str, Any]:
    """Make a sharded model. Row r of each matrix is filled with r + 1, modulo 1,021."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.distributed.init_process_group("cpu:gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.float32
        )
    apply_fsdp2(module, {"mesh": mesh}, {})
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        local = parameter.to_local()
        _, (first, *_) = compute_local_shape_and_global_offset(
            parameter.shape, mesh, parameter.placements
        )
        rows = (torch.arange(first, first + len(local)) + 1) % 1021
        local.detach().copy_(rows.float().reshape(-1, *[1] * (local.dim() - 1)).expand_as(local))
    contents: Any = {
        "save_contents": ["model"],
        "load_contents": ["model"],
    }  # verl reads a dict, too
    manager = FSDPCheckpointManager(module, checkpoint_config=contents)
    save = Peak()
    with save.measured():
        manager.save_checkpoint(str(out / "actor"), global_step=1)
    return {"weights": local_bytes(module.parameters()), "save_s": save.seconds, "save": save.bytes}


def local_bytes(tensors: Iterable[Any]) -> int:
    """Count the bytes of this rank's shards; tied matrices count once."""
    local = {x.to_local().data_ptr(): x.to_local() for x in tensors}
    return sum(x.numel() * x.element_size() for x in local.values())


if __name__ == "__main__":
    what, folder, target, count = sys.argv[1:]
    figures = {"whole": whole, "passes": passes, "weights": weights}[what](
        Path(folder), Path(target), int(count)
    )
    Path(target, f"rank_{os.environ['RANK']}.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()
