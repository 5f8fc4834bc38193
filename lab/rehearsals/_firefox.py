"""Drive headless Firefox over WebDriver BiDi: open a page from the disk, evaluate JavaScript.

In: the address of a page. Out: values of expressions. Needs Debian's firefox-esr. The interface is
the part of `_chromium.py` that lab/rehearsals/browser.py uses.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

READY = "WebDriver BiDi listening on "
SETTINGS = 'user_pref("javascript.options.wasm_simd_avx", false);\n'
"""Firefox 140 mixes AVX instructions with older ones. On an Intel Xeon (virtual machine) 1,518
tokens then took over 16 CPU seconds, and without AVX .14 s."""


class Firefox:
    """One tab."""

    def __init__(self, socket: Any):
        self.socket, self.numbers = socket, itertools.count(1)
        self.version = self.send("session.new", capabilities={})["capabilities"]["browserVersion"]
        self.tab = self.send("browsingContext.getTree")["contexts"][0]["context"]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(self.socket.recv(timeout=600))).get("id") != number:
            pass
        assert answer["type"] == "success", answer
        return answer["result"]

    def open(self, address: str) -> None:
        self.send("browsingContext.navigate", context=self.tab, url=address, wait="complete")

    def js(self, expression: str) -> Any:
        """Return the value of an expression. Raises AssertionError if it throws."""
        answer = self.send(
            "script.evaluate",
            expression=f"JSON.stringify({expression}) ?? 'null'",
            target={"context": self.tab},
            awaitPromise=True,
        )
        assert answer["type"] == "success", answer
        return json.loads(answer["result"]["value"])

    def wait(self, expression: str, seconds: float = 120) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, (
                f"after {seconds:.0f} seconds, this is not true: {expression}"
            )
            time.sleep(0.2)
        return value


@contextmanager
def firefox(more_settings: str = "") -> Iterator[Firefox]:
    """Start Firefox with more lines of user.js. Raises AssertionError if it is not installed."""
    program = shutil.which("firefox-esr")
    assert program, "firefox-esr is not installed: apt-get install firefox-esr"
    with tempfile.TemporaryDirectory() as profile, Path(profile, "log").open("w+") as log:
        Path(profile, "user.js").write_text(SETTINGS + more_settings)
        flags = ["--headless", "--no-remote", "--remote-debugging-port=0", "--profile", profile]
        running = subprocess.Popen([program, *flags], stderr=log)
        try:
            address = _address(Path(profile, "log"))
            with connect(f"{address}/session", max_size=None) as socket:
                yield Firefox(socket)
        finally:
            running.terminate()
            running.wait()


def _address(log: Path) -> str:
    """Wait for the address that Firefox prints."""
    for _ in range(600):
        text = log.read_text()
        if READY in text:
            return text.partition(READY)[2].split()[0]
        time.sleep(0.1)
    raise AssertionError("Firefox does not listen")
