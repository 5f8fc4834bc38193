"""Hold 2,050 half-open connections to the search service, and ask it for one answer.

Each connection sends the beginning of a request, and a further header line every two seconds. The
service accepts 2,000 connections at once, so that it refuses the honest client at first. It must
answer after the deadline for headers, and all half-open connections must be closed then.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from agent_r1.ground.machine import raise_file_limit
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import build_index
from agent_r1.search.service import HEADERS_S

CONNECTIONS = 2050
LINE_EVERY_S = 2.0
PATIENCE_S = 60.0
"""Seconds until the honest client gives up. Without a deadline, it never had an answer in 40."""
SERVE = """
import sys
from pathlib import Path
from agent_r1.ground.machine import raise_file_limit
from agent_r1.search.index import PassageIndex
from agent_r1.search.service import open_port, serve_search
raise_file_limit()
listener = open_port("127.0.0.1", int(sys.argv[2]))
serve_search(PassageIndex.load(Path(sys.argv[1])), listener)
"""


def connect(port: int) -> socket.socket | None:
    """Open a connection that has sent half of its headers."""
    client = socket.socket()
    client.settimeout(20)
    try:
        client.connect(("127.0.0.1", port))
        client.sendall(b"POST /search HTTP/1.1\r\nHost: x\r\n")
    except OSError:
        client.close()
        return None
    client.setblocking(False)
    return client


def is_open(client: socket.socket) -> bool:
    """Send a further header line. Return whether the server still holds the connection."""
    try:
        client.sendall(b"X-Slow: 1\r\n")
        return client.recv(1000) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def answers(port: int) -> bool:
    """Return whether an honest search succeeds now."""
    with suppress(httpx.HTTPError):
        body = {"queries": ["half"], "top_k": 1}
        url = f"http://127.0.0.1:{port}/search"
        return httpx.post(url, json=body, timeout=20).status_code == 200
    return False


def run() -> dict[str, Any]:
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        lines = []
        for number in range(100):
            passage = {"id": str(number), "title": f"title {number}", "text": "a text"}
            lines.append(json.dumps(passage) + "\n")
        corpus.write_text("".join(lines))
        build_index(corpus, Path(folder) / "index", make_encoder("ngram", 64))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen([sys.executable, "-c", SERVE, f"{folder}/index", str(port)])
        try:
            return hold(port)
        finally:
            server.terminate()
            server.wait(timeout=30)


def hold(port: int) -> dict[str, Any]:
    """Hold the connections, and measure until the service answers and has closed them."""
    deadline = time.monotonic() + PATIENCE_S
    while not answers(port):
        if time.monotonic() > deadline:
            raise AssertionError("the service did not start")
        time.sleep(0.2)
    clients = [connect(port) for _ in range(CONNECTIONS)]
    half_open = [client for client in clients if client is not None]
    began = time.monotonic()
    refused_at_first = not answers(port)
    seconds_to_answer = None
    still_open = len(half_open)
    while time.monotonic() - began < PATIENCE_S and (still_open or seconds_to_answer is None):
        if seconds_to_answer is None and answers(port):
            seconds_to_answer = time.monotonic() - began
        still_open = sum(is_open(client) for client in half_open)
        time.sleep(LINE_EVERY_S)
    for client in half_open:
        client.close()
    if seconds_to_answer is None or still_open:
        raise AssertionError(f"{still_open} connections are open after {PATIENCE_S:g} s")
    return {
        "connections": len(half_open),
        "headers_deadline_s": HEADERS_S,
        "refused_at_first": refused_at_first,
        "seconds_to_answer": round(seconds_to_answer, 1),
        "still_open": still_open,
    }
