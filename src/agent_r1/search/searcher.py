"""Search for many episodes at once. In: queries of running coroutines. Out: `Hit`s to the search tool (room 3).

A hundred episodes run side by side, and whenever the model has decoded a batch of turns, dozens of them search in the
same moment. Asked one by one, each query would pay the fixed cost of encoding and of a FAISS call. So they are collected:

    search("Sosnum author") ──┐
    search("Tulo country")   ──┼─ the same turn of the event loop ──▶ one encode, one FAISS call ──▶ everyone wakes
    search("Sosnum author") ──┘

The first query of a turn asks the event loop to run `_flush` after everything that is ready to run now
(`loop.call_soon` puts it at the end of the queue); until then queries only line up.

The index itself works in a thread, one batch at a time; what comes in meanwhile makes the next batch. So an index that is
slow, or a service that hangs, stops those who asked it and nobody else: the deadline of a call (`call_tool`) holds.

If tokens are sampled in this process as well, the event loop waits for the index, for `PATIENCE_S` at most. Otherwise the
clock would decide which episodes share the sampler's next batch, and the batch changes the last digits of a log-prob.

Samples of one question ask the same things, in this iteration and in later ones; a cache remembers the latest queries. A
remembered query lines up like a new one. If it were answered at once, its episode would take another place in the sampler's
batch, and a resumed run, whose cache is empty, would differ from the uninterrupted one in the last bits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_r1.device import SAMPLING_HERE
from agent_r1.errors import AgentR1Error
from agent_r1.search.index import Hit, PassageIndex

MAX_QUERY_CHARS = 2000
"""More than any encoder reads. It bounds what one query can cost."""
PATIENCE_S = 2.0
"""How long an event loop that samples waits for its searches."""

Query = tuple[str, int]
"""Text and top_k."""
Answer = tuple[Hit, ...] | BaseException
"""What the index found, or what it raised."""
Futures = dict[Query, list[asyncio.Future[list[Hit]]]]
"""Who waits for what, in the order in which it was first asked."""


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
    """Batches that the index was asked."""


@dataclass
class _Line:
    """Those who wait in one event loop."""

    loop: asyncio.AbstractEventLoop
    waiting: Futures = field(default_factory=dict)
    at_work: Futures = field(default_factory=dict)
    """What the index is computing. Empty: it is free."""
    called: bool = False
    """Whether `_flush` is about to run."""


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
        self._line: _Line | None = None
        # An event loop may begin while the search that an earlier one gave up on still runs.
        self._index_lock = threading.Lock()

    async def search(self, query: str, top_k: int) -> list[Hit]:
        """The `top_k` best passages for `query`, best first. Raises what the index raised for it."""
        return await self.ask(query, top_k)

    def ask(self, query: str, top_k: int) -> asyncio.Future[list[Hit]]:
        """`search` without waiting; it lines up at once."""
        self.stats.queries += 1
        loop = asyncio.get_running_loop()
        if self._line is None or self._line.loop is not loop:  # an earlier loop keeps its own line
            self._line = _Line(loop)
        line = self._line
        # Every caller waits on a future of its own: if its episode is cancelled, only that future is.
        future = loop.create_future()
        line.waiting.setdefault((query, top_k), []).append(future)
        if not line.called:
            line.called = True
            loop.call_soon(self._flush, line)
        return future

    @property
    def waiting(self) -> int:
        """Queries without an answer, also those whose callers gave up until their batch is done."""
        line = self._line
        return sum(map(len, [*line.waiting.values(), *line.at_work.values()])) if line else 0

    def _flush(self, line: _Line) -> None:
        """Answer what is remembered, and set the index to work on the rest, unless it is at work already."""
        line.called = False
        batch, line.waiting = line.waiting, {}
        found: dict[Query, Answer] = {key: self._cache[key] for key in batch if key in self._cache}
        self.stats.cache_hits += sum(len(batch[key]) for key in found)
        new = {key: batch[key] for key in batch if key not in found and _still_waiting(batch[key])}
        if line.at_work:
            line.waiting = new
        elif new:
            found |= self._set_to_work(line, new)
        self._answer(batch, found)

    def _set_to_work(self, line: _Line, new: Futures) -> Mapping[Query, Answer]:
        """Ask the index in a thread. Returns its answers if this event loop is one that waits for them, and they came."""
        self.stats.batches += 1
        self.stats.searched += len(new)
        job: concurrent.futures.Future[dict[Query, Answer]] = concurrent.futures.Future()

        def work() -> None:
            with self._index_lock:
                job.set_result(self._look_up(list(new)))

        # A daemon, and no pool: a search that hangs must not keep the interpreter from exiting.
        threading.Thread(target=work, name="search", daemon=True).start()
        if line.loop in SAMPLING_HERE:
            concurrent.futures.wait([job], PATIENCE_S)
        if job.done():
            return job.result()
        line.at_work = new

        def tell(job: concurrent.futures.Future[dict[Query, Answer]]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile: nobody waits any more
                line.loop.call_soon_threadsafe(self._work_is_done, line, job.result())

        job.add_done_callback(tell)
        return {}

    def _work_is_done(self, line: _Line, found: dict[Query, Answer]) -> None:
        batch, line.at_work = line.at_work, {}
        self._answer(batch, found)
        self._flush(line)

    def _look_up(self, new: list[Query]) -> dict[Query, Answer]:
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

    def _answer(self, batch: Futures, found: Mapping[Query, Answer]) -> None:
        """Wake those whose query was found, in the order in which they came."""
        for key in filter(found.__contains__, batch):
            answer = found[key]
            for future in _still_waiting(batch[key]):
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(list(answer))
            if not isinstance(answer, BaseException):
                self._remember(key, answer)

    def _remember(self, key: Query, hits: tuple[Hit, ...]) -> None:
        self._cache[key] = hits
        self._cache.move_to_end(key)
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


def _still_waiting(futures: list[asyncio.Future[list[Hit]]]) -> list[asyncio.Future[list[Hit]]]:
    """Those that nobody has cancelled meanwhile; setting a cancelled one would raise."""
    return [future for future in futures if not future.done()]
