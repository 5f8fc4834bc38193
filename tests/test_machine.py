"""How the threads of a product wait for each other: spinning, or asleep next to other programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agent_r1.ground.machine import cores, idle_cores

SAY = (
    "import os; from agent_r1.ground import machine\n"
    "{before}machine.choose_waiting()\n"
    "print(os.environ.get('OMP_WAIT_POLICY'))"
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc/stat")


def policy(before: str = "", **variables: str) -> str:
    """Say what a fresh process chooses. `before`: code that it runs first."""
    unset = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-c", SAY.format(before=before)], env=environment | variables,
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


@pytest.fixture
def other_programs():
    """A program that computes without end, for each core."""
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores())
    ]
    yield
    for program in programs:
        program.kill()
        program.wait()


def test_threads_sleep_next_to_other_programs(other_programs):
    assert idle_cores(0.5) < 0.5
    assert policy() == "passive"
    # What the user has chosen stays.
    assert policy(OMP_WAIT_POLICY="active") == "active"
    assert policy(GOMP_SPINCOUNT="1000") == "None"
    # PyTorch has read its environment; a change would only reach child processes.
    assert policy("import sys; sys.modules['torch'] = None\n") == "None"


@pytest.mark.parametrize(("in_use", "chosen"), [(0.0, "None"), (0.3, "None"), (0.7, "passive")])
def test_threads_spin_on_an_idle_machine(in_use, chosen):
    """Others use `in_use` cores. From half a core on, threads sleep."""
    assert policy(f"machine.idle_cores = lambda seconds: machine.cores() - {in_use}\n") == chosen


def test_a_system_without_proc_keeps_the_default():
    code = "def idle_cores(seconds): raise FileNotFoundError('/proc/stat')\n"
    assert policy(f"{code}machine.idle_cores = idle_cores\n") == "None"
