"""Run code that calls `asyncio.run` where a loop already runs, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def own_event_loop() -> Iterator[None]:
    """Let the stages call `asyncio.run`, also in a notebook, whose event loop is running already.

    The notebook's loop rests until the stage is over, as it does during any cell of plain code.
    Ctrl-C, or the notebook's stop button, still reaches the stage, because no thread is started.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
