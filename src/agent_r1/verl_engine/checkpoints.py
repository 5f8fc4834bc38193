"""verl's shards to a checkpoint of ours: the model in Hugging Face's format, float32, checked against the trainer.

In: verl's own checkpoint (for each rank a file of DTensors). Out: `checkpoints/step_NNNNNN`, which evaluation, export and
chat read.

What verl has saved stays in `checkpoints/unverified_NNNNNN` until it has been converted, checked and hashed. A full disk,
a kill or a failed check on the way loses nothing: `--resume` finishes that folder first (launch.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent_r1.config import Config, fingerprint
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.policies import load_transformers, token_logprobs
from agent_r1.training.checkpoint import save_checkpoint
from agent_r1.training.run import RunDir
from agent_r1.training.shards import write_merged

PARITY = "logprobs.json"
"""Beside verl's shards: rows of tokens, and the log-probabilities that the trainer gave them when it saved."""
LIMITS = {"float32": {"max": 1e-3}, "bfloat16": {"mean": 0.05, "p99": 0.3}}
"""Differences in log-probability that rounding explains, by the dtype that the trainer multiplied in. A single token says
nothing in bfloat16: sound runs have been seen with .66 between two batchings of the same weights."""
WRONG = 0.05
"""Mean difference from which the weights are other ones: those give several nats, and bfloat16 .01 to .02."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt")


def keep_shards(run: RunDir, step: int, shards: Path, dtype: str, rows: list[dict[str, Any]]) -> Path:
    """Put verl's whole checkpoint, with the rows that its conversion is checked by, where nothing removes it."""
    (shards / PARITY).write_text(json.dumps({"dtype": dtype, "rows": rows}))
    kept = run.checkpoints / f"unverified_{step:06d}"
    shutil.rmtree(kept, ignore_errors=True)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    shards.rename(kept)
    return kept


def unverified(run: RunDir) -> Path | None:
    """The newest kept shards, if they are ahead of the newest checkpoint."""
    latest = run.latest_checkpoint()
    kept = sorted(run.checkpoints.glob("unverified_*"))
    return kept[-1] if kept and (latest is None or _step(kept[-1]) > _step(latest)) else None


def _step(folder: Path) -> int:
    return int(folder.name.split("_")[1])


def finish(
    run: RunDir, config: Config, start_model: Path, kept: Path, phase: Callable[[str], None] = lambda name: None
) -> dict[str, float]:
    """Make a checkpoint of kept shards: their weights, and all the rest (shape, tokenizer, template) from `start_model`.

    Returns how far the converted model is from the trainer, for the metrics, with `checkpoint/unverified` set when that is
    more than rounding explains. `phase` is told what begins. Raises AgentR1Error when the weights are other ones than the
    trainer's, or the disk full; `kept` is still there then.
    """
    step, found = _step(kept), {}

    def write_model(folder: Path) -> None:
        phase("checkpoint: merge")
        shutil.copytree(start_model, folder, ignore=shutil.ignore_patterns(*WEIGHTS))
        write_merged(kept / "actor", start_model, folder)
        phase("checkpoint: check")
        found.update(check(folder, kept))
        # The state that the local loop keeps in trainer.pt is verl's own folder here.
        shutil.copytree(kept, folder.parent / f"global_step_{step}", copy_function=_link)
        phase("checkpoint: hash")

    save_checkpoint(
        run.checkpoints, step, write_model, {"engine": "verl"}, fingerprint(config), config.trainer.keep_checkpoints
    )
    for old in run.checkpoints.glob("unverified_*"):
        if _step(old) <= step:
            shutil.rmtree(old)
    return {f"checkpoint/{name}": value for name, value in found.items()}


def check(model: Path, kept: Path) -> dict[str, float]:
    """The differences of the converted `model` from the trainer. Raises AgentR1Error when the weights are other ones."""
    saved = json.loads((kept / PARITY).read_text())
    found = differences(model, saved["rows"], getattr(torch, saved["dtype"]))
    if not found["mean"] <= WRONG:  # so that NaN is not let through
        raise AgentR1Error(
            f"{kept}: the converted model differs from the trained one by {found['mean']:.1e} in mean "
            "log-probability; its weights were not written rightly. The shards are kept there: --resume converts them "
            "again, and goes on from the checkpoint before if you delete that folder",
            code="wrong_conversion",
        )
    passed = all(found[name] <= limit for name, limit in LIMITS[saved["dtype"]].items())
    return {f"logprob_diff_{name}": value for name, value in found.items()} | {"unverified": float(not passed)}


def _link(source: str, target: str) -> None:
    """A second name for the file, so that no space is taken twice; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def differences(model: Path, rows: list[dict[str, Any]], dtype: torch.dtype) -> dict[str, float]:
    """Between the log-probabilities in `rows` and those of `transformers`, at the tokens that the policy chose.

    The weights are rounded to `dtype` first, as FSDP rounds them for each pass. A published model lies on the grid of
    bfloat16, where updates of 1e-6 do not show until there are many; in float32 all of them show, and all in one
    direction (.05 in the mean after one update of a model of 0.5B, and .09 after two: `make long`, part real_shapes).

    What it did not choose (a tool's text) it may find next to impossible, and there rounding moves whole nats. The
    response, which log-probabilities and mask are of, ends a row.
    """
    network, found = load_transformers(model), []
    for parameter in network.parameters():
        parameter.data.copy_(parameter.data.to(dtype))
    for row in rows:
        expected, acted = torch.tensor(row["logprobs"]), torch.tensor(row["mask"]).bool()
        found.append((token_logprobs(network, row["ids"])[-len(expected) :] - expected)[acted].abs())
    all_ = torch.cat(found)
    return {"mean": all_.mean().item(), "p99": all_.quantile(0.99).item(), "max": all_.max().item()}
