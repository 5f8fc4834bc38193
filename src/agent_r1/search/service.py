"""Serve one index to many processes and machines over HTTP.

    POST /search   {"queries": ["...", ...], "top_k": 3}
                   -> {"results": [[{"id", "title", "text", "score"}, ...], ...]}
    POST /retrieve the same in Search-R1's form, below
    GET  /health   -> what the index is made of, and counters

The server has two threads. One handles HTTP and never computes, so /health and refusals are prompt
under any load. The other is the `Searcher`'s: while it encodes a batch, queries of all clients
queue for the next. Everyone who can reach the port may ask. So body size, number and length of
queries, top_k, time per request and waiting queries are limited. By default only this machine can
connect.

The client is `remote.py`. Both also speak Search-R1's form (PeterGriffinJin/Search-R1,
search_r1/search/retrieval_server.py):

    POST /retrieve {"queries": ["...", ...], "topk": 3, "return_scores": true}
                   ->  {"result": [[{"document": {"id", "contents": "\\"title\\"\\ntext"}, "score"},
                   ...], ...]}, or without `return_scores` the documents alone
"""

# Without `from __future__ import annotations`: FastAPI reads the types of the handlers, which are
# local to `make_app`.
import asyncio
import ipaddress
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r1.config.settings import SearchConfig
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, extra, first_invalid
from agent_r1.ground.ui import say
from agent_r1.search.index import PassageIndex
from agent_r1.search.searcher import MAX_QUERY_CHARS, Hits, Searcher

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_BODY = 1 << 20
MAX_QUERIES = 256
MAX_TOP_K = 50
MAX_WAITING = 8192
"""Most queries of all clients in the queue; further ones get 503."""
TIMEOUT_S = 30.0
"""From the end of a request's headers to the answer, in seconds."""
HEADERS_S = 10.0
"""For the headers of a request, in seconds: from the connection, or from the first byte of a
further request on it. Without a deadline, 2,000 connections that send a header line each 20
seconds keep everybody out."""


QueryText = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]


class SearchRequest(BaseModel):
    """The body of POST /search."""

    model_config = ConfigDict(extra="forbid", strict=True)
    queries: Annotated[list[QueryText], Field(min_length=1, max_length=MAX_QUERIES)]
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = SearchConfig().top_k


