"""Ask the search service of another process or machine (`service.py`).

In: `search.url`. Out: a `RemoteIndex`, which replaces a `PassageIndex` under a `Searcher`. One turn
of the event loop makes one request. A run samples the same tokens as with a local index, if the
service answers within `coalescer.BATCH_WAIT_S`. If the service dies during a run, the run says so
and its episodes wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import httpx
from pydantic import BaseModel, Field, ValidationError

from agent_r1.config.settings import SearchConfig
from agent_r1.data.storage import Passage
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, first_invalid, first_line
from agent_r1.ground.ui import say
from agent_r1.search.index import Hit

REQUEST_QUERIES = 128
"""Queries per request; the service accepts `service.MAX_QUERIES`."""
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
                    f"{self.url} answers in an unknown form ({first_invalid(error)}); is it a "
                    "search service?",
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
