"""Train the task of 300 questions with default settings, on three seeds.

The cold start of 650 steps learned it by heart. All groups were equal, and validation ended between
.3 and .6. Now seeds 0 to 5 end at .92, .96, .90, .98, .94 and .90, of 50 questions. A seed takes
about 45 CPU seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
LEAST = 0.75  # exact match on 50 validation questions after RL


def run() -> dict[str, float]:
    figures = {f"val_seed_{seed}": train(seed) for seed in SEEDS}
    assert min(figures.values()) >= LEAST, figures
    return figures


def train(seed: int) -> float:
    """Return validation exact match after the last step."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-small-") as home:
        subprocess.run(
            [sys.executable, ROOT / "tests/small_task.py", "--seed", str(seed)],
            env=os.environ | {"AGENT_R1_HOME": home},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = Path(home, "runs/small/metrics.jsonl").read_text().splitlines()
    score = json.loads(lines[-1])["val-core/rows/acc/mean@1"]
    print(f"  seed {seed}: {score:.2f}", flush=True)
    return score
