"""The index of a search service, from the other side: it stands where a `PassageIndex` would stand.

In: the address of `agent-r1 search-server`. Out: `Hit`s. Next: a `Searcher` over it, which batches and caches as it does
over an index of its own; so one event loop turn is one request, and a run samples the same tokens either way, as long as
the service answers within `searcher.PATIENCE_S`.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from agent_r1.errors import AgentR1Error
from agent_r1.search.index import Hit
from agent_r1.search.searcher import MAX_QUERY_CHARS

CHUNK = 128
"""Queries in one request; the server takes 256, of at most `MAX_QUERY_CHARS` characters."""
ATTEMPTS = 4


class RemoteIndex:
    """Searches by asking a service. Its call blocks, as that of an index in this process does.

    `timeout_s`: seconds that one request may take. Behind it nobody waits any more, so it is not tried again.
    """

    def __init__(self, url: str, timeout_s: float = 30.0, pause: float = 0.5):
        self.url, self._pause = url.rstrip("/"), pause
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

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """As `PassageIndex.search`."""
        found: list[list[Hit]] = []
        for start in range(0, len(queries), CHUNK):
            # A model may write half of a surrogate pair, which no JSON in UTF-8 can carry.
            mine = [q[:MAX_QUERY_CHARS].encode("utf-8", "replace").decode() for q in queries[start : start + CHUNK]]
            answer = self._ask("POST", "/search", {"queries": mine, "top_k": top_k})
            try:
                hits = [[Hit(str(h["id"]), str(h["title"]), str(h["text"]), float(h["score"])) for h in row]
                        for row in answer["results"]]  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                raise AgentR1Error(f"{self.url} answers in another form ({error!r}); is it a search service?") from None
            if len(hits) != len(mine):
                raise AgentR1Error(f"{self.url} answered {len(hits)} of {len(mine)} queries; is it a search service?")
            found += hits
        return found

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request; tried again while the service is not there yet, or has too much to do."""
        for attempt in range(ATTEMPTS):
            try:
                response = self._client.request(method, path, json=body)
                if response.status_code != 503:
                    break
                problem, in_vain = "is overloaded", False
            except httpx.TransportError as error:
                problem = f"does not answer ({str(error) or type(error).__name__})"
                in_vain = isinstance(error, httpx.TimeoutException)
            if in_vain or attempt + 1 == ATTEMPTS:
                raise AgentR1Error(
                    f"the search service at {self.url} {problem}; start it with `agent-r1 search-server`"
                )
            time.sleep(self._pause * 2**attempt)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code != 200 or not isinstance(answer, dict):
            detail = answer.get("detail") if isinstance(answer, dict) else response.text[:100]
            raise AgentR1Error(f"the search service at {self.url} refused ({response.status_code}: {detail})")
        return answer
