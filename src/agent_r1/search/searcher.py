"""Search for many episodes at once. In: queries of running coroutines. Out: `Hit`s to the search tool (room 3).

A hundred episodes run side by side, and whenever the model has decoded a batch of turns, dozens of them search in the
same moment. One by one, each would pay the fixed cost of encoding and of a FAISS call. So nobody is answered at once:

    search("Vexlor founder") ──┐
    search("Tulo country")   ──┼─ the same turn of the event loop ──▶ one encode, one FAISS call ──▶ everyone wakes
    search("Vexlor founder") ──┘

The first query of a turn asks the event loop to run `_flush` after everything that is ready to run now
(`loop.call_soon` puts it at the end of the queue); until then queries only line up. Nothing ever waits for a timer.

Samples of one question ask the same things, in this step and in later ones; a cache remembers the latest queries.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from agent_r1.search.index import Hit, PassageIndex

Query = tuple[str, int]
"""Text and top_k."""


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
    """Calls of the index."""


@dataclass
class _Batch:
    """Queries that line up in one event loop, each with the futures of those who wait for it."""

    loop: asyncio.AbstractEventLoop
    waiting: dict[Query, list[asyncio.Future[list[Hit]]]] = field(default_factory=dict)


class Searcher:
    """Batched and cached search over one index, for the coroutines of one thread.

    `cache_size` is the number of queries remembered (0: none). Event loops may follow one another (`asyncio.run` called
    again and again); they must not run in several threads at the same time.
    """

    def __init__(self, index: PassageIndex, cache_size: int = 10_000):
        self.index = index
        self.stats = SearchStats()
        self._cache_size = cache_size
        self._cache: OrderedDict[Query, tuple[Hit, ...]] = OrderedDict()  # least recently used first
        self._batch: _Batch | None = None

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """The `top_k` best passages for `query`, best first. Raises what the index raised for the batch."""
        self.stats.queries += 1
        key = (query, top_k)
        if key in self._cache:
            self.stats.cache_hits += 1
            self._cache.move_to_end(key)
            return list(self._cache[key])
        # Every caller waits on a future of its own: if its episode is cancelled, only that future is.
        future = asyncio.get_running_loop().create_future()
        self._open_batch().waiting.setdefault(key, []).append(future)
        return await future

    def _open_batch(self) -> _Batch:
        """The batch of this turn. One that an earlier event loop left behind when it was stopped is forgotten."""
        loop = asyncio.get_running_loop()
        if self._batch is None or self._batch.loop is not loop:
            self._batch = _Batch(loop)
            loop.call_soon(self._flush, self._batch)
        return self._batch

    def _flush(self, batch: _Batch) -> None:
        """Answer everyone in the batch."""
        self._batch = None
        queries = list(batch.waiting)
        try:
            # One call for all: a shorter result is the beginning of a longer one.
            results = self.index.search([text for text, _ in queries], max(top_k for _, top_k in queries))
        except Exception as error:  # whatever it was, it belongs to those who asked
            for future in _still_waiting(batch.waiting.values()):
                future.set_exception(error)
            return
        self.stats.batches += 1
        self.stats.searched += len(queries)
        for (query, top_k), hits in zip(queries, results, strict=True):
            self._remember((query, top_k), hits[:top_k])
            for future in _still_waiting([batch.waiting[query, top_k]]):
                future.set_result(hits[:top_k])

    def _remember(self, key: Query, hits: list[Hit]) -> None:
        self._cache[key] = tuple(hits)
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


def _still_waiting(groups) -> list[asyncio.Future[list[Hit]]]:
    """Futures that nobody has cancelled meanwhile; setting a cancelled one would raise."""
    return [future for group in groups for future in group if not future.done()]
