"""The bar of the suite: a session of its own is measured, and fails for the right reasons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

A_CHILD = """
import subprocess, sys

def test_a_child_that_is_waited_for():
    burn = "import time\\nwhile time.process_time() < 1: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
"""
GRANDCHILD = """
import pathlib, time
while time.process_time() < 1:
    pass
pathlib.Path("burnt").touch()
time.sleep(60)
"""
PARENT = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "grandchild.py"])
while not pathlib.Path("burnt").exists():
    time.sleep(0.1)
"""
AN_ORPHAN = """
import subprocess, sys

def test_a_grandchild_whose_parent_ends():
    subprocess.run([sys.executable, "parent.py"], check=True)
"""
SKIPS = """
import pytest

def test_of_a_package():
    pytest.importorskip("no_such_package")

def test_of_a_machine():
    pytest.skip("needs a GPU")
"""


def session(folder: Path, source: str, budget: dict, *words: str) -> tuple[int, dict, str]:
    """Run pytest with the plugin alone: exit code, CPU seconds of each row, and what it printed."""
    (folder / "test_it.py").write_text(source)
    (folder / "parent.py").write_text(PARENT)
    (folder / "grandchild.py").write_text(GRANDCHILD)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "budget.json").write_text(json.dumps(budget))
    command = [sys.executable, "-m", "pytest", "-p", "cpu_seconds", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "--cpu-budget=budget.json", *words],
        cwd=folder, env=own | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    rows = re.findall(r"^ *([\d.]+) +[\d.]+  (\S.*)$", done.stdout, re.MULTILINE)
    return done.returncode, {row: float(seconds) for seconds, row in rows}, done.stdout


@pytest.mark.parametrize("words", [[], ["-n1"]], ids=["one process", "xdist"])
def test_children_count_and_the_whole_is_judged(tmp_path, words):
    code, rows, said = session(tmp_path, A_CHILD, {"test_it.py": 100.0}, *words)
    assert code == 0 and rows["test_it.py"] >= 1, said
    code, _, said = session(tmp_path, A_CHILD, {"test_it.py": 0.1}, *words)
    assert code == 1 and "1 passed" in said and "too much CPU time" in said


def test_a_slower_machine_may_take_longer(tmp_path):
    slower = {"test_it.py": 0.1, "reference work": 1e-6}  # the budget's machine was much faster
    code, _, said = session(tmp_path, A_CHILD, slower)
    assert code == 0, said
    faster = {"test_it.py": 0.1, "reference work": 1e6}
    assert session(tmp_path, A_CHILD, faster)[0] == 1


def test_a_process_counts_that_nobody_waits_for(tmp_path):
    code, rows, said = session(tmp_path, AN_ORPHAN, {"test_it.py": 100.0})
    assert code == 0 and rows["test_it.py"] >= 1, said


def test_a_missing_package_fails_and_another_machine_does_not(tmp_path):
    code, _, said = session(tmp_path, SKIPS, {})
    assert code == 1 and "2 skipped" in said
    assert "test_of_a_package was skipped" in said and "test_of_a_machine was" not in said


def test_a_budget_is_what_was_used_and_a_tenth(tmp_path):
    code, rows, said = session(tmp_path, A_CHILD, {"test_gone.py": 99.0}, "--write-cpu-budget")
    budget = json.loads((tmp_path / "budget.json").read_text())
    assert code == 0 and "test_gone.py" not in budget, said
    assert budget["test_it.py"] == pytest.approx(1.1 * rows["test_it.py"], abs=0.2)
