"""Play agents through the gateway: 500 episodes equal to our loop's, and 1,000 hostile ones.

The tests of recipes/gateway do the same with tens of episodes. Here they run in pytest, because the
world and the model are its fixtures; `AGENT_R1_EPISODES` says how many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = "recipes/gateway/tests/test_at_size.py"


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        environment = os.environ | {"AGENT_R1_FIGURES": str(figures), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", TESTS],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-3000:])
        return json.loads(figures.read_text())
