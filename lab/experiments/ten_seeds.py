r"""Train a preset with ten seeds that no one could choose: docs/lab/discover.json.

python -m lab.experiments.ten_seeds COMMIT                   all ten, one after the other
python -m lab.experiments.ten_seeds COMMIT --only 0 2 4      some of them, such as half on each core
python -m lab.experiments.ten_seeds COMMIT --preset smoke    another preset: docs/lab/smoke.json
python -m lab.experiments.ten_seeds COMMIT --algorithm ppo   docs/lab/discover-ppo.json
python -m lab.experiments.ten_seeds --table                  only print the table

COMMIT froze the settings. Seed i is SHA-256 of "COMMIT i", so seeds cannot be tried until lucky.
Each run has one thread and an empty home. It is evaluated on 500 questions of its own test world
before RL, when greedy validation first reached .9, and at the end. Before and after, each question
is sampled eight times at temperature 1, too; after also at .5 and .25. A preset with one sample of
a question (smoke) has greedy scores only. CPU seconds are of whole commands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agent_r1.config.presets import DEFAULT
from agent_r1.evaluation.reliability import student_quantile
from lab.experiments.seed_files import keep_seed, read_seeds

FILE = Path(__file__).parents[2] / "docs" / "lab" / f"{DEFAULT}.json"
"""Of the default preset; the others' are next to it."""
LOWER = ("0.5", "0.25")
"""Temperatures below 1. There an agent is more reliable: how much of that is learned?"""
KIND = re.compile(r"val-aux/\w+/([\w-]+)/acc/mean@1")
RUN = "frozen"
AGENT = [sys.executable, "-m", "agent_r1"]
AGENT_LINE = re.compile(r"an agent: greedy validation ([.\d]+) at step (\d+)")
COLUMNS = (
    ("before", "greedy"),
    ("before", "pass^8"),
    ("agent", "greedy"),
    ("after", "greedy"),
    ("after", "mean"),
    ("after", "pass@8"),
    ("after", "pass^8"),
)


def children_seconds() -> float:
    """Return the CPU seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
    kinds = {kind: scores["em"] for kind, scores in card["by_kind"].items()}
    figures: dict[str, Any] = {"greedy": card["em"], "kinds": kinds}
    if "conditions" in card:
        figures["conditions"] = {text: part["score"] for text, part in card["conditions"].items()}
    samples = card.get("reliability")
    if not samples:
        return figures
    return figures | {
        "mean": samples["mean@8"],
        "pass@8": samples["pass@8"],
        "pass^8": samples["pass^8"],
    }


def read_steps(file: Path) -> dict[str, Any]:
    """Return what a run's metrics.jsonl says of its steps. Entropy: nats per sampled token."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    seconds = [line["timing_s/step"] for line in lines if "timing_s/step" in line]
    entropies = [line["actor/entropy"] for line in lines if "actor/entropy" in line]
    tokens = [line["rollout/decode_tokens"] for line in lines if "rollout/decode_tokens" in line]
    return {
        "steps": len(entropies),
        "first_entropy": round(entropies[0], 4),
        "last_entropy": round(entropies[-1], 4),
        "sampled_tokens": sum(tokens),
        "seconds": round(sum(seconds), 1),
    }


def read_validation(file: Path) -> dict[str, dict[str, float]]:
    """Return the greedy EM of each validation, by kind of question: step -> kind -> EM."""
    curve = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        kinds = {kind[1]: value for key, value in line.items() if (kind := KIND.match(key))}
        if kinds:
            curve[str(line["training/global_step"])] = kinds
    return curve


def sample_tests(home: Path, model: list[str], temperature: str) -> dict[str, Any]:
    """Sample each test question eight times. `model`: options of eval that name a model."""
    out = home / f"temperature-{temperature}"
    run_stage("eval", *model, "--temperature", temperature, "--samples", "8", "--out", str(out))
    return read_card(out / "1.json")


