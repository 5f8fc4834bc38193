"""A run of verl in which nothing is learnt ends itself after three steps (trainer.stop_on_collapse), and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

AGENT = Path(sys.prefix) / "bin" / "agent-r1"
SETTINGS = ["data.train=64", "data.cold=64", "data.val=2", "data.test=2", "rollout.prompts_per_step=2"]
SETTINGS += ["rollout.samples_per_prompt=2", "rollout.slots=4", "trainer.steps=6", "trainer.eval_every=0"]
SETTINGS += ["actor.minibatches=1", "trainer.threads=1", "trainer.save_every=1", "trainer.stop_on_collapse=true"]
SETTINGS += ["cold_start.copy_steps=1", "cold_start.mix_steps=1"]  # a model that nobody has taught: all groups agree
SAID = "stopped after step 3 (trainer.stop_on_collapse); no checkpoint is older than that. 3 steps in a row no group had"


def run() -> dict[str, int]:
    """Steps that were made. Raises where the run goes on, or ends for another reason."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-collapse-") as home:
        options, place = ["grpo", "--preset", "smoke", *SETTINGS], os.environ | {"AGENT_R1_HOME": home}
        for command in ("data", "index", "cold-start"):
            subprocess.run([AGENT, command, *options], env=place, check=True)
        train = [AGENT, "train", "--engine", "verl", "--run", "v", "--plain", *options]
        done = subprocess.run(train, env=place, stderr=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in (Path(home) / "runs" / "v" / "metrics.jsonl").read_text().splitlines()]
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode != 1 or SAID not in last or len(lines) != 3 or any(line["reward/em"] for line in lines):
        raise AssertionError(f"exit code {done.returncode} after {len(lines)} steps: {last}")
    return {"steps": len(lines)}
