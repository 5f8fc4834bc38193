"""Serve HTTP/1.1 on 127.0.0.1, and know whether an answer was read.

In: a coroutine function from `Request` to `Reply`. Out: a server in the running event loop, which
is the sampler's. Next: `wire.py` reads the bodies.

Python's own `asyncio` instead of a web framework, because the gateway must know what a framework
hides: whether the client was still there when its answer was written. A client that closes a
connection with unread bytes resets it, so a half-read answer is noticed even after the last write.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MAX_BODY = 8_000_000
"""Bytes of a request. A context of 100,000 tokens has about half a million."""
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Not Allowed"}


@dataclass
class Request:
    """One request, and the connection that it came on."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    reader: asyncio.StreamReader

    @property
    def words(self) -> list[str]:
        """Return the parts of the path. A part may have any letters, such as a tool that a model
        made up."""
        return [unquote(word) for word in self.path.partition("?")[0].strip("/").split("/")]

    @property
    def is_closed(self) -> bool:
        """Return whether the client closed or lost this connection."""
        return self.reader.at_eof() or self.reader.exception() is not None


@dataclass
class Reply:
    """What is sent back."""

    status: int
    chunks: list[bytes]
    """One for a plain body; a stream's events otherwise."""
    stream: bool = False
    on_sent: Callable[[bool], None] = field(default=lambda whole: None)
    """Called with True after the last byte, and with False if the client did not read it all."""

    @classmethod
    def of(cls, content: Any, status: int = 200) -> Reply:
        return cls(status, [json.dumps(content).encode()])


Handler = Callable[[Request], Awaitable[Reply]]


@asynccontextmanager
async def serving(handle: Handler, port: int = 0) -> AsyncIterator[int]:
    """Serve in the running event loop; yield the port. Raise OSError if `port` is taken."""
    connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served by a task")
        connections[task] = writer
        try:
            await _converse(reader, writer, handle)
        finally:
            del connections[task]
            writer.close()

    # 127.0.0.1: no other machine reaches it. Port 0 is a free one, another in each event loop.
    server = await asyncio.start_server(serve_client, "127.0.0.1", port, backlog=1024)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        tasks = list(connections)
        for writer in connections.values():  # clients keep their connections open
            writer.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler
) -> None:
    """Answer the requests of one connection, one after the other."""
    last: Reply | None = None
    try:
        while request := await _read(reader, writer):
            last = await handle(request)
            whole = await _send(writer, last, request)
            last.on_sent(whole)
            if not whole:
                return
    except ConnectionError:
        # A reset instead of the next request: the last answer was not read to its end.
        if last is not None:
            last.on_sent(False)
    except asyncio.IncompleteReadError:
        return  # it left in the middle of a request
    except ValueError:  # not HTTP, or longer than it may be
        error = {"error": {"message": "this is not an HTTP request that the gateway reads"}}
        with suppress(ConnectionError):
            await _send(writer, Reply.of(error, 400), None)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | None:
    """Read one request; None at the end of the connection. Raise ValueError if it is malformed."""
    head = await reader.readline()
    if not head:
        return None
    method, path, _ = head.decode("ascii").split(" ", 2)
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > 100:
            raise ValueError("too many headers")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl would wait a second for it
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    else:
        length = int(headers.get("content-length", 0))
        if not 0 <= length <= MAX_BODY:
            raise ValueError("too long")
        body = await reader.readexactly(length)
    return Request(method, path, headers, body, reader)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int((await reader.readline()).partition(b";")[0], 16)
        if size < 0 or len(body) + size > MAX_BODY:
            raise ValueError("too long")
        body += await reader.readexactly(size)
        await reader.readline()
        if size == 0:
            return body


async def _send(writer: asyncio.StreamWriter, reply: Reply, request: Request | None) -> bool:
    """Write a reply. Return whether the client was there until the last byte."""
    kind = "text/event-stream" if reply.stream else "application/json"
    head = (
        f"HTTP/1.1 {reply.status} {REASONS.get(reply.status, 'Error')}\r\ncontent-type: {kind}\r\n"
    )
    if reply.stream:
        head += "transfer-encoding: chunked\r\n\r\n"
    else:
        head += f"content-length: {sum(len(chunk) for chunk in reply.chunks)}\r\n\r\n"
    writer.write(head.encode())
    for chunk in reply.chunks:
        if request is not None and request.is_closed:
            return False
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk) if reply.stream else chunk)
        await writer.drain()
    if reply.stream:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return request is None or not request.is_closed
