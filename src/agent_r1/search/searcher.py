"""Search for many episodes at once.

In: queries of coroutines. Out: `Hit`s for the search tool (room 3).

`coalescer.py` collects concurrent queries: one encoding and one FAISS call answer all of them.

Samples of one question repeat queries, also in later steps, so a cache keeps the latest. A cached
query queues like a new one. An immediate answer would change its episode's place in the sampler's
batch. A resumed run, whose cache is empty, would then differ in the last bits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from agent_r1.ground.errors import AgentR1Error
from agent_r1.search.coalescer import Coalescer
from agent_r1.search.index import Hit

MAX_QUERY_CHARS = 2000
"""More than any encoder reads; limits the cost of a query."""

Query = tuple[str, int]
"""Text and top_k."""
Hits = tuple[Hit, ...]


class Index(Protocol):
    """Answer queries: an index in this process, a service, or their replacement."""

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]: ...


@dataclass
class SearchStats:
    """Counters since the searcher was made."""

    queries: int = 0  # calls of `Searcher.search`
    cache_hits: int = 0  # ... answered from the cache
    searched: int = 0
    """Different queries sent to the index; fewer than queries - cache_hits if several are equal."""
    batches: int = 0  # sent to the index


class Searcher:
    """Batched and cached search over one index, for the coroutines of one thread.

    `cache_size` is the number of cached queries (0: none).
    """

    def __init__(self, index: Index, cache_size: int = 10_000):
        self.index = index
        self.stats = SearchStats()
        self._cache_size = cache_size
        self._cache: OrderedDict[Query, Hits] = OrderedDict()  # oldest first
        self._batches: Coalescer[Query, Hits] = Coalescer(self._search, self._recall, self._learn)

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """Return the `top_k` best passages, best first. Raise the index's exceptions."""
        return list(await self.ask(query, top_k))

    def ask(self, query: str, top_k: int) -> asyncio.Future[Hits]:
        """Queue a query at once, and return a future of its passages."""
        self.stats.queries += 1
        return self._batches.ask((query, top_k))

    @property
    def waiting(self) -> int:
        """Queries without an answer, also of callers that gave up, until their batch ends."""
        return self._batches.waiting

    def _search(self, new: list[Query]) -> dict[Query, Hits | BaseException]:
        self.stats.batches += 1
        self.stats.searched += len(new)
        return self._look_up(new)

    def _look_up(self, new: list[Query]) -> dict[Query, Hits | BaseException]:
        """Search for each query; runs in the thread. An exception takes the place of a result."""
        try:
            # One call for all: a shorter result is the beginning of a longer one.
            results = self.index.search([text for text, _ in new], max(top_k for _, top_k in new))
            return {key: tuple(hits[: key[1]]) for key, hits in zip(new, results, strict=True)}
        except BaseException as error:  # raised in the callers
            # One query may have failed the whole batch, so retry each alone. A service's own error
            # holds for all.
            if len(new) == 1 or isinstance(error, AgentR1Error):
                return dict.fromkeys(new, error)
        answers: dict[Query, Hits | BaseException] = {}
        for query in new:
            answers |= self._look_up([query])
        return answers

    def _recall(self, key: Query, callers: int) -> Hits | None:
        hits = self._cache.get(key)
        if hits is not None:
            self.stats.cache_hits += callers
        return hits

    def _learn(self, key: Query, hits: Hits) -> None:
        self._cache[key] = hits
        self._cache.move_to_end(key)
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
