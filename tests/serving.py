"""Servers on loopback, in threads, for as long as a test wants them: a FastAPI app, or one that
means harm."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n"
ZIPPED = gzip.compress(b" " * 20_000_000)
HOSTILE = {
    "header": [HEAD % 9, *[b"x"] * 50],
    "drip": [HEAD % 100_000 + b"\r\n", *[b" "] * 50],
    "flood": [HEAD % 10**8 + b"\r\n" + b" " * 20_000_000],
    "gzip": [HEAD % len(ZIPPED) + b"Content-Encoding: gzip\r\n\r\n" + ZIPPED],
    "deep": [HEAD % 20_000 + b"\r\n" + b"[" * 10_000 + b"]" * 10_000],
}
"""What a hostile server answers, a piece every 0.2 s; then it keeps the connection open."""


@contextmanager
def hostile(kind: str) -> Iterator[str]:
    """The address of a server that answers every connection so."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                for piece in HOSTILE[kind]:
                    connection.sendall(piece)
                    over.wait(0.2 if len(HOSTILE[kind]) > 1 else 0)
                over.wait()
            except OSError:  # the other side has had enough
                pass

    def accept() -> None:
        while not over.is_set():
            try:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)  # `close` would leave the thread in `accept`
