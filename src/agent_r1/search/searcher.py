"""Search for many episodes at once. In: queries of running coroutines. Out: `Hit`s to the search tool (room 3).

A hundred episodes run side by side, and whenever the model has decoded a batch of turns, dozens of them search in the
same moment. One by one, each would pay the fixed cost of encoding and of a FAISS call. So nobody is answered at once:

    search("Vexlor founder") ──┐
    search("Tulo country")   ──┼─ the same turn of the event loop ──▶ one encode, one FAISS call ──▶ everyone wakes
    search("Vexlor founder") ──┘

The first query of a turn asks the event loop to run `_flush` after everything that is ready to run now
(`loop.call_soon` puts it at the end of the queue); until then queries only line up. Nothing ever waits for a timer.

Samples of one question ask the same things, in this step and in later ones; a cache remembers the latest queries. A
remembered query lines up like a new one. Answered at once, its episode would rejoin the sampler in another place of
the batch, which changes the last digits of a log-prob; and a resumed run, whose cache is empty, would not be the
uninterrupted one to the bit.
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
        # Every caller waits on a future of its own: if its episode is cancelled, only that future is.
        future = asyncio.get_running_loop().create_future()
        self._open_batch().waiting.setdefault((query, top_k), []).append(future)
        return await future

    def _open_batch(self) -> _Batch:
        """The batch of this turn. One that an earlier event loop left behind when it was stopped is forgotten."""
        loop = asyncio.get_running_loop()
        if self._batch is None or self._batch.loop is not loop:
            self._batch = _Batch(loop)
            loop.call_soon(self._flush, self._batch)
        return self._batch

    def _flush(self, batch: _Batch) -> None:
        """Answer everyone in the batch, in the order in which they came."""
        self._batch = None
        known = {key: self._cache[key] for key in batch.waiting if key in self._cache}
        new = [key for key in batch.waiting if key not in known]
        answers = known | self._look_up(new, batch)
        for key in filter(answers.__contains__, batch.waiting):
            self.stats.cache_hits += len(batch.waiting[key]) if key in known else 0
            for future in _still_waiting([batch.waiting[key]]):
                future.set_result(list(answers[key]))
            self._remember(key, answers[key])

    def _look_up(self, new: list[Query], batch: _Batch) -> dict[Query, tuple[Hit, ...]]:
        """Ask the index for what is not remembered. What it raises belongs to those who asked; then there is no answer."""
        if not new:
            return {}
        try:
            # One call for all: a shorter result is the beginning of a longer one.
            results = self.index.search([text for text, _ in new], max(top_k for _, top_k in new))
        except Exception as error:
            for future in _still_waiting(batch.waiting[key] for key in new):
                future.set_exception(error)
            return {}
        self.stats.batches += 1
        self.stats.searched += len(new)
        return {key: tuple(hits[: key[1]]) for key, hits in zip(new, results, strict=True)}

    def _remember(self, key: Query, hits: tuple[Hit, ...]) -> None:
        self._cache[key] = hits
        self._cache.move_to_end(key)
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


def _still_waiting(groups) -> list[asyncio.Future[list[Hit]]]:
    """Futures that nobody has cancelled meanwhile; setting a cancelled one would raise."""
    return [future for group in groups for future in group if not future.done()]