def test_score(home: Path, step: int | None) -> float:
    """Return the test EM of the checkpoint of `step`, or of the last one."""
    folder = home / "runs" / RUN / "checkpoints"
    checkpoint = folder / f"step_{step:06d}" if step else max(folder.glob("step_*"))
    out = home / "cards"
    run_stage("eval", "--model", str(checkpoint / "model"), "--out", str(out), "--samples", "1")
    return json.loads((out / "1.json").read_text())["em"]


def measure(what: list[str], seed: int, home: Path, temperatures: list[str]) -> dict[str, Any]:
    """Train and evaluate one seed in `home`. `what`: algorithm, preset and settings."""
    os.environ["AGENT_R1_HOME"] = str(home)
    config = [*what, "--seed", str(seed)]
    run = [*config, "--run", RUN]
    folder = home / "runs" / RUN
    start_cpu = 0.0
    for stage in ("data", "index", "cold-start"):
        start_cpu += run_stage(stage, *config)[1]
    _, before_cpu = run_stage("eval", "--before", *run)
    output, train_cpu = run_stage("train", *run, "--plain")
    _, after_cpu = run_stage("eval", *run)
    facts: dict[str, Any] = {
        "seed": seed,
        "before": read_card(folder / "eval_before.json"),
        "after": read_card(folder / "eval.json"),
        "steps": read_steps(folder / "metrics.jsonl"),
        "validation": read_validation(folder / "metrics.jsonl"),
        "cpu_seconds": {
            "start": round(start_cpu, 1),
            "before": before_cpu,
            "train": train_cpu,
            "after": after_cpu,
        },
    }
    if "pass^8" not in facts["after"]:
        return facts
    facts["after_at"] = {at: sample_tests(home, run, at) for at in temperatures}
    match = AGENT_LINE.search(output)
    step = int(match[2]) if match else None
    facts["agent"] = {"step": step, "greedy": test_score(home, step)}
    return facts


def table(seeds: dict[str, dict[str, Any]]) -> str:
    """Return the table: a line for each seed, then mean, interval and least."""
    runs = [seeds[number] for number in sorted(seeds, key=int)]
    columns = [c for c in COLUMNS if all(c[1] in run.get(c[0], {}) for run in runs)]
    values = {column: [run[column[0]][column[1]] for run in runs] for column in columns}
    lines = ["| seed | " + " | ".join(f"{when}: {what}" for when, what in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for place, run in enumerate(runs):
        lines.append(line(str(run["seed"]), [f"{values[c][place]:.3f}" for c in columns]))
    lines.append(line("mean", [f"{fmean(values[c]):.3f}" for c in columns]))
    lines.append(line("95 % interval", [interval(values[c]) for c in columns]))
    lines.append(line("least", [f"{min(values[c]):.3f}" for c in columns]))
    lines.append(line("most", [f"{max(values[c]):.3f}" for c in columns]))
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
    parser.add_argument("--preset", default=DEFAULT)
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--only", type=int, nargs="+", default=range(10), metavar="I")
    parser.add_argument("--name", help="of the file (default: preset, and the algorithm)")
    parser.add_argument("--temperatures", nargs="*", default=LOWER, metavar="T")
    parser.add_argument("--table", action="store_true")
    arguments, settings = parser.parse_known_args()
    suffix = "" if arguments.algorithm == "grpo" else f"-{arguments.algorithm}"
    file = FILE.with_name(f"{arguments.name or arguments.preset + suffix}.json")
    what = [arguments.algorithm, "--preset", arguments.preset, *settings]
    for i in () if arguments.table else arguments.only:
        record = json.loads(file.read_text()) if file.is_file() else {}
        if record.get("commit", arguments.commit) != arguments.commit:
            parser.error(f"{file} has the seeds of commit {record['commit']}; move it away")
        if str(i) in record.get("seeds", {}):
            continue
        with tempfile.TemporaryDirectory() as home:
            facts = measure(what, seed_of(arguments.commit, i), Path(home), arguments.temperatures)
        keep_seed(file, {"commit": arguments.commit}, i, facts)
        print(json.dumps(facts), flush=True)
    seeds = read_seeds(file)
    if len(seeds) > 1:  # one has no interval
        print(table(seeds))


if __name__ == "__main__":
    main()
