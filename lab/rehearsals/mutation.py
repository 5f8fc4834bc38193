"""Check that a test catches every deliberate fault in the algorithm.

Faults are in masks, rewards, advantages, losses, rows, chat format, sampling and resume. A `Fault`
(faults.yaml) replaces one text in a copy of the source, and its tests run on the copy. At least one
must fail; without the fault all pass. If a refactoring moves the text, move the fault along
(tests/test_long.py finds lost ones). A new rule of the algorithm needs a fault.

Verdicts are kept in build/, by the commit and the fault: an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

from lab.rehearsals.__main__ import commit

ROOT = Path(__file__).parents[2]
PACKAGES = {"agent_r1": ROOT / "src/agent_r1", "agent_r1_recipes": ROOT / "recipes"}
"""Packages of a copy, side by side as in an installation, and their folders in the checkout."""


@dataclass(frozen=True)
class Fault:
    """Replace one text in `file`, which is below src/agent_r1 or in recipes/.

    `tests` are arguments of pytest. A test file is below tests/ or in recipes/.
    """

    area: str
    says: str
    file: str
    old: str
    new: str
    tests: str


def read_faults() -> list[Fault]:
    kinds = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
    return [
        Fault(k, f["fault"], f["in"], f["text"], f["becomes"], f["tests"])
        for k, fs in kinds.items()
        for f in fs
    ]


FAULTS = read_faults()


def place(fault: Fault) -> tuple[str, str]:
    """Return the package of the fault's file, and the file below it."""
    if fault.file.startswith("recipes/"):
        return "agent_r1_recipes", fault.file.removeprefix("recipes/")
    return "agent_r1", fault.file


def plant(fault: Fault) -> str:
    """Return the file's text with the fault. Raises ValueError unless the old text occurs once."""
    package, file = place(fault)
    text = (PACKAGES[package] / file).read_text()
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.file} holds {fault.old!r} {text.count(fault.old)} times; carry the fault along"
        )
    return text.replace(fault.old, fault.new)


def file_of(word: str) -> Path:
    return ROOT / word if word.startswith("recipes/") else ROOT / "tests" / word


def pytest(source: Path, arguments: list[str]) -> tuple[int, str]:
    """Run tests, which import the package from `source`; return exit code and output."""
    words = [str(file_of(word)) if word.endswith(".py") else word for word in arguments]
    settings = os.environ | {
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        *words,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def check(fault: Fault, copies: SimpleQueue[Path]) -> str:
    """Return how pytest ended with a fault: `caught`, `SURVIVED`, or why it proves nothing."""
    source = copies.get()
    path = source.joinpath(*place(fault))
    before = path.read_text()
    try:
        path.write_text(plant(fault))
        code, output = pytest(source, shlex.split(fault.tests))
    except subprocess.TimeoutExpired:
        return "no verdict: too slow"
    finally:
        path.write_text(before)
        copies.put(source)
    if code not in (0, 1):
        return f"no verdict: pytest ended with {code}: {output[-500:]}"
    summary = next(
        (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))),
        "no test failed",
    )
    verdict = "caught" if code else "SURVIVED"
    print(f"  {verdict:8} {fault.area}: {fault.says} ({summary.split(' - ')[0]})", flush=True)
    return verdict


def unite(selections: Iterable[str]) -> list[str]:
    """Unite the selections of each file: to start pytest takes longer than most tests."""
    words: dict[str, set[str]] = {}
    for selection in selections:
        files, _, word = selection.partition(" -k ")
        words.setdefault(files, set()).add(word)
    return [
        files if "" in of_files else f"{files} -k '{' or '.join(sorted(of_files))}'"
        for files, of_files in sorted(words.items())
    ]


def passes(source: Path, tests: str) -> str:
    """Return `passes` if tests pass without a fault, else what happened."""
    try:
        code, output = pytest(source, shlex.split(tests))
    except subprocess.TimeoutExpired:
        return "no verdict: too slow"
    return "passes" if code == 0 else f"fails: {output[-500:]}"


class Verdicts:
    """Verdicts of a commit, kept in a file with a line for each."""

    def __init__(self, file: Path):
        self.file = file
        self.by_name: dict[str, str] = {}
        if file.is_file():
            for line in file.read_text().splitlines():
                self.by_name |= json.loads(line)

    def add(self, name: str, find: Callable[[], str]) -> str:
        """Return the verdict of that name; find and keep it if it is not known."""
        if name not in self.by_name:
            self.by_name[name] = verdict = find()
            if not verdict.startswith("no verdict"):
                with self.file.open("a") as file:
                    file.write(json.dumps({name: verdict}) + "\n")
        return self.by_name[name]


def run() -> dict[str, Any]:
    workers = min(2, len(os.sched_getaffinity(0)))
    state = commit()
    file = ROOT / "build" / f"mutation-{state}.jsonl"
    file.parent.mkdir(exist_ok=True)
    if state.endswith("+"):  # files differ from the commit, so an earlier verdict is of others
        file.unlink(missing_ok=True)
    verdicts = Verdicts(file)
    selections = unite(fault.tests for fault in FAULTS)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for name in (*map(str, range(workers)), "clean"):
            source = Path(folder) / name
            for package, folder_here in PACKAGES.items():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(folder_here, source / package, ignore=ignore)
            if name != "clean":
                copies.put(source)

        def with_fault(fault: Fault) -> str:
            name = f"{fault.area}: {fault.says}: {fault.old} -> {fault.new}"
            return verdicts.add(name, lambda: check(fault, copies))

        def without_fault(tests: str) -> str:
            return verdicts.add(tests, lambda: passes(Path(folder) / "clean", tests))

        outcomes = list(pool.map(with_fault, FAULTS))
        clean = list(pool.map(without_fault, selections))
    wrong = [
        f"{fault.area}: {fault.says}: {verdict}"
        for fault, verdict in zip(FAULTS, outcomes, strict=True)
        if verdict != "caught"
    ]
    wrong += [
        f"without any fault, {tests}: {verdict}"
        for tests, verdict in zip(selections, clean, strict=True)
        if verdict != "passes"
    ]
    if wrong:
        raise AssertionError(f"{len(wrong)} verdicts are wrong or open: {'; '.join(wrong)}")
    return {
        "faults": len(FAULTS),
        "caught": outcomes.count("caught"),
        "by area": dict(Counter(fault.area for fault in FAULTS)),
    }
