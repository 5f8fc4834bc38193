"""Serve one index to many processes and machines over HTTP: server and client.

    POST /search   {"queries": ["...", ...], "top_k": 3}
                   -> {"results": [[{"id", "title", "text", "score"}, ...], ...]}
    POST /retrieve the same in Search-R1's form, below
    GET  /health   -> what the index is made of, and counters

The server has two threads. One handles HTTP and never computes, so /health and refusals are prompt
under any load. The other is the `Searcher`'s: while it encodes a batch, queries of all clients
queue for the next. Everyone who can reach the port may ask. So body size, number and length of
queries, top_k, time per request and waiting queries are limited. By default only this machine can
connect.

The client is `RemoteIndex`, which replaces a `PassageIndex` under a `Searcher`. One turn of the
event loop makes one request. A run samples the same tokens as with a local index, if the service
answers within `coalescer.BATCH_WAIT_S`. If the service dies during a run, the run says so and its
episodes wait.

Server and client also speak Search-R1's form (PeterGriffinJin/Search-R1,
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
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r1.config.settings import SearchConfig
from agent_r1.data.storage import Passage
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.ground.ui import say
from agent_r1.search.index import Hit, PassageIndex
from agent_r1.search.searcher import MAX_QUERY_CHARS, Hits, Searcher

if TYPE_CHECKING:
    from fastapi import FastAPI

# ------------------------------------------------------------------------------------------- server

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
            raise HTTPException(422, _first(error)) from None
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


def _first(error: ValidationError) -> str:
    """Describe where and why, without repeating what was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"


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


# ------------------------------------------------------------------------------------------- client

REQUEST_QUERIES = 128
"""Queries per request; the service accepts `MAX_QUERIES`."""
MAX_RESPONSE_BYTES = 16 << 20
"""Bytes of an answer: twice the size for 128 queries with 50 passages of 100 words each."""


class SearchAnswer(BaseModel):
    results: list[list[Hit]]

    def hits(self) -> list[list[Hit]]:
        return self.results


class Document(BaseModel):
    contents: str
    id: str | int = ""


class Retrieved(BaseModel):
    document: Document
    score: Annotated[float, Field(allow_inf_nan=False)] = 0.0  # web search engines return none


class RetrieveAnswer(BaseModel):
    result: list[list[Retrieved]]

    def hits(self) -> list[list[Hit]]:
        results = []
        for row in self.result:
            results.append([_hit(passage) for passage in row])
        return results


def _hit(passage_and_score: Retrieved) -> Hit:
    passage = Passage.of_contents(
        str(passage_and_score.document.id), passage_and_score.document.contents
    )
    return Hit(passage.id, passage.title, passage.text, passage_and_score.score)


