"""Train the preset `sprint` with ten seeds that no one could choose: docs/lab/sprint.json.

python -m lab.experiments.ten_seeds COMMIT               all ten, one after the other
python -m lab.experiments.ten_seeds COMMIT --only 0 2 4  some of them, such as half on each core
python -m lab.experiments.ten_seeds --table              only print the table

COMMIT froze the settings. Seed i is SHA-256 of "COMMIT i", so seeds cannot be tried until lucky.
Each run has one thread and an empty home. It is evaluated on 500 questions of its own test world
before RL, when greedy validation first reached .9, and at the end. Before and after, each question
is sampled eight times at temperature 1, too; after also at .5 and .25. CPU seconds are of whole
commands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agent_r1.rollout.reliability import student_quantile
from lab.experiments.seed_files import keep_seed, read_seeds
from lab.experiments.thirty_seconds import AGENT, FOUND, children_seconds, test_score

FILE = Path(__file__).parents[2] / "docs" / "lab" / "sprint.json"
LOWER = ("0.5", "0.25")
"""Temperatures below 1. There an agent is more reliable: how much of that is learned?"""
COLUMNS = (
    ("before", "greedy"),
    ("before", "pass^8"),
    ("agent", "greedy"),
    ("after", "greedy"),
    ("after", "mean"),
    ("after", "pass@8"),
    ("after", "pass^8"),
)


def seed_of(commit: str, i: int) -> int:
    """Return the i-th seed that follows from a commit."""
    return int(hashlib.sha256(f"{commit} {i}".encode()).hexdigest()[:8], 16)


def run_stage(*words: str) -> tuple[str, float]:
    """Run one command. Return what it printed, and its CPU seconds."""
    began = children_seconds()
    command = [*AGENT, *words, "trainer.threads=1"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout, round(children_seconds() - began, 1)


def read_card(file: Path) -> dict[str, Any]:
    """Return the figures of an eval card that the table shows."""
    card = json.loads(file.read_text())
    samples = card["reliability"]
    return {
        "greedy": card["em"],
        "mean": samples["mean@8"],
        "pass@8": samples["pass@8"],
        "pass^8": samples["pass^8"],
    }


def sample_tests(home: Path, model: list[str], temperature: str) -> dict[str, Any]:
    """Sample each test question eight times. `model`: options of eval that name a model."""
    out = home / f"temperature-{temperature}"
    run_stage("eval", *model, "--temperature", temperature, "--samples", "8", "--out", str(out))
    return read_card(out / "1.json")


def measure(seed: int, home: Path) -> dict[str, Any]:
    """Train and evaluate one seed in `home`."""
    os.environ["AGENT_R1_HOME"] = str(home)
    config = ["--preset", "sprint", "--seed", str(seed), "grpo"]
    run = [*config, "--run", "sprint"]
    folder = home / "runs" / "sprint"
    start_cpu = 0.0
    for stage in ("data", "index", "cold-start"):
        start_cpu += run_stage(stage, *config)[1]
    _, before_cpu = run_stage("eval", "--before", *run)
    said, train_cpu = run_stage("train", *run, "--plain")
    _, after_cpu = run_stage("eval", *run)
    cards = {temperature: sample_tests(home, run, temperature) for temperature in LOWER}
    facts = {
        "seed": seed,
        "before": read_card(folder / "eval_before.json"),
        "after": read_card(folder / "eval.json"),
        "after_at": cards,
        "cpu_seconds": {
            "start": round(start_cpu, 1),
            "before": before_cpu,
            "train": train_cpu,
            "after": after_cpu,
        },
    }
    found = FOUND.search(said)
    step = int(found[2]) if found else None
    facts["agent"] = {"step": step, "greedy": test_score(home, step)}
    return facts


def table(seeds: dict[str, dict[str, Any]]) -> str:
    """Return the table: a line for each seed, then mean, interval and least."""
    runs = [seeds[number] for number in sorted(seeds, key=int)]
    values = {column: [run[column[0]][column[1]] for run in runs] for column in COLUMNS}
    lines = ["| seed | " + " | ".join(f"{when}: {what}" for when, what in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for place, run in enumerate(runs):
        lines.append(line(str(run["seed"]), [f"{values[c][place]:.3f}" for c in COLUMNS]))
    lines.append(line("mean", [f"{fmean(values[c]):.3f}" for c in COLUMNS]))
    lines.append(line("95 % interval", [interval(values[c]) for c in COLUMNS]))
    lines.append(line("least", [f"{min(values[c]):.3f}" for c in COLUMNS]))
    return "\n".join(lines)


def line(name: str, cells: list[str]) -> str:
    """Return a line of the table."""
    return f"| {name} | " + " | ".join(cells) + " |"


def interval(values: list[float]) -> str:
    """Return Student's 95 % interval of the mean over seeds, within 0 and 1."""
    half = half_width(values)
    low = max(0.0, fmean(values) - half)
    high = min(1.0, fmean(values) + half)
    return f"{low:.3f} to {high:.3f}"


def half_width(values: list[float]) -> float:
    """Return half of the length of Student's 95 % interval of a mean."""
    return student_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def main() -> None:
    """Measure the seeds that the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commit", nargs="?", help="full hash of the commit that froze the settings")
    parser.add_argument("--only", type=int, nargs="+", default=range(10), metavar="I")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for i in () if arguments.table else arguments.only:
        known = json.loads(FILE.read_text()) if FILE.is_file() else {}
        if known.get("commit", arguments.commit) != arguments.commit:
            parser.error(f"{FILE} has the seeds of commit {known['commit']}; move it away")
        if str(i) in known.get("seeds", {}):
            continue
        with tempfile.TemporaryDirectory() as home:
            facts = measure(seed_of(arguments.commit, i), Path(home))
        keep_seed(FILE, {"commit": arguments.commit}, i, facts)
        print(json.dumps(facts), flush=True)
    print(table(read_seeds(FILE)))


if __name__ == "__main__":
    main()
