"""Search for many episodes at once. In: queries of running coroutines. Out: `Hit`s to the search tool (room 3).

`coalescer.py` gathers the queries of one moment: one encode and one FAISS call answer all of them.

Samples of one question ask the same things, in this iteration and in later ones; a cache remembers the latest queries. A
remembered query lines up like a new one. If it were answered at once, its episode would take another place in the sampler's
batch, and a resumed run, whose cache is empty, would differ from the uninterrupted one in the last bits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agent_r1.ground.errors import AgentR1Error
from agent_r1.search.coalescer import Coalescer, Latest
from agent_r1.search.index import Hit, PassageIndex

MAX_QUERY_CHARS = 2000
"""More than any encoder reads. It bounds what one query can cost."""

Query = tuple[str, int]
"""Text and top_k."""
Hits = tuple[Hit, ...]


@dataclass
class SearchStats:
    """Counters since the searcher was made."""

    queries: int = 0
    """Calls of `Searcher.search`."""
    cache_hits: int = 0
    """... answered from the cache."""
    searched: int = 0
    """Different queries that the index was asked; fewer than queries - cache_hits, where several asked the same."""
    batches: int = 0
    """Coalescer that the index was asked."""


class Searcher:
    """Batched and cached search over one index, for the coroutines of one thread.

    `cache_size` is the number of queries remembered (0: none).
    """

    def __init__(self, index: PassageIndex, cache_size: int = 10_000):
        self.index = index
        self.stats = SearchStats()
        self._latest: Latest[Query, Hits] = Latest(cache_size)
        self._batches: Coalescer[Query, Hits] = Coalescer(self._search, self._recall, self._latest.learn)

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """The `top_k` best passages for `query`, best first. Raises what the index raised for it."""
        return list(await self.ask(query, top_k))

    def ask(self, query: str, top_k: int) -> asyncio.Future[Hits]:
        """`search` without waiting; it lines up at once."""
        self.stats.queries += 1
        return self._batches.ask((query, top_k))

    @property
    def waiting(self) -> int:
        """Queries without an answer, also those whose callers gave up until their batch is done."""
        return self._batches.waiting

    def _search(self, new: list[Query]) -> dict[Query, Hits | BaseException]:
        self.stats.batches += 1
        self.stats.searched += len(new)
        return self._look_up(new)

    def _look_up(self, new: list[Query]) -> dict[Query, Hits | BaseException]:
        """What the index finds for each query, or raises. Runs in the thread."""
        try:
            # One call for all: a shorter result is the beginning of a longer one.
            results = self.index.search([text for text, _ in new], max(top_k for _, top_k in new))
            return {key: tuple(hits[: key[1]]) for key, hits in zip(new, results, strict=True)}
        except BaseException as error:  # carried over to those who asked
            # One query may have spoiled the batch for all. Not so where a service says what is wrong with itself.
            if len(new) == 1 or isinstance(error, AgentR1Error):
                return dict.fromkeys(new, error)
        return {key: answer for query in new for key, answer in self._look_up([query]).items()}

    def _recall(self, key: Query, callers: int) -> Hits | None:
        found = self._latest.recall(key)
        self.stats.cache_hits += 0 if found is None else callers
        return found
