"""Check that the probe refuses no preset that needs no download: each trains one step.

Before RL, a probe plays 64 training questions (cold_start/probe.py). It refuses a start that never
succeeds, and a start whose groups are all equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
AGENT = [sys.executable, "-m", "agent_r1"]
PRESETS = (
    "small",
    "smoke",
    "discover",
    "restock",
    "support",
    "two-tools",
    "tinymath",
    "tinyquest",
    "tinycode",
    "geohop",
    "hotpotqa-tiny",
    "template",
)
"""`template` is what `agent-r1 new` writes."""


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for preset in PRESETS:
        figures |= start(preset)
    return figures


def start(preset: str) -> dict[str, Any]:
    """Train a preset for one step. Return its probe's mean score and share of equal groups."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-starts-") as folder:
        home = Path(folder)
        environment = os.environ | {"AGENT_R1_HOME": folder}
        choice = ["--preset", preset]
        if preset == "template":
            subprocess.run([*AGENT, "new", "task"], cwd=home, env=environment, check=True)
            choice = ["--recipe", "task"]
        if preset == "hotpotqa-tiny":
            make = [sys.executable, str(ROOT / "tests" / "hotpotqa_tiny" / "make.py"), "questions"]
            subprocess.run(make, cwd=home, env=environment, check=True)
            choice.append("data.source=questions")
        settings = ["trainer.steps=1", "trainer.eval_every=0", "trainer.threads=1"]
        command = [*AGENT, "train", "grpo", *choice, *settings, "--plain"]
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise AssertionError(f"{preset}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        [file] = (home / "artifacts").glob(".probe-*.json")
        probe = json.loads(file.read_text())
    print(f"{preset}: score {probe['score']:.2f}, {probe['equal']:.0%} equal", flush=True)
    name = preset.replace("-", "_")
    return {f"{name}_score": round(probe["score"], 3), f"{name}_equal": round(probe["equal"], 3)}
