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
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from agent_r1 import is_local_host

MAX_BODY = 8_000_000
"""Bytes of a request. A context of 100,000 tokens has about half a million."""
MAX_CONNECTIONS = 1000
MAX_HEADERS = 100
HEADERS_S = 20.0
"""For the headers of a request: from the connection, or from the first line of a further one."""
BODY_S = 60.0
IDLE_S = 900.0
"""Between two requests of a connection, while a client runs its tools."""
ANSWER_S = 300.0
"""For a client to read an answer."""
LINGER_S = 1.0
"""After a refusal, while the rest of what was refused is thrown away unread."""
MAX_CHUNKS = 100_000
"""Of a chunked body; each costs the event loop some microseconds."""
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
"""A line of the headers. No blank stands before its name, where old servers read a second line."""
ONCE = ("host", "content-length", "transfer-encoding", "authorization")
"""Headers of which two lines could be understood in two ways."""
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Not Allowed",
    408: "Request Timeout",
    421: "Misdirected Request",
    503: "Service Unavailable",
}


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
        """Return the parts of the path.

        A part may have any letters, such as a tool that a model made up.
        """
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
Admit = Callable[[Request], Reply | None]
"""Look at a request without its body; return a refusal, or None to read on."""


@asynccontextmanager
async def serving(
    handle: Handler, port: int = 0, admit: Admit = lambda request: None
) -> AsyncIterator[int]:
    """Serve in the running event loop; yield the port. Raise OSError if `port` is taken.

    `admit` is asked before a body is read: what has no key sends no megabytes.
    """
    connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is served by a task")
        connections[task] = writer
        try:
            if len(connections) > MAX_CONNECTIONS:
                # At once, even if the client then sees a reset: a thousand are enough to hold.
                refusal = {"error": {"message": "too many connections are open"}}
                with suppress(ConnectionError):
                    await _send(writer, Reply.of(refusal, 503), None, last=True)
            else:
                await _converse(reader, writer, handle, admit)
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
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler, admit: Admit
) -> None:
    """Answer the requests of one connection, one after the other."""
    last: Reply | None = None
    wait_s = HEADERS_S
    try:
        while True:
            async with asyncio.timeout(wait_s):
                first_line = await reader.readline()
            if not first_line:
                return
            request = await _read(reader, writer, first_line, admit)
            if isinstance(request, Reply):
                await _send_last(reader, writer, request)
                return
            last = await handle(request)
            whole = False
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    whole = await _send(writer, last, request)
            last.on_sent(whole)
            if not whole:
                return
            wait_s = IDLE_S
    except TimeoutError:
        if wait_s != IDLE_S:
            await _refuse(reader, writer, 408, "the request did not arrive in time")
    except ConnectionError:
        # A reset instead of the next request: the last answer was not read to its end.
        if last is not None:
            last.on_sent(False)
    except asyncio.IncompleteReadError:
        return  # it left in the middle of a request
    except ValueError:  # not HTTP, or longer than it may be
        words = "this is not an HTTP request that the gateway reads"
        await _refuse(reader, writer, 400, words)


async def _refuse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, words: str
) -> None:
    """Answer with an error, and close the connection."""
    await _send_last(reader, writer, Reply.of({"error": {"message": words}}, status))


async def _send_last(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply
) -> None:
    """Send the last answer of a connection, so that the client can read it.

    A refused request may still be on its way. If the socket were closed over unread bytes, the
    kernel would send a reset, and the client would lose the answer (RFC 9112, section 9.6). So
    only our half is closed, and what arrives for a second is thrown away.
    """
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await _send(writer, reply, None, last=True)
            writer.write_eof()
            # At most one request: what goes on sending after its refusal is cut off.
            rest = MAX_BODY
            while rest > 0 and (chunk := await reader.read(65536)):
                rest -= len(chunk)


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, admit: Admit
) -> Request | Reply:
    """Read the rest of a request, or return why it is refused.

    Raise ValueError if it is malformed, and TimeoutError if it is late.
    """
    method, path, version = head.decode("ascii").split(" ", 2)
    if version.strip() not in ("HTTP/1.1", "HTTP/1.0"):
        raise ValueError("another version of HTTP")
    async with asyncio.timeout(HEADERS_S):
        headers = await _read_headers(reader)
    request = Request(method, path, headers, b"", reader)
    if not is_local_host(headers.get("host", "")):
        return Reply.of({"error": {"message": "the Host header names another machine"}}, 421)
    refusal = admit(request)
    if refusal is not None:
        return refusal
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl would wait a second for it
    async with asyncio.timeout(BODY_S):
        request.body = await _read_body(reader, headers)
    return request


async def _read_headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS + 1):  # lines: one name a thousand times is one header
        line = (await reader.readline()).removesuffix(b"\n").removesuffix(b"\r")
        if not line:
            return headers
        match = HEADER.fullmatch(line)
        if match is None:
            raise ValueError("not a header")
        name = match[1].decode("ascii").lower()
        if name in ONCE and name in headers:
            raise ValueError("a header twice")
        headers[name] = match[2].decode("latin-1").strip()
    raise ValueError("too many headers")


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length")
    encoding = headers.get("transfer-encoding")
    if encoding is not None:
        # Another encoding would leave the body to be read as the next request.
        if length is not None or encoding.lower() != "chunked":
            raise ValueError("two lengths, or an encoding that is not read")
        return await _read_chunks(reader)
    length = "0" if length is None else length
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > MAX_BODY:
        raise ValueError("not a length, or too long")
    return await reader.readexactly(int(length))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()  # bytes would be copied for each chunk
    for _ in range(MAX_CHUNKS):
        digits = (await reader.readline()).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,16}", digits):
            raise ValueError("not a length")
        size = int(digits, 16)
        if len(body) + size > MAX_BODY:
            raise ValueError("too long")
        if size == 0:
            await _read_headers(reader)  # trailers, which end with an empty line as headers do
            return bytes(body)
        body += await reader.readexactly(size)
        if (await reader.readline()).strip():
            raise ValueError("a chunk is longer than its length")
    raise ValueError("too many chunks")


async def _send(
    writer: asyncio.StreamWriter, reply: Reply, request: Request | None, last: bool = False
) -> bool:
    """Write a reply. Return whether the client was there until the last byte.

    `last` tells the client not to send its next request on this connection.
    """
    kind = "text/event-stream" if reply.stream else "application/json"
    head = (
        f"HTTP/1.1 {reply.status} {REASONS.get(reply.status, 'Error')}\r\ncontent-type: {kind}\r\n"
    )
    if last:
        head += "connection: close\r\n"
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