class RetrieveRequest(BaseModel):
    """The body of POST /retrieve, as Search-R1's clients send it."""

    model_config = ConfigDict(strict=True)
    queries: Annotated[list[QueryText], Field(min_length=1, max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = None
    return_scores: bool = False


def make_app(index: PassageIndex, timeout_s: float = TIMEOUT_S) -> "FastAPI":
    """Make the web application for `index`."""
    from fastapi import FastAPI, HTTPException, Request
    from starlette.requests import ClientDisconnect

    # No /docs, which load scripts from the web, and no traceback in an answer.
    app = FastAPI(title="agent-r1 search", docs_url=None, redoc_url=None, openapi_url=None)
    searcher = Searcher(index)

    async def read_body(request: Request) -> bytes:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:  # the header's length may be wrong or missing
                raise HTTPException(
                    413, f"the body is larger than {MAX_BODY} bytes", {"Connection": "close"}
                )
        return body

    async def find(queries: list[str], top_k: int) -> list[Hits]:
        if searcher.waiting + len(queries) > MAX_WAITING:
            raise HTTPException(
                503,
                f"{searcher.waiting} queries are waiting; ask again later",
                {"Retry-After": "1"},
            )
        searches = [searcher.ask(query, top_k) for query in queries]
        return await asyncio.gather(*searches)

    async def in_time(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise HTTPException(
                504, f"no answer within {timeout_s:g} s", {"Connection": "close"}
            ) from None
        except ValidationError as error:
            raise HTTPException(422, first_invalid(error)) from None
        except ClientDisconnect:  # the client is gone; otherwise the log has a traceback
            raise HTTPException(400, "the client left", {"Connection": "close"}) from None

    async def answer_search(request: Request) -> dict[str, Any]:
        body = SearchRequest.model_validate_json(await read_body(request))
        results = []
        for hits in await find(body.queries, body.top_k):
            results.append([asdict(hit) for hit in hits])
        return {"results": results}

    async def answer_retrieve(request: Request) -> dict[str, Any]:
        body = RetrieveRequest.model_validate_json(await read_body(request))
        results = []
        for hits in await find(body.queries, body.topk or SearchConfig().top_k):
            documents: list[dict[str, Any]] = []
            for hit in hits:
                document = {"id": hit.id, "contents": f'"{hit.title}"\n{hit.text}'}
                if body.return_scores:
                    documents.append({"document": document, "score": hit.score})
                else:
                    documents.append(document)
            results.append(documents)
        return {"result": results}

    @app.post("/search")
    async def search(request: Request) -> dict[str, Any]:
        return await in_time(answer_search(request))

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        return await in_time(answer_retrieve(request))

    @app.get("/health")
    async def health() -> dict:
        manifest = {
            key: index.manifest.get(key)
            for key in ("encoder", "dim", "count", "corpus_sha256", "index")
        }
        return {
            "status": "ok",
            **manifest,
            "waiting": searcher.waiting,
            "stats": asdict(searcher.stats),
        }

    return app


def open_port(host: str, port: int) -> socket.socket:
    """Open the port before the index is loaded. Raise AgentR1Error if it is in use."""
    if not 0 <= port < 65536:
        raise ConfigError(
            f"--port {port}: give a port between 1 and 65535, or 0 for a free one",
            code="out_of_range",
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        # With an explicit protocol, asyncio disables Nagle's algorithm, which would delay the
        # second half of an answer by 40 ms, until the first is acknowledged.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        return listener
    except OSError as error:
        reason = error.strerror or error
        raise AgentR1Error(
            f"cannot listen on {host}:{port} ({reason}); stop what uses it, or choose another with "
            "--port",
            code="port_in_use",
        ) from None


def read_ahead(path: str | Path) -> None:
    """Read a file to its end, to fill the system's cache.

    A query reads about 50 vectors all over a mapped file of gigabytes. From a network disk, the
    first minutes of a run would wait for them.
    """
    block = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def protocol_with_deadline(headers_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol, with a deadline of `headers_s` seconds for headers."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class WithDeadline(AutoHTTPProtocol):
        # uvicorn's class sets these three, and the type of its name does not tell.
        cycle: Any
        loop: asyncio.AbstractEventLoop
        transport: asyncio.Transport
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._wait_for_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # A cycle is a request whose headers are complete, up to the end of its answer.
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            else:
                self._wait_for_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait_for_headers(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(headers_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return WithDeadline


def with_local_hosts(app: Any) -> Any:
    """Return an ASGI application that refuses requests whose Host is another machine's name."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        hosts = [value for name, value in scope.get("headers", ()) if name == b"host"]
        if all(bounds.is_local_host(host.decode("latin-1")) for host in hosts):
            await app(scope, receive, send)
            return
        body = b'{"detail": "the Host header names another machine"}'
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 421, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return guarded


def serve_index(load_index: Callable[[], PassageIndex], host: str, port: int) -> None:
    """Serve searches over an index until the process ends. Raises AgentR1Error if it cannot."""
    with extra("serve", "the search service"):
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    with open_port(host, port) as listener:
        index = load_index()
        say(f"search: {len(index.passages)} passages at http://{host}:{port} (stop with Ctrl-C)")
        serve_search(index, listener)


def serve_search(index: PassageIndex, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    import uvicorn

    app: Any = make_app(index)
    if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        # With --host ADDRESS other machines may ask, by whatever name they have for this one.
        app = with_local_hosts(app)

    vectors_file = getattr(index.vectors, "filename", None)  # of a memory map
    if vectors_file:
        threading.Thread(target=read_ahead, args=[vectors_file], daemon=True).start()
    # The HTTP thread releases the interpreter at each system call and gets it back from the
    # computing thread only after this long. Hence 842 queries/s from 200 clients instead of 570
    # with the default 5 ms (benchmarks/README.md).
    sys.setswitchinterval(0.0002)
    config = uvicorn.Config(
        app,
        http=protocol_with_deadline(HEADERS_S),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        limit_concurrency=2000,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])
