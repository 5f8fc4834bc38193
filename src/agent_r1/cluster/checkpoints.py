"""Convert verl's shards to our checkpoint in float32, and check it against the trainer.

In: verl's own checkpoint (a file of DTensors per rank). Out: `checkpoints/step_NNNNNN` in Hugging
Face's format, for evaluation, export and chat.

verl's files stay in `checkpoints/unverified_NNNNNN` until they are converted, checked and hashed. A
full disk, a kill or a failed check loses nothing: `--resume` finishes that folder first
(launch.py).
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
from agent_r1.model.policies import load_transformers, token_logprobs
from agent_r1.training.checkpoint import save_checkpoint
from agent_r1.training.fsdp_merge import write_merged
from agent_r1.training.run_dir import RunDir

PARITY = "logprobs.json"
"""Next to verl's shards: rows of tokens, and the trainer's log-probabilities when it saved."""
LIMITS = {"float32": {"max": 1e-3}, "bfloat16": {"mean": 0.05, "p99": 0.3}}
"""Most that rounding changes a log-probability, by the trainer's dtype. A single token proves
nothing in bfloat16: two batchings of the same weights have differed by .66."""
WRONG = 0.05
"""Mean difference that proves other weights: those give several nats, and bfloat16 .01 to .02."""
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt")


def keep_shards(
    run: RunDir, step: int, shards: Path, dtype: str, rows: list[dict[str, Any]]
) -> Path:
    """Move verl's checkpoint, with the rows for its check, to where nothing removes it."""
    (shards / PARITY).write_text(json.dumps({"dtype": dtype, "rows": rows}))
    folder = run.checkpoints / f"unverified_{step:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    shards.rename(folder)
    return folder


def newest_shards(run: RunDir) -> Path | None:
    """Return the newest kept shards if they are ahead of the newest checkpoint."""
    latest = run.latest_checkpoint()
    folders = sorted(run.checkpoints.glob("unverified_*"))
    if not folders:
        return None
    if latest is not None and _step(folders[-1]) <= _step(latest):
        return None
    return folders[-1]


def _step(folder: Path) -> int:
    return int(folder.name.split("_")[1])


def finish(
    run: RunDir,
    config: Config,
    start_model: Path,
    shards: Path,
    phase: Callable[[str], None] = lambda name: None,
) -> dict[str, float]:
    """Make a checkpoint from kept shards, with shape, tokenizer and template of `start_model`.

    Returns the converted model's differences from the trainer as metrics; `checkpoint/unverified`
    is set if rounding does not explain them. `phase` is called with each phase. Raises AgentR1Error
    if the weights are not the trainer's or the disk is full; `kept` still exists then.
    """
    step = _step(shards)
    differences: dict[str, float] = {}

    def write_model(folder: Path) -> None:
        phase("checkpoint: merge")
        shutil.copytree(start_model, folder, ignore=shutil.ignore_patterns(*WEIGHT_PATTERNS))
        write_merged(shards / "actor", start_model, folder)
        phase("checkpoint: check")
        differences.update(check_conversion(folder, shards))
        # verl's own folder takes the place of the local loop's trainer.pt.
        shutil.copytree(shards, folder.parent / f"global_step_{step}", copy_function=_link)
        phase("checkpoint: hash")

    save_checkpoint(
        run.checkpoints,
        step,
        write_model,
        {"engine": "verl"},
        fingerprint(config),
        config.trainer.keep_checkpoints,
    )
    for old in run.checkpoints.glob("unverified_*"):
        if _step(old) <= step:
            shutil.rmtree(old)
    return {f"checkpoint/{name}": value for name, value in differences.items()}


def check_conversion(model: Path, shards: Path) -> dict[str, float]:
    """Return the differences of the converted `model` from the trainer.

    Raises AgentR1Error if the weights are other ones.
    """
    record = json.loads((shards / PARITY).read_text())
    differences = compare_logprobs(model, record["rows"], getattr(torch, record["dtype"]))
    if not differences["mean"] <= WRONG:  # negated, so that NaN fails
        raise AgentR1Error(
            f"{shards}: the converted model differs from the trained one by "
            f"{differences['mean']:.1e} in mean log-probability; its weights were not written "
            "correctly. The shards are kept there: --resume converts them again, and continues "
            "from the checkpoint before if you delete that folder",
            code="wrong_conversion",
        )
    limits = LIMITS[record["dtype"]]
    is_close = all(differences[name] <= limit for name, limit in limits.items())
    metrics = {f"logprob_diff_{name}": value for name, value in differences.items()}
    metrics["unverified"] = float(not is_close)
    return metrics


def _link(source: str, target: str) -> None:
    """Link the file, to save space; copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def compare_logprobs(
    model: Path, rows: list[dict[str, Any]], dtype: torch.dtype
) -> dict[str, float]:
    """Compare the log-probabilities in `rows` with those of `transformers`, at the sampled tokens.

    The weights are rounded to `dtype` first, as FSDP rounds them for each pass. A published model
    lies on the grid of bfloat16, where updates of 1e-6 do not show until there are many. In float32
    all show, in one direction (mean .05 after one update of a 0.5B model, and .09 after two: `make
    long`, part real_shapes).

    Other tokens, such as a tool's text, may be almost impossible for the model, and rounding moves
    them by whole nats. A row ends with the response, which log-probabilities and mask belong to.
    """
    network = load_transformers(model)
    differences = []
    for parameter in network.parameters():
        parameter.data.copy_(parameter.data.to(dtype))
    for row in rows:
        logprobs = torch.tensor(row["logprobs"])
        mask = torch.tensor(row["mask"]).bool()
        ours = token_logprobs(network, row["ids"])[-len(logprobs) :]
        differences.append((ours - logprobs)[mask].abs())
    all_ = torch.cat(differences)
    return {"mean": all_.mean().item(), "p99": all_.quantile(0.99).item(), "max": all_.max().item()}