class RemoteIndex:
    """Client of a search service. Its calls block, like those of a local index.

    A `url` that ends in /retrieve uses Search-R1's form. `timeout_s`: seconds per request.
    `wait_s`: seconds that a search waits for a service that is gone or loading its index; `tell`
    reports it. `pause`: seconds between attempts.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 30.0,
        pause: float = 2.0,
        wait_s: float = 0.0,
        tell: Callable[[str], object] = say,
    ):
        self.url = url.rstrip("/")
        self._pause = pause
        self._wait_s = wait_s
        self._tell = tell
        self._foreign = SearchConfig(url=url).foreign
        self._start = "start it with `agent-r1 search-server`"
        if self._foreign:
            self._start = "start it again"
        self.deadline_s: float | None = None
        """Deadline that a call needs in order not to end during a wait.

        Twice: an earlier batch takes time too.
        """
        if wait_s:
            self.deadline_s = wait_s + 2 * timeout_s
        self._index: tuple[str, str] | None = None  # encoder and corpus that `check` confirmed
        self._base = self.url.removesuffix("/retrieve")
        self._timeout_s = timeout_s

    def check(self, encoder: str, corpus_sha256: str) -> None:
        """Raise AgentR1Error unless the service has that corpus and encoder.

        Search-R1's form does not report either, so only the form is checked.
        """
        if self._foreign:
            self.search(["a"], 1)
            self._tell(
                f"search: {self.url} does not say what it searches; what it finds is taken as it "
                "comes"
            )
            return
        health = self._ask("GET", "/health")
        made_with = health.get("encoder")
        encoder_name = made_with.get("name") if isinstance(made_with, dict) else None
        corpus_hash = health.get("corpus_sha256")
        if (encoder_name, corpus_hash) != (encoder, corpus_sha256):
            raise AgentR1Error(
                f"the search service at {self.url} has another index (encoder {encoder_name}, "
                f"corpus {str(corpus_hash)[:8]}, "
                f"wanted {encoder}, {corpus_sha256[:8]}); start `agent-r1 search-server` with this "
                "run's preset and overrides",
                code="service_of_other_index",
            )
        self._index = encoder, corpus_sha256

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Search like `PassageIndex.search`."""
        results: list[list[Hit]] = []
        for start in range(0, len(queries), REQUEST_QUERIES):
            mine = queries[start : start + REQUEST_QUERIES]
            path = "/search"
            form = SearchAnswer
            body = {"queries": mine, "top_k": top_k}
            if self._foreign:
                path = "/retrieve"
                form = RetrieveAnswer
                body = {"queries": mine, "topk": top_k, "return_scores": True}
            try:
                hits = form.model_validate(self._ask("POST", path, body, self._wait_s)).hits()
            except ValidationError as error:
                raise AgentR1Error(
                    f"{self.url} answers in an unknown form ({_first(error)}); is it a search "
                    "service?",
                    code="bad_answer",
                ) from None
            if len(hits) != len(mine):
                raise AgentR1Error(
                    f"{self.url} answered {len(hits)} of {len(mine)} queries; is it a search "
                    "service?",
                    code="bad_answer",
                )
            results += hits
        return results

    def _ask(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> dict[str, Any]:
        """Send one request, and return the answer. Raises AgentR1Error."""
        response = self._response(method, path, body, wait_s)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status != 200 or not isinstance(answer, dict):
            text = response.body[:1000].decode(errors="replace")
            detail = " ".join(text.split())[:100]
            if isinstance(answer, dict):
                detail = answer.get("detail")
            hint = ""
            if path == "/health":
                hint = (
                    "; one that speaks Search-R1's protocol is named "
                    "search.url=http://HOST:PORT/retrieve"
                )
            raise AgentR1Error(
                f"the search service at {self.url} refused {path} ({response.status}: {detail})"
                f"{hint}",
                code="server_refused",
            )
        return answer

    def _response(self, method: str, path: str, body: Any, wait_s: float) -> bounds.Response:
        """Repeat a request for `wait_s` seconds while the service is missing or overloaded."""
        until = time.monotonic() + wait_s
        is_waiting = False  # whether the user was told
        while True:
            try:
                # `fetch` itself retries a failed connection for a second or two.
                response = bounds.fetch(
                    method,
                    self._base + path,
                    body=body,
                    within_s=self._timeout_s,
                    max_bytes=MAX_RESPONSE_BYTES,
                    retries=3,
                )
                if response.status != 503:
                    break
                problem = "is overloaded"
            except (httpx.TransportError, TimeoutError) as error:
                problem = f"does not answer ({first_line(error)})"
            except ValueError as error:
                raise AgentR1Error(
                    f"the search service at {self.url} cannot be used: {error}; is it a search "
                    "service?",
                    code="bad_answer",
                ) from None
            if time.monotonic() >= until:
                self._wait_s = 0.0  # wait only once; the next search fails soon
                raise AgentR1Error(
                    f"the search service at {self.url} {problem}; {self._start}",
                    code="server_unreachable",
                )
            if not is_waiting:
                is_waiting = True
                self._tell(
                    f"the search service at {self.url} does not answer; waiting for it, up to "
                    f"{wait_s:.0f} s: "
                    f"{self._start}, as it was for this run"
                )
            time.sleep(self._pause)
        if is_waiting:
            if self._index:
                self.check(*self._index)  # it may be another run's service now
            self._tell(f"the search service at {self.url} answers again")
        return response
