"""Run the tests that are too dear for `make test`, and properties with 300 examples.

The tests have the marker `long`. `make test` takes 60 examples of each property.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SELECTIONS = {
    "long": ["-m", "long and not cluster"],
    "long_of_verl": ["-m", "long and cluster"],
    "properties": ["-m", "hypothesis", "--hypothesis-profile=long"],
}


def run() -> dict[str, int]:
    return {f"{name}_passed": read_passes(words) for name, words in SELECTIONS.items()}


def read_passes(words: list[str]) -> int:
    """Return how many tests passed. Raises AssertionError if one failed or was skipped."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    print(f"  {' '.join(words)}: {last}", flush=True)
    count = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and count and "skipped" not in last, last
    return int(count[1])
