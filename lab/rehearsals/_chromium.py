"""Drive headless Chromium with mouse and keys, over its DevTools protocol.

In: the address of a page. Out: values of JavaScript expressions, and messages on the console. Needs
Debian's chromium.
"""

from __future__ import annotations

import base64
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
from urllib.request import urlopen

from websockets.sync.client import connect

KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Space": 32,
}


class Browser:
    """One tab."""

    def __init__(self, socket: Any):
        self.socket, self.numbers, self.console = socket, itertools.count(1), []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result.

        Messages on the console that come meanwhile are kept.
        """
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := json.loads(self.socket.recv(timeout=120))).get("id") != number:
            if message.get("method") in (
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Log.entryAdded",
            ):
                self.console.append(json.dumps(message["params"])[:600])
        assert "error" not in message, message["error"]
        return message["result"]

    def open(self, address: str, width: int = 1300, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Emulation.setEmulatedMedia", features=[scheme, still])
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Return the value of an expression. Raises AssertionError if it throws."""
        reply = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, expression: str, seconds: float = 120) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, (
                f"after {seconds:.0f} seconds, this is not true: {expression}"
            )
            time.sleep(0.05)
        return value

    def press(self, *names: str) -> None:
        for name in names:
            key = {
                "key": " " if name == "Space" else name,
                "code": name,
                "windowsVirtualKeyCode": KEYS[name],
            }
            text = {"Enter": "\r", "Space": " "}.get(name)
            self.send(
                "Input.dispatchKeyEvent", type="keyDown", **key, **({"text": text} if text else {})
            )
            self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    def type(self, text: str) -> None:
        """Replace the text of the field that has the focus."""
        self.js("document.activeElement.select()")
        self.send("Input.insertText", text=text)

    def place(self, element: str) -> tuple[float, float]:
        """Scroll to an element, and return its middle."""
        self.js(f"({element}).scrollIntoView({{ block: 'center' }})")
        x, y = self.js(
            f"(({{ x, y, width, height }}) => [x + width / 2, y + height / "
            f"2])(({element}).getBoundingClientRect())"
        )
        return x, y

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {"button": "left", "buttons": 1} | (
            {"clickCount": 1} if kind != "mouseMoved" else {}
        )
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def click(self, element: str) -> None:
        x, y = self.place(element)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def drag(self, slider: str, share: float) -> None:
        """Drag a range from where its thumb is to a share of its width."""
        _, y = self.place(slider)
        left, width, now = self.js(
            "((s) => [s.getBoundingClientRect().x, s.offsetWidth, (s.value - s.min) / (s.max - "
            f"s.min)])({slider})"
        )
        start, end = (
            left + 8 + at * (width - 16) for at in (now, share)
        )  # a thumb of 16 pixels stays inside
        self.mouse("mousePressed", start, y)
        for part in (0.5, 1):
            self.mouse("mouseMoved", start + part * (end - start), y)
        self.mouse("mouseReleased", end, y)

    def picture(self, file: Path) -> None:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        file.write_bytes(base64.b64decode(picture))


@contextmanager
def chromium(*more_flags: str) -> Iterator[Browser]:
    """Start Chromium without a network. Raises AssertionError if it is not installed."""
    program = shutil.which("chromium")
    assert program, "chromium is not installed: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile:
        offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            offline,
            *more_flags,
        ]
        command = [program, *flags, f"--user-data-dir={profile}", "about:blank"]
        running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            port = Path(profile, "DevToolsActivePort")
            for _ in range(600):
                if port.is_file() and port.read_text():
                    break
                time.sleep(0.1)
            with urlopen(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json") as response:
                [tab] = [one for one in json.load(response) if one["type"] == "page"]
            with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Browser(socket)
        finally:
            running.terminate()
            running.wait()
