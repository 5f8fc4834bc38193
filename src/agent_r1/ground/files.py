"""Handle files as all packages do: atomic writes, locks, valid JSON, hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError

from agent_r1.ground.bounds import open_file
from agent_r1.ground.errors import AgentR1Error, first_line

T = TypeVar("T")


def home() -> Path:
    """Return the folder of artifacts/ and runs/: AGENT_R1_HOME, or the working directory."""
    return Path(os.environ.get("AGENT_R1_HOME", "."))


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to `target`, and rename it to `target` at the end.

    Readers of `target` see the old content or all of the new, never half of it; a replaced folder
    is missing for a moment. After an error nothing new remains. Leftovers of a killed process are
    removed first.
    """
    part = target.with_name(f".part-{target.name}")
    remove(part)
    try:
        yield part
        if part.is_dir():  # rename cannot replace a folder that is not empty
            remove(target)
        part.rename(target)
    except OSError as error:
        # A write to a full disk raises an error without a name; `agent-r1` prints this one.
        error.filename = error.filename or str(target)
        raise
    finally:
        remove(part)


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically. Raises OSError."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


RESUME = "; then run it again (a training run: with --resume)"


@contextmanager
def writing(what: object, then: str = "") -> Iterator[None]:
    """Raise AgentR1Error with a remedy if `what` cannot be written.

    Args:
        then: Text after the remedy, for example RESUME.
    """
    try:
        yield
    except (
        OSError,
        SafetensorError,
    ) as error:  # SafetensorError: safetensors raises it for a full disk
        why = getattr(error, "strerror", None) or first_line(error)
        raise AgentR1Error(
            f"cannot write {what} ({why}); free space or fix permissions, or set AGENT_R1_HOME to "
            f"a writable folder{then}",
            code="cannot_write",
        ) from None


@contextmanager
def hold_lock(path: Path, busy: str | None = None, patience_s: float = 0) -> Iterator[None]:
    """Let one process at a time run the block.

    Others wait, or get AgentR1Error with `busy` after `patience_s`. The lock ends with its process,
    so a crash leaves none.
    """
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(path).acquire(timeout=-1 if busy is None else patience_s)
    except Timeout:
        raise AgentR1Error(str(busy), code="locked") from None
    with lock:
        yield


def make_once(target: Path, make: Callable[[Path], T]) -> T | None:
    """Make the file or folder `target` with `make` unless it exists.

    Returns the result of `make`, or None if `target` existed. Of several processes one makes it,
    and the others wait. Raises AgentR1Error if it cannot be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(target.parent / f".lock-{target.name}"):
            if target.exists():
                return None
            with whole(target) as part:
                return make(part)


def json_line(record: Any) -> str:
    """Format one line of a JSON-lines file.

    NaN and infinity, which JSON does not have, become null. Numbers may be NumPy's or one-element
    tensors.
    """
    try:
        return json.dumps(record, allow_nan=False, default=float) + "\n"
    except ValueError:
        return (
            json.dumps(
                json.loads(json.dumps(record, default=float), parse_constant=lambda name: None)
            )
            + "\n"
        )


def sha256(path: Path) -> str:
    """Return the hex digest of a file. Raise ValueError for a pipe or a device."""
    with open_file(path, most_bytes=None) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


SUMS = "SHA256SUMS"
"""Hashes of a published folder's files, one per line, as `sha256sum` writes them."""


def verify_sums(folder: Path) -> None:
    """Compare each file that SHA256SUMS names with its hash.

    Raises AgentR1Error naming the first wrong file.
    """
    for line in (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        file = folder / Path(name).name  # never a file elsewhere
        if not file.is_file() or sha256(file) != digest:
            raise AgentR1Error(
                f"{file} is not the published file (its hash differs from {SUMS}); download the "
                "folder again",
                code="damaged_file",
            )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file, without a half-written last line.

    A missing file gives an empty list. Raises AgentR1Error for damage anywhere else, which our
    crashes never cause.
    """
    if not path.exists():
        return []
    try:
        with open_file(path, most_bytes=None) as file:
            *lines, tail = file.read().decode(errors="replace").split("\n")
    except ValueError as error:  # a pipe, a folder, a device
        raise AgentR1Error(f"{error}; name another file", code="unreadable_file") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines) or tail:
            raise AgentR1Error(
                f"{path}, line {number} is not a JSON object; delete that line or restore the file",
                code="damaged_file",
            )
    return records
