"""Render a stranger's chat template in a process with limits: the outer side.

In: the template's source, and a conversation. Out: its text, or a `RenderError`. `render_inside.py`
is the program that renders. A process is started once for each template and kept: its start takes a
tenth of a second, a rendering less than a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

RENDER_S = 3
"""Seconds of processor time for one rendering, which takes less than a millisecond."""
WAIT_S = 60.0
"""Seconds on the clock after which a rendering counts as hanging, also on a busy machine."""
MEMORY_BYTES = 2**30
"""Memory of the process. Python with jinja2 takes some 30 MB."""
TEXT_BYTES = 2**24
"""Longest answer. A context of a million tokens has some 4 MB."""
MOST_ENDS = 3
"""Processes of one template that may break a limit. A model's template is rendered a dozen times
when it is opened, and each time would cost its seconds."""
MOST_PROCESSES = 4
"""Processes that are kept. A run needs one, a comparison of two models two."""


class RenderError(Exception):
    """A template that refused its messages, failed, or broke a limit."""


class Renderer:
    """A process that renders one template."""

    def __init__(self, template: str, now: datetime):
        self._lock = threading.Lock()
        self._owner = os.getpid()
        files = (jinja2.__file__, markupsafe.__file__)
        folders = {str(Path(file).parents[1]) for file in files}
        program = str(Path(__file__).with_name("render_inside.py"))
        self._process = subprocess.Popen(
            # -I and -S: neither the environment nor the current folder nor site-packages.
            [sys.executable, "-I", "-S", program, *sorted(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        self._template = template
        first: dict[str, Any] = {"template": template, "now": now.isoformat()}
        self._send(first | {"seconds": RENDER_S, "bytes": MEMORY_BYTES})

    @property
    def is_usable(self) -> bool:
        """Return whether the process runs, and is this process's own, not that of a parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def render(self, **words: Any) -> str:
        """Render a conversation. Raise RenderError with the reason in a line."""
        return self._ask(words)["text"]

    def only_copies(self) -> bool:
        """Return whether the template copies contents without looking at them.

        A template that cannot be parsed does not.
        """
        try:
            return self._ask(None)["copies"]
        except RenderError:
            return False

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # A request that a dead process did not take is still in the pipe's buffer.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _ask(self, request: Any) -> dict[str, Any]:
        with self._lock:
            ends = _ENDS.get(self._template, [])
            if len(ends) >= MOST_ENDS:
                raise RenderError(ends[-1])
            try:
                self._send(request)
                answer = json.loads(self._read_line())
            except (OSError, ValueError) as error:
                self.close()
                why = f"its process ended: {error}"
                _ENDS[self._template] = [*ends, why]
                raise RenderError(why) from None
        if "error" in answer:
            raise RenderError(f"{answer['error']}: {answer['why']}")
        return answer

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None  # a pipe
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def _read_line(self) -> bytes:
        """Read a line. Raise OSError after `WAIT_S`, at its end, and beyond `TEXT_BYTES`."""
        assert self._process.stdout is not None  # a pipe
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + WAIT_S
        parts: list[bytes] = []
        size = 0
        while not (parts and parts[-1].endswith(b"\n")):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"not done after {WAIT_S:.0f} s")
            part = os.read(descriptor, 2**16)
            if not part:
                raise OSError(f"it used more than {RENDER_S} s of processor time, or its memory")
            parts.append(part)
            size += len(part)
            if size > TEXT_BYTES:
                raise OSError(f"it wrote more than {TEXT_BYTES} bytes")
        return b"".join(parts)


_RENDERERS: OrderedDict[tuple[str, datetime], Renderer] = OrderedDict()
_ENDS: dict[str, list[str]] = {}
"""Template -> why its processes ended."""
_LOCK = threading.Lock()


def renderer_of(template: str, now: datetime) -> Renderer:
    """Return the process of a template; it is started at the first call."""
    key = (template, now)
    with _LOCK:
        renderer = _RENDERERS.pop(key, None)
        if renderer is None or not renderer.is_usable:
            renderer = Renderer(template, now)
        _RENDERERS[key] = renderer
        while len(_RENDERERS) > MOST_PROCESSES:
            _, oldest = _RENDERERS.popitem(last=False)
            oldest.close()
    return renderer
