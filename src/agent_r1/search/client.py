"""The index of a search service, from the other side: it stands where a `PassageIndex` would stand.

In: the address of `agent-r1 search-server`. Out: `Hit`s. Next: a `Searcher` over it, which batches and caches as it does
over an index of its own; so one event loop turn is one request, and a run samples the same tokens either way, as long as
the service answers within `searcher.PATIENCE_S`.

A service that dies in the middle of a run is waited for, and the run says so: its episodes stand still and go on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import httpx

from agent_r1.errors import AgentR1Error
from agent_r1.search.index import Hit
from agent_r1.search.searcher import MAX_QUERY_CHARS
from agent_r1.ui import say

CHUNK = 128
"""Queries in one request; the server takes 256, of at most `MAX_QUERY_CHARS` characters."""
ATTEMPTS = 4
LONGEST_PAUSE_S = 5.0


class RemoteIndex:
    """Searches by asking a service. Its call blocks, as that of an index in this process does.

    `timeout_s`: seconds that one request may take. `wait_s`: seconds that a search waits for a service that is gone, or
    there again and still reading its index; `tell` is told of it. With 0 a request that took its time is not tried again.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 30.0,
        pause: float = 0.5,
        wait_s: float = 0.0,
        tell: Callable[[str], None] = say,
    ):
        self.url, self._pause, self._wait_s, self._tell = url.rstrip("/"), pause, wait_s, tell
        self.deadline_s = wait_s + 2 * timeout_s if wait_s else None
        """What a call must be given, or it is broken off while this waits. Twice: the batch before it takes time, too."""
        self._checked: tuple[str, str] | None = None
        # One connection, kept. `trust_env`: a proxy has no business between an agent and its search.
        self._client = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False)

    def check(self, encoder: str, corpus_sha256: str) -> None:
        """Raises AgentR1Error unless the service searches that corpus with that encoder."""
        health = self._ask("GET", "/health")
        theirs = health.get("encoder", {}).get("name"), health.get("corpus_sha256")
        if theirs != (encoder, corpus_sha256):
            raise AgentR1Error(
                f"the search service at {self.url} has another index (encoder {theirs[0]}, corpus {str(theirs[1])[:8]}, "
                f"wanted {encoder}, {corpus_sha256[:8]}); start `agent-r1 search-server` with this run's preset and overrides"
            )
        self._checked = encoder, corpus_sha256

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """As `PassageIndex.search`."""
        found: list[list[Hit]] = []
        for start in range(0, len(queries), CHUNK):
            # A model may write half of a surrogate pair, which no JSON in UTF-8 can carry.
            mine = [q[:MAX_QUERY_CHARS].encode("utf-8", "replace").decode() for q in queries[start : start + CHUNK]]
            answer = self._ask("POST", "/search", {"queries": mine, "top_k": top_k}, self._wait_s)
            try:
                hits = [[Hit(str(h["id"]), str(h["title"]), str(h["text"]), float(h["score"])) for h in row]
                        for row in answer["results"]]  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                raise AgentR1Error(f"{self.url} answers in another form ({error!r}); is it a search service?") from None
            if len(hits) != len(mine):
                raise AgentR1Error(f"{self.url} answered {len(hits)} of {len(mine)} queries; is it a search service?")
            found += hits
        return found

    def _ask(self, method: str, path: str, body: Any = None, wait_s: float = 0.0) -> dict[str, Any]:
        """One request; tried again while the service is not there, or has too much to do."""
        until, told = time.monotonic() + wait_s, False
        for attempt in itertools.count(1):
            try:
                response = self._client.request(method, path, json=body)
                if response.status_code != 503:
                    break
                problem, in_vain = "is overloaded", False
            except httpx.TransportError as error:
                problem = f"does not answer ({str(error) or type(error).__name__})"
                in_vain = isinstance(error, httpx.TimeoutException)
            if in_vain or attempt >= ATTEMPTS:
                if time.monotonic() >= until:
                    self._wait_s = 0.0  # once is enough; the next search says so soon
                    raise AgentR1Error(
                        f"the search service at {self.url} {problem}; start it with `agent-r1 search-server`"
                    )
                if not told:
                    told = True
                    self._tell(
                        f"the search service at {self.url} does not answer; waiting for it, up to {wait_s:.0f} s: start "
                        "it again with `agent-r1 search-server` and this run's preset and overrides"
                    )
            time.sleep(min(self._pause * 2 ** (attempt - 1), LONGEST_PAUSE_S))
        if told:
            if self._checked:
                self.check(*self._checked)  # it may have been started for another run
            self._tell(f"the search service at {self.url} answers again")
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != 200 or not isinstance(answer, dict):
            detail = answer.get("detail") if isinstance(answer, dict) else response.text[:100]
            raise AgentR1Error(f"the search service at {self.url} refused ({response.status_code}: {detail})")
        return answer
