"""Read and write docs/lab's files of figures by seed, to which several processes may add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_r1 import write_whole


def read_seeds(file: Path) -> dict[str, Any]:
    """Return what a file of figures has, by seed."""
    return json.loads(file.read_text())["seeds"] if file.is_file() else {}


def keep_seed(
    file: Path, about: dict[str, Any], number: int | str, figures: dict[str, Any]
) -> None:
    """Add a seed's figures to a file. It is read again: another process may have added one."""
    content = about | {"seeds": read_seeds(file) | {str(number): figures}}
    write_whole(file, json.dumps(content, indent=1, sort_keys=True) + "\n")
