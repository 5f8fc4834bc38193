"""Habits with files that every room has: write whole or not at all, one process at a time, valid JSON, know a file by its hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from agent_r1.ground.errors import AgentR1Error, first_line

T = TypeVar("T")


def home() -> Path:
    """Where artifacts/ and runs/ lie: AGENT_R1_HOME, or the working directory."""
    return Path(os.environ.get("AGENT_R1_HOME", "."))


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path beside `target` to make a file or a folder at; at the end it takes `target`'s place.

    Whoever reads `target` finds what was there before or all of the new, never half of it; a folder that is replaced is
    missing for a moment. Where something is raised, nothing new is left; what a killed process has left is removed first.
    """
    part = target.with_name(f".part-{target.name}")
    remove(part)
    try:
        yield part
        if part.is_dir():  # a folder cannot be renamed over one that is not empty
            remove(target)
        part.rename(target)
    finally:
        remove(part)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """A text file, whole or not at all. Raises OSError."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


RESUME = "; then continue with --resume"


@contextmanager
def writing(what: object, then: str = "") -> Iterator[None]:
    """Raises AgentR1Error with the remedy where `what` cannot be written; `then` is said after it, for example RESUME."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the second is the library's word for a full disk
        why = getattr(error, "strerror", None) or first_line(error)
        raise AgentR1Error(
            f"cannot write {what} ({why}); free space or mend permissions, or set AGENT_R1_HOME to a folder of yours{then}",
            code="cannot_write",
        ) from None


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """One process at a time is within. Others wait, or are refused with `busy` (AgentR1Error). The lock dies with its process:
    a crash leaves none behind."""
    try:
        lock = FileLock(path).acquire(timeout=-1 if busy is None else 0)
    except Timeout:
        raise AgentR1Error(str(busy), code="locked") from None
    with lock:
        yield


def make_once(target: Path, make: Callable[[Path], T]) -> T | None:
    """Have `make` write the file or folder `target` unless it is there. Return what it returned, and None if it was there.

    Of several processes one makes it, and the others wait. Raises AgentR1Error where it cannot be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / f".lock-{target.name}"):
            if target.exists():
                return None
            with whole(target) as part:
                return make(part)


def json_line(record: Any) -> str:
    """One line of a JSON-lines file. NaN and infinity, which Python would write and JSON does not know, become null; numbers
    may be NumPy's or one-element tensors."""
    try:
        return json.dumps(record, allow_nan=False, default=float) + "\n"
    except ValueError:
        return json.dumps(json.loads(json.dumps(record, default=float), parse_constant=lambda name: None)) + "\n"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a half-written last line; an empty list when there is no file.

    Raises AgentR1Error for damage anywhere else, which no crash of ours leaves behind.
    """
    if not path.exists():
        return []
    *lines, tail = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines) or tail:
            raise AgentR1Error(
                f"{path}, line {number} is not a JSON object; delete that line or restore the file", code="damaged_file"
            )
    return records
