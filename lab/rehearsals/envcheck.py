"""Find planted reward faults with `agent-r1 env check`, and none in our own worlds.

The faults and their worlds are in recipes/envcheck/tests/planted.py. Each check is a process of its
own, as on the command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes/envcheck/tests"))
import planted  # noqa: E402

WORLDS = (
    "small",
    "restock",
    "support",
    "tinyquest",
    "tinymath",
    "tinycode",
    "two-tools",
    "geohop",
    "webshop-tiny",
    "papers-tiny",
    "files",
    "gym:recipes/gym/corridor.py:Corridor",
)


def check(home: Path, *words: str) -> list[str]:
    """Return the failing verdicts' names."""
    done = subprocess.run(
        [sys.executable, "-m", "agent_r1", "env", "check", *words],
        cwd=ROOT,
        env=os.environ | {"AGENT_R1_HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"env check {' '.join(words)}: {done.stderr[-1000:]}")
    return [line[6:20].strip() for line in done.stdout.splitlines() if line.startswith("fail ")]


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for title in ("TUNED", "HELD_OUT"):
            survivors = []
            faults = getattr(planted, title)
            for number, fault in enumerate(faults):
                words = planted.write_world(home / f"{title}-{number}", fault)
                if not check(home, *words):
                    survivors.append(fault.name)
            caught_count = len(faults) - len(survivors)
            figures[f"{title.lower()}_found"] = f"{caught_count} of {len(faults)}"
            figures[f"{title.lower()}_missed"] = ", ".join(survivors) or "none"
            if caught_count < 9:
                raise RuntimeError(
                    f"{title}: only {caught_count} faults were found; missed {survivors}"
                )
        alarms = []
        for form in ("class", "gym", "reward"):
            words = planted.write_world(home / f"healthy-{form}", None, form)
            alarms += [f"{form}: {name}" for name in check(home, *words)]
        for world in WORLDS:
            alarms += [f"{world}: {name}" for name in check(home, world)]
        figures["healthy_worlds"] = 3 + len(WORLDS)
        figures["false_alarms"] = len(alarms)
        if alarms:
            raise RuntimeError(f"false alarms: {alarms}")
    return figures
