"""Train each example of the tutorials on three seeds; write its figures into its page.

Each example is followed as its page says, in an empty folder, with one thread. It must learn: the
mean test score of the seeds rises by more than the 95 % interval of the difference. A page has a
line that begins with `<!-- figures NAME -->`; the rest of this line is written here. The curve is
the mean reward of each training step; its last three steps must lie above its first three.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.ground.files import write_whole
from agent_r1.ground.machine import describe_machine

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Example:
    """Hold an example: its page, its files, and its training command."""

    page: Path
    files: dict[str, str]
    train: list[str]
    script: str = ""
    """A file to run before, which writes the questions."""


@dataclass(frozen=True)
class Played:
    """Hold what a run of an example has recorded."""

    before: dict[str, Any]
    """The part of the eval card that is sampled at temperature 1. Greedy decoding would hide the
    mixture of good and bad plays, which RL improves."""
    after: dict[str, Any]
    curve: list[float]
    """Mean reward of each step."""


def examples() -> dict[str, Example]:
    """Read the examples from their pages."""
    environment = TUTORIAL / "your-own-environment.md"
    class_code, words_code = blocks(environment, "python")[:2]
    by_class, by_words = commands(environment)[:2]
    gym = ROOT / "recipes" / "gym" / "README.md"
    corridor = (gym.parent / "corridor.py").read_text(encoding="utf-8")
    data_page = TUTORIAL / "your-own-data.md"
    mcp = ROOT / "recipes" / "mcp" / "README.md"
    mcp_files: dict[str, str] = {}
    for name in ("prices.py", "shopping.py"):
        mcp_files[name] = (mcp.parent / name).read_text(encoding="utf-8")
    mcp_train = [words for words in commands(mcp) if "env.tools=[prices]" in words]
    invoices = {"invoices.py": blocks(data_page, "python")[1]}
    return {
        "questions": Example(data_page, invoices, commands(data_page)[0], "invoices.py"),
        "mcp": Example(mcp, mcp_files, mcp_train[0]),
        "class": Example(environment, {"treasure.py": class_code}, by_class),
        "words": Example(
            environment, {"treasure.py": class_code, "words.py": words_code}, by_words
        ),
        "gym": Example(gym, {"corridor.py": corridor}, commands(gym)[0]),
    }


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of a page's `agent-r1 train` commands."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    words = [shlex.split(line) for line in lines]
    return [line[1:] for line in words if line[:2] == ["agent-r1", "train"]]


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, example in examples().items():
        figures |= run_example(name, example)
    return figures


def run_example(name: str, example: Example) -> dict[str, Any]:
    """Train an example on three seeds, and write its figures into its page."""
    began = _cpu_seconds()
    runs = [play(example, seed) for seed in SEEDS]
    seconds = round((_cpu_seconds() - began) / len(SEEDS))
    before = fmean(run.before["score"] for run in runs)
    after = fmean(run.after["score"] for run in runs)
    errors = [error(card) for run in runs for card in (run.before, run.after)]
    noise = 1.96 * math.hypot(*errors) / len(SEEDS)
    if after - before <= noise:
        raise AssertionError(f"{name}: {before:.3f} -> {after:.3f}, within {noise:.3f}")
    curve = [round(fmean(rewards), 3) for rewards in zip(*[run.curve for run in runs], strict=True)]
    if fmean(curve[-3:]) <= fmean(curve[:3]):
        raise AssertionError(f"{name}: the reward does not rise: {curve}")
    each = ", ".join(f"{run.before['score']:.2f} -> {run.after['score']:.2f}" for run in runs)
    write_figures(name, example.page, f"{before:.2f} -> {after:.2f}", each, seconds)
    print(f"{name}: {each}", flush=True)
    return {
        f"{name}_before": round(before, 3),
        f"{name}_after": round(after, 3),
        f"{name}_noise": round(noise, 3),
        f"{name}_cpu_seconds": seconds,
        f"{name}_curve": curve,
    }


def _cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def error(card: dict[str, Any]) -> float:
    """Return the standard error of a card's score."""
    low, high = card["score_ci95"]
    return (high - low) / 2 / 1.96


def play(example: Example, seed: int) -> Played:
    """Follow an example in an empty folder."""
    folder = Path(tempfile.mkdtemp())
    try:
        for file, code in example.files.items():
            (folder / file).write_text(code, encoding="utf-8")
        # One thread repeats to the last bit, and several runs share a machine better.
        settings = [*example.train[1:], f"--seed={seed}", "--run=example", "trainer.threads=1"]
        steps = [["-m", "agent_r1", "train", *settings, "--plain"]]
        for words in (["--before", *settings], settings):
            steps[0] += ["then", "eval", *words]  # in one process, which imports once
        if example.script:
            steps.insert(0, [example.script])
        # The page's `python` is the one that runs this.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"AGENT_R1_HOME": str(folder), "PATH": path}
        for words in steps:
            command = [sys.executable, *words]
            done = subprocess.run(
                command, cwd=folder, env=environment, check=False, capture_output=True, text=True
            )
            if done.returncode:
                last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise AssertionError(f"{' '.join(words[:3])}: {last_line}")
        run = folder / "runs" / "example"
        before, after = [
            json.loads((run / name).read_text(encoding="utf-8"))["sampled"]
            for name in ("eval_before.json", "eval.json")
        ]
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        curve = [json.loads(line)["critic/score/mean"] for line in lines]
        return Played(before, after, curve)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_figures(name: str, page: Path, mean: str, each: str, seconds: int) -> None:
    """Replace the line of figures in a page."""
    text = page.read_text(encoding="utf-8")
    line = (
        f"<!-- figures {name} -->The mean sampled test score of three seeds rose: {mean} ({each}). "
        f"A seed took {seconds} CPU seconds with its evaluations ({describe_machine()}, one "
        "thread)."
    )
    pattern = re.compile(rf"^<!-- figures {name} -->.*$", re.MULTILINE)
    if not pattern.search(text):
        raise AssertionError(f"{page.name} has no line for the figures of {name}")
    write_whole(page, pattern.sub(line.replace("\\", r"\\"), text))
