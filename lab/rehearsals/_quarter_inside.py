"""Run the quarter of an hour in small sizes: `python -m lab.rehearsals._quarter_inside OUT KIND`.

The Python is one that has only what the GPU's machine has; the rest comes from the unpacked
archives. KIND is `parts` (all of them), `second` (the second quarter), or `long` (a training that
does not end by itself). It imports nothing but the standard library before the parts start.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from benchmarks.gpu import quarter_hour
from benchmarks.gpu.quarter_hour import Part

SMALL_WORLD = ["data.test=6", "data.val=4"]
"""The archive of the world must be made with these settings, too."""
SMALL = [
    *SMALL_WORLD,
    *["cold_start.warm_steps=2", "cold_start.mix_tokens=512", "rollout.max_tokens_per_turn=24"],
    *["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "trainer.threads=2"],
]
FEW_STEPS = ["trainer.steps=2", "trainer.eval_every=2", "trainer.save_every=1"]
SECOND = [
    "rollout.max_context=4096",
    "trainer.max_tokens_per_microbatch=4096",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "trainer.loggers=[]",
    "rollout.max_tokens_per_turn=24",
]
SLOWER = 10
"""A CPU takes so many times as long as a GPU's machine."""


def reduce(part: Part, words: list[str]) -> Part:
    """Return the part with smaller sizes and more seconds."""
    if "agent_r1" in part.command:
        part = dataclasses.replace(part, command=[*part.command, *words])
    return dataclasses.replace(part, seconds=SLOWER * part.seconds, least=0)


def make_parts(out: Path, kind: str) -> list[Part]:
    if kind == "second":
        return [reduce(part, SECOND) for part in quarter_hour.make_second_parts(out)]
    parts = quarter_hour.make_parts(out)
    if kind == "parts":
        small = [reduce(part, [*SMALL, *FEW_STEPS]) for part in parts]
        # The first of verl's parts ends after a step, so that the other one has one to add.
        return [one_step(part) if part.name == "verl" else part for part in small]
    [local] = [part for part in parts if part.name == "local loop"]
    # A run of its own: that of `parts` has ended, and is not begun again.
    local = dataclasses.replace(local, files={"local.jsonl": f"runs/{kind}/metrics.jsonl"})
    return [reduce(local, [*SMALL, "trainer.steps=500", "--run", kind])]


def one_step(part: Part) -> Part:
    """End training after its first step, as trainer.max_hours does where steps are slow."""
    return dataclasses.replace(part, command=[*part.command, "trainer.max_hours=0.0001"])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    quarter_hour.run_parts(make_parts(folder, sys.argv[2]), folder, float(sys.argv[3]))
