"""The search service: one index for many processes, and for agents on other machines.

In: HTTP requests. Out: passages as JSON. Next: `client.py` stands in for the index on the other side.

    POST /search   {"queries": ["...", ...], "top_k": 3}   ->  {"results": [[{"id", "title", "text", "score"}, ...], ...]}
    GET  /search?q=...&top_k=3                             ->  {"results": [[...]]}
    GET  /health                                           ->  what the index is made of, and counters

Two threads. One speaks HTTP and never computes, so /health and refusals are prompt however busy the index is. The other
is the `Searcher`'s: while it encodes one batch, queries of all clients line up, and the next batch takes them all.

Whoever can reach the port may ask, so everything has a bound: the size of a body, the number and length of queries, top_k,
the seconds that a request may take, and the queries that may wait. By default only this machine can reach it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.search.index import PassageIndex
from agent_r1.search.searcher import MAX_QUERY_CHARS, Searcher

MAX_BODY = 1 << 20
MAX_QUERIES = 256
MAX_TOP_K = 50
MAX_WAITING = 8192
"""Queries of all clients together that may line up; the next ones get 503."""
TIMEOUT_S = 30.0
"""From the first byte of a request to the answer."""


class SearchRequest(BaseModel):
    """The body of POST /search."""

    model_config = ConfigDict(extra="forbid", strict=True)
    queries: Annotated[
        list[Annotated[str, StringConstraints(max_length=MAX_QUERY_CHARS)]], Field(min_length=1, max_length=MAX_QUERIES)
    ]
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = 3


def make_app(index: PassageIndex, timeout_s: float = TIMEOUT_S) -> FastAPI:
    """The service over `index`."""
    # No /docs: they load scripts from the web. And no traceback in an answer.
    app = FastAPI(title="agent-r1 search", docs_url=None, redoc_url=None, openapi_url=None)
    searcher = Searcher(index)

    async def answer(queries: list[str], top_k: int) -> dict:
        if searcher.waiting + len(queries) > MAX_WAITING:
            raise HTTPException(503, f"{searcher.waiting} queries are waiting; ask again later", {"Retry-After": "1"})
        found = await asyncio.gather(*(searcher.ask(query, top_k) for query in queries))
        return {"results": [[asdict(hit) for hit in hits] for hits in found]}

    async def read(request: Request) -> SearchRequest:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:  # the header may lie about the length, or not give one
                raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes", {"Connection": "close"})
        return _checked(SearchRequest.model_validate_json, body)

    async def in_time(work):
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise HTTPException(504, f"no answer within {timeout_s:g} s", {"Connection": "close"}) from None

    @app.post("/search")
    async def post_search(request: Request) -> dict:
        async def work() -> dict:
            wanted = await read(request)
            return await answer(wanted.queries, wanted.top_k)

        return await in_time(work())

    @app.get("/search")
    async def get_search(q: str, top_k: int = 3) -> dict:
        wanted = _checked(SearchRequest.model_validate, {"queries": [q], "top_k": top_k})
        return await in_time(answer(wanted.queries, wanted.top_k))

    @app.get("/health")
    async def health() -> dict:
        made_of = {key: index.made_of.get(key) for key in ("encoder", "dim", "count", "corpus_sha256", "index")}
        return {"status": "ok", **made_of, "waiting": searcher.waiting, "stats": asdict(searcher.stats)}

    return app


def _checked(validate, value) -> SearchRequest:
    """A request, or 422 with where and why it is none; what was sent is not repeated."""
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise HTTPException(422, f"{where}: {first['msg']}") from None


def open_port(host: str, port: int) -> socket.socket:
    """The port, taken before the index is loaded. Raises AgentR1Error where somebody else has it."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port}: give a port between 1 and 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol by name: only then does asyncio switch off Nagle's algorithm, which holds the second half of an
        # answer back until the first is acknowledged, for 40 ms.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        return listener
    except OSError as error:
        reason = error.strerror or error
        raise AgentR1Error(
            f"cannot listen on {host}:{port} ({reason}); stop what uses it, or choose another with --port"
        ) from None


def read_ahead(path: str | Path) -> None:
    """Read a file to its end, so that the system has it in memory. A query looks at some 50 vectors all over a mapped
    file of gigabytes; from a network disk the first minutes of a run would wait for these."""
    block = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def serve(index: PassageIndex, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    if mapped := getattr(index.vectors, "filename", None):
        threading.Thread(target=read_ahead, args=[mapped], daemon=True).start()
    # The thread that speaks HTTP gives the interpreter up at each system call, and gets it back from the one that computes
    # only after this long: 842 queries/s from 200 clients instead of 570 with the usual 5 ms (benchmarks/README.md).
    sys.setswitchinterval(0.0002)
    config = uvicorn.Config(
        make_app(index), log_level="warning", access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=5,
        limit_concurrency=2000, server_header=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])
