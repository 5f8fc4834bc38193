"""FSDP shards to a model folder in Hugging Face's format, float32, checked against the trainer.

In: verl's `actor/` folder (a file of DTensors for each rank). Out: the folder that evaluation, export and chat read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from agent_r1.errors import AgentR1Error
from agent_r1.training.shards import write_merged

PARITY = "logprobs.json"
"""Beside verl's shards: rows of tokens, and the log-probabilities that the trainer gave them when it saved."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference in log-probability by the dtype that the trainer multiplied in; bfloat16 has 3 digits."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt")


def convert(actor: Path, start_model: Path, out: Path, parity: Path, dtype: str) -> None:
    """Write `out`: the weights in `actor`, and all the rest (shape, tokenizer, template) from `start_model`."""
    shutil.copytree(start_model, out, ignore=shutil.ignore_patterns(*WEIGHTS))
    write_merged(actor, start_model, out)
    difference = largest_difference(out, json.loads(parity.read_text()))
    if difference > TOLERANCE[dtype]:
        raise AgentR1Error(
            f"{out}: the converted model differs from the trained one by {difference:.1e} in log-probability; "
            "its weights were not written rightly"
        )


def largest_difference(model: Path, rows: list[dict]) -> float:
    """Between the log-probabilities in `rows` (of the response, which ends a row) and those of `transformers`."""
    from agent_r1.inference.policies import load_transformers, token_logprobs

    network, worst = load_transformers(model), 0.0
    for row in rows:
        expected = torch.tensor(row["logprobs"])
        worst = max(worst, (token_logprobs(network, row["ids"])[-len(expected) :] - expected).abs().max().item())
    return worst
