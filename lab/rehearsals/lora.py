"""Train LoRA with verl's real trainer on a CPU: weight sync, checkpoint, resume, export."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from agent_r1.training.fsdp_merge import SHARDS
from lab.rehearsals.verl_worlds import SMALL, TINY

AGENT = Path(sys.prefix) / "bin" / "agent-r1"
WORDS = [
    "grpo",
    "--preset",
    "small",
    *SMALL,
    *TINY,
    "actor.lora_rank=8",
    "actor.lr=3e-3",
    "trainer.save_every=1",
    "actor.entropy_coef=0.01",  # a gradient where all groups agree
    "--engine",
    "verl",
]
APART = 0.05
"""Largest mean difference of log-probabilities between vLLM and the trainer.

verl rounds merged weights to bfloat16.
"""


def run() -> dict[str, float]:
    """Return figures.

    Raises if vLLM or a checkpoint has other weights than the trainer, or if no adapter was trained.
    """
    with tempfile.TemporaryDirectory(prefix="agent-r1-lora-") as home:
        for command in ("data", "index", "cold-start"):
            call(home, command, *WORDS)
        train = ("train", *WORDS, "--run", "v", "--plain")
        call(home, *train)
        run = Path(home) / "runs" / "v"
        largest_B = adapters(run / "checkpoints" / "step_000002")
        shutil.rmtree(run / "checkpoints" / "step_000002")
        call(home, *train, "--resume")
        gap = re.search(
            r"checkpoint and export differ by at most ([\d.e-]+)",
            call(home, "export", "--run", "v"),
        )
        assert gap, "`export` says how far they are apart"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    apart = max(line["training/rollout_logprobs_diff_mean"] for line in lines)
    parity = max(line["checkpoint/logprob_diff_max"] for line in lines)
    losses = sum(line["rollout/lost_episodes"] for line in lines)
    if len(lines) != 2 or apart > APART or not largest_B or losses:
        raise AssertionError(
            f"{len(lines)} steps, log-probabilities {apart:.2g} apart, B {largest_B:.2g}, "
            f"{losses} lost episodes"
        )
    return {
        "logprobs_diff_mean": round(apart, 5),
        "parity_max": round(parity, 6),
        "export_diff_max": float(gap[1]),
        "largest_B": round(largest_B, 5),
    }


def adapters(checkpoint: Path) -> float:
    """Return the largest weight of B in a checkpoint's shards; B starts at zero."""
    [file] = checkpoint.glob(f"global_step_*/actor/{SHARDS}")
    from torch.distributed import tensor as _  # noqa: F401  torch.load needs this import

    state = torch.load(file, map_location="cpu", weights_only=True)
    return max(
        tensor.to_local().abs().max().item() for name, tensor in state.items() if ".lora_B." in name
    )


def call(home: str, *words: str) -> str:
    """Run one command of `agent-r1` and return what it printed."""
    print(f"  {words[0]} ...", flush=True)
    done = subprocess.run(
        [AGENT, *words], env=os.environ | {"AGENT_R1_HOME": home}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"agent-r1 {words[0]}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout
