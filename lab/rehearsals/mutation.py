"""Check that a test catches every deliberate fault in the algorithm.

Faults are in masks, rewards, advantages, losses, rows, chat format, sampling and resume. A `Fault`
(faults.yaml) replaces one text in a copy of the source, and its tests run on the copy. At least one
must fail; without the fault all pass. If a refactoring moves the text, move the fault along
(tests/test_long.py finds lost ones). A new rule of the algorithm needs a fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

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


def check(fault: Fault, copies: SimpleQueue[Path]) -> bool:
    """Return whether a test fails. Raises if pytest could not run, which proves nothing."""
    source = copies.get()
    path = source.joinpath(*place(fault))
    before = path.read_text()
    try:
        path.write_text(plant(fault))
        code, output = pytest(source, fault.tests.split())
    finally:
        path.write_text(before)
        copies.put(source)
    if code not in (0, 1):
        raise RuntimeError(f"{fault.says}: pytest ended with {code}: {output[-500:]}")
    summary = next(
        (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))),
        "no test failed",
    )
    print(
        f"  {'caught  ' if code else 'SURVIVED'} {fault.area}: {fault.says} "
        f"({summary.split(' - ')[0]})",
        flush=True,
    )
    return code == 1


def run() -> dict[str, Any]:
    workers = min(2, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            source = Path(folder) / str(number)
            for package, folder_here in PACKAGES.items():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(folder_here, source / package, ignore=ignore)
            copies.put(source)
        selections = sorted({fault.tests for fault in FAULTS})
        with ThreadPoolExecutor(workers) as pool:
            clean = list(
                pool.map(lambda tests: pytest(Path(folder) / "0", tests.split()), selections)
            )
            if red := [tests for tests, (code, _) in zip(selections, clean, strict=True) if code]:
                raise RuntimeError(f"these fail without any fault: {', '.join(red)}")
            verdicts = list(pool.map(lambda fault: check(fault, copies), FAULTS))
    survivors = [
        f"{fault.area}: {fault.says}"
        for fault, is_caught in zip(FAULTS, verdicts, strict=True)
        if not is_caught
    ]
    if survivors:
        raise AssertionError(
            f"{len(survivors)} faults were caught by no test: {'; '.join(survivors)}"
        )
    return {
        "faults": len(FAULTS),
        "caught": sum(verdicts),
        "by area": dict(Counter(fault.area for fault in FAULTS)),
    }
