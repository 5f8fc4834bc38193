"""Habits with files that every room has: write whole or not at all, valid JSON, and know a file by its hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write beside `path` and rename: whoever reads it finds the old text or the new one, never half of it.

    Raises OSError, and leaves nothing beside `path` then.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def json_line(record: Any) -> str:
    """One line of a JSON-lines file. NaN and infinity, which Python would write and JSON does not know, become null."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(json.loads(json.dumps(record), parse_constant=lambda name: None)) + "\n"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
