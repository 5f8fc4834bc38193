"""Measure how long the preset `sprint` takes to an agent, over several seeds.

python -m lab.experiments.thirty_seconds 301 302 303      one after the other, on an idle machine
python -m lab.experiments.thirty_seconds 301 302 --old OLD
python -m lab.experiments.thirty_seconds --table          only print what was measured

The clock starts with the process of `agent-r1 train grpo --preset sprint`, which makes data, index
and cold start, too. It stops when the process prints that validation has reached .9: by then the
weights are on disk, and a chat can open them. Afterwards these weights are evaluated on the 500
questions of the seed's test world, about which there is no training question and no demonstration.

OLD is a checkout of commit 10d2e0f (`git worktree add OLD 10d2e0f`). After each seed, its preset
`laptop` makes an agent in the same way, stage by stage in one process. Its clock stops when a line
of `train` has a validation of .9. All figures are in docs/lab/thirty-seconds.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from agent_r1.ground.machine import describe_machine
from agent_r1.watch.log import AGENT_SCORE
from lab.experiments.seed_files import keep_seed, read_seeds

FILE = Path(__file__).parents[2] / "docs" / "lab" / "thirty-seconds.json"
AGENT = [sys.executable, "-m", "agent_r1"]
AGENT_LINE = re.compile(r"an agent: greedy validation ([.\d]+) at step (\d+)")
STEP = re.compile(r"^step +(\d+)/.* val ([.\d]+)")
"""A line of `train --plain`."""


def children_seconds() -> float:
    """Return the CPU seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def sprint_command(seed: int) -> list[str]:
    """Return the command of today: `train` makes what it lacks."""
    run = ["grpo", "--preset", "sprint", "--seed", str(seed), "--run", "sprint"]
    return [*AGENT, "train", *run, "--plain"]


def laptop_command(seed: int) -> list[str]:
    """Return the command of 10d2e0f, with all stages in one process."""
    config = ["grpo", "--preset", "laptop", "--seed", str(seed)]
    words = list(AGENT)
    for stage in ("data", "index", "cold-start"):
        words += [stage, *config, "then"]
    return [*words, "train", *config, "--run", "sprint", "--plain"]


def read_line(line: str) -> tuple[int, float] | None:
    """Return step and validation from a line that says that there is an agent."""
    match = AGENT_LINE.search(line)
    if match:
        return int(match[2]), float(match[1])
    step = STEP.search(line)
    if step and float(step[2]) >= AGENT_SCORE:
        return int(step[1]), float(step[2])
    return None


def train(command: list[str]) -> dict[str, Any]:
    """Train in AGENT_R1_HOME until there is an agent, at most to the last step."""
    facts: dict[str, Any] = {"seconds": None, "step": None, "validation": None}
    cpu = children_seconds()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        agent = read_line(line)
        if agent and facts["seconds"] is None:
            facts["seconds"] = round(time.perf_counter() - start, 1)
            facts["step"], facts["validation"] = agent
            # Ctrl-C: the step that has begun ends and is saved.
            process.send_signal(signal.SIGINT)
    process.wait()
    facts["cpu_seconds"] = round(children_seconds() - cpu, 1)
    return facts


def test_score(home: Path, step: int | None) -> float:
    """Return the test EM of the checkpoint of `step`, or of the last one."""
    folder = home / "runs" / "sprint" / "checkpoints"
    checkpoint = folder / f"step_{step:06d}" if step else max(folder.glob("step_*"))
    out = home / "cards"
    command = [*AGENT, "eval", "--model", str(checkpoint / "model"), "--out", str(out)]
    subprocess.run([*command, "--samples", "1"], check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "1.json").read_text())["em"]


def measure(command: list[str], source: Path | None = None) -> dict[str, Any]:
    """Make an agent in an empty home, and evaluate it. `source`: a checkout other than this."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGENT_R1_HOME"] = folder
        if source:
            os.environ["PYTHONPATH"] = f"{source / 'src'}:{source}"
        facts = train(command)
        os.environ.pop("PYTHONPATH", None)
        facts["test_em"] = None if source else test_score(Path(folder), facts["step"])
    return facts


def summary(seeds: dict[str, dict[str, Any]]) -> str:
    """Return median and worst of today's seconds, and of the ratios to 10d2e0f."""
    seconds = [run["sprint"]["seconds"] for run in seeds.values()]
    lines = [f"seconds to an agent: median {median(seconds)}, worst {max(seconds)}"]
    scores = [run["sprint"]["test_em"] for run in seeds.values()]
    lines.append(f"test EM: {sorted(scores)}")
    pairs = [run for run in seeds.values() if "10d2e0f" in run]
    if pairs:
        for figure in ("seconds", "cpu_seconds"):
            ratios = [run["sprint"][figure] / run["10d2e0f"][figure] for run in pairs]
            old = median(run["10d2e0f"][figure] for run in pairs)
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"{figure}, {len(pairs)} pairs: 10d2e0f has {old}; ratio {spread}")
    return "\n".join(lines)


def main() -> None:
    """Measure the seeds, and print median and worst."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--old", type=Path, help="a checkout of 10d2e0f, to alternate with")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    for seed in () if arguments.table else arguments.seeds:
        figures = {"sprint": measure(sprint_command(seed))}
        if arguments.old:
            figures["10d2e0f"] = measure(laptop_command(seed), arguments.old.resolve())
        keep_seed(FILE, {"machine": describe_machine()}, seed, figures)
        print(seed, json.dumps(figures), flush=True)
    print(summary(read_seeds(FILE)))


if __name__ == "__main__":
    main()
