"""Stop a verl worker (SIGSTOP): the run must end within `verl.stall_timeout_s`, cleanly.

It names the cause and leaves no process or file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run() -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "long",
        "tests/test_verl_train.py::test_a_stopped_worker_is_noticed",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    if done.returncode != 0 or "1 passed" not in last:
        raise AssertionError(last)
    return {"tests": 1}
