"""Measure how long the whole default run takes, and that of commit 10d2e0f, in alternation.

python -m lab.experiments.whole_runs OLD 701 702 703     one after the other, on an idle machine
python -m lab.experiments.whole_runs --table             only print what was measured

A run is what `speedrun-nodocker.sh` does after installation: doctor, data, index, cold start, the
evaluation before, RL, the evaluation after, and the report. It is one process in an empty home,
with as many threads as the machine has cores; the packages are in the page cache. OLD is a checkout
of 10d2e0f (`git worktree add OLD 10d2e0f`), which draws one sample of a test question, where
`sprint` draws eight. All figures are in docs/lab/whole-runs.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import fmean

from benchmarks.startup import STAGES

from agent_r1.ground.machine import describe_machine
from lab.experiments.seed_files import keep_seed, read_seeds
from lab.experiments.ten_seeds import half_width
from lab.experiments.thirty_seconds import AGENT, children_seconds

FILE = Path(__file__).parents[2] / "docs" / "lab" / "whole-runs.json"
OF_A_RUN = ("eval", "train", "report")
"""Commands that have a run's name."""


def whole_command(preset: str, seed: int) -> list[str]:
    """Return the command that joins all stages by `then`, as speedrun-nodocker.sh does."""
    words: list[str] = []
    for stage in STAGES:
        words += ["then"] if words else []
        name, *options = stage.split()
        words += [name, *options, "grpo", "--preset", preset, "--seed", str(seed)]
        words += ["--run", "whole"] if name in OF_A_RUN else []
    return [*AGENT, *words]


def measure(preset: str, seed: int, source: Path | None = None) -> dict[str, float]:
    """Make a whole run. Return its seconds. `source`: a checkout other than this."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"AGENT_R1_HOME": folder}
        if source:
            environment["PYTHONPATH"] = f"{source / 'src'}:{source}"
        cpu = children_seconds()
        start = time.perf_counter()
        command = whole_command(preset, seed)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
    cpu_seconds = children_seconds() - cpu
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}


def summary(seeds: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the means of both, and the ratio with Student's 95 % interval."""
    lines = [f"{len(seeds)} pairs"]
    for figure in ("seconds", "cpu_seconds"):
        new = [run["sprint"][figure] for run in seeds.values()]
        old = [run["10d2e0f"][figure] for run in seeds.values()]
        ratios = [a / b for a, b in zip(new, old, strict=True)]
        middle = fmean(ratios)
        half = half_width(ratios)
        ratio = f"{middle:.3f} ({middle - half:.3f} to {middle + half:.3f})"
        lines.append(f"{figure}: {fmean(new):.1f}, 10d2e0f {fmean(old):.1f}; ratio {ratio}")
    return "\n".join(lines)


def main() -> None:
    """Measure the seeds in alternation, and print means and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", nargs="?", type=Path, help="a checkout of 10d2e0f")
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for seed in () if arguments.table else arguments.seeds:
        figures = {
            "sprint": measure("sprint", seed),
            "10d2e0f": measure("laptop", seed, arguments.old.resolve()),
        }
        keep_seed(FILE, {"machine": describe_machine()}, seed, figures)
        print(seed, figures, flush=True)
    print(summary(read_seeds(FILE)))


if __name__ == "__main__":
    main()
