"""Print lines and progress bars; without a terminal, plain lines."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, TextIO

from agent_r1.ground.clean import clean

if TYPE_CHECKING:
    from rich.console import Console  # it takes longer to import than most lines take to print


@cache
def console() -> Console:
    """Return the console of this process's standard output."""
    from agent_r1.ground.clean_console import CleanConsole

    return CleanConsole(highlight=False, soft_wrap=True)


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print a line (default: on standard output), without control characters of others' words."""
    print(clean(text), file=stream, flush=True)


class OnlyProgress(io.StringIO):
    """A standard output for `redirect_stdout` that shows progress, and hides all other lines."""

    def __init__(self, stream: TextIO):
        super().__init__()
        self.stream = stream
        self.lines = 0

    def show(self, line: str) -> None:
        """Show a line of progress."""
        self.lines += 1
        print(f"\n{line}", end="", file=self.stream, flush=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Yield `advance(note="")` of a progress bar; without a terminal it prints some lines."""
    if sys.stdout.isatty():
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        with Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console(),
            transient=True,
        ) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda note="": bar.update(task, advance=1, note=note)
        return
    done = 0
    last = time.monotonic()

    def advance(note: str = "") -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last > 10:
            last = time.monotonic()
            line = f"  {title} {done}/{total} {note}".rstrip()
            if isinstance(sys.stdout, OnlyProgress):
                sys.stdout.show(line)
            else:
                print(line, file=sys.stdout, flush=True)

    yield advance


def duration(seconds: float) -> str:
    """Format seconds as `54 s`, `3 min 05 s` or `2 h 10 min`."""
    seconds = max(0, round(seconds))
    if seconds < 100:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
