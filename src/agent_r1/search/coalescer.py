"""Answer concurrent questions of many coroutines as one batch.

Next: `searcher.py`, and `BatchTool` (tool/batch.py).

When the model has decoded a batch of turns, dozens of episodes ask at the same moment. One by one,
each question would pay the fixed cost of an answer. So they are collected:

    ask("Sosnum author") ──┐
    ask("Tulo country")   ──┼─ the same turn of the event loop ─▶ one call of `work` ─▶ all continue
    ask("Sosnum author") ──┘

The first question of a turn schedules `_flush` after everything that is ready to run
(`loop.call_soon` appends it to the queue). Until then, questions only queue.

A thread does the work, one batch at a time. Questions that arrive meanwhile form the next batch.
Slow work or a hanging service therefore delays only its callers, and a call's deadline
(`call_tool`) applies.

If tokens are sampled in this process too, the event loop waits for the answers, at most
`BATCH_WAIT_S`. Otherwise the clock would decide which episodes share the sampler's next batch, and
the batch changes the last digits of a log-prob.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agent_r1.ground.device import SAMPLING_HERE

BATCH_WAIT_S = 2.0
"""Seconds that an event loop with a sampler waits for a batch."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Futures = dict[Key, list[asyncio.Future]]
"""The waiting futures of each question, in the order of first asking."""


@dataclass
class _Line:
    """The questions of one event loop."""

    loop: asyncio.AbstractEventLoop
    waiting: Futures = field(default_factory=dict)
    at_work: Futures = field(default_factory=dict)  # in the thread; empty: the thread is free
    is_scheduled: bool = False  # whether `_flush` is scheduled


class Coalescer(Generic[Key, Value]):
    """Batches for the coroutines of one thread.

    Event loops may follow one another (`asyncio.run` again and again).

    `work` runs in a thread. It gets different questions, in the order of first asking, and returns
    each answer or an exception to raise. `recall` may answer a question without `work` (it gets the
    question and its number of callers, and returns None for unknown). `learn` is called with every
    answer.
    """

    def __init__(
        self,
        work: Callable[[list[Key]], Mapping[Key, Value | BaseException]],
        recall: Callable[[Key, int], Value | None] = lambda question, callers: None,
        learn: Callable[[Key, Value], None] = lambda question, answer: None,
    ):
        self._work = work
        self._recall = recall
        self._learn = learn
        self._line: _Line | None = None
        # An event loop may start while the abandoned batch of an earlier one still runs.
        self._lock = threading.Lock()

    def ask(self, question: Key) -> asyncio.Future[Value]:
        """Queue a question. The future raises an exception that `work` returned."""
        loop = asyncio.get_running_loop()
        if self._line is None or self._line.loop is not loop:  # an earlier loop keeps its own line
            self._line = _Line(loop)
        line = self._line
        # Each caller has its own future: if its episode is cancelled, only that future is.
        future = loop.create_future()
        line.waiting.setdefault(question, []).append(future)
        if not line.is_scheduled:
            line.is_scheduled = True
            loop.call_soon(self._flush, line)
        return future

    @property
    def waiting(self) -> int:
        """Questions without an answer, also of callers that gave up, until their batch ends."""
        line = self._line
        if line is None:
            return 0
        return sum(len(futures) for futures in [*line.waiting.values(), *line.at_work.values()])

    def _flush(self, line: _Line) -> None:
        """Answer what `recall` knows, and start work on the rest unless the thread is busy."""
        line.is_scheduled = False
        batch = line.waiting
        line.waiting = {}
        answers: dict[Any, Any] = {}
        for key, futures in batch.items():
            answer = self._recall(key, len(futures))
            if answer is not None:
                answers[key] = answer
        new: Futures[Any] = {}
        for key, futures in batch.items():
            if key not in answers and _still_waiting(futures):
                new[key] = futures
        if line.at_work:
            line.waiting = new
        elif new:
            answers |= self._set_to_work(line, new)
        self._answer(batch, answers)

    def _set_to_work(self, line: _Line, new: Futures) -> Mapping[Any, Any]:
        """Start work in a thread.

        Return the answers if this event loop waits for them and they came in time.
        """
        job: concurrent.futures.Future[Mapping[Any, Any]] = concurrent.futures.Future()

        def work() -> None:
            with self._lock:
                try:
                    job.set_result(self._work(list(new)))
                except BaseException as error:  # raised in the callers
                    job.set_result(dict.fromkeys(new, error))

        # A daemon thread instead of a pool: hanging work must not keep the interpreter from
        # exiting.
        threading.Thread(target=work, name="batch", daemon=True).start()
        if line.loop in SAMPLING_HERE:
            concurrent.futures.wait([job], BATCH_WAIT_S)
        if job.done():
            return job.result()
        line.at_work = new

        def tell(job: concurrent.futures.Future[Mapping[Any, Any]]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
                line.loop.call_soon_threadsafe(self._work_is_done, line, job.result())

        job.add_done_callback(tell)
        return {}

    def _work_is_done(self, line: _Line, answers: Mapping[Any, Any]) -> None:
        batch = line.at_work
        line.at_work = {}
        self._answer(batch, answers)
        self._flush(line)

    def _answer(self, batch: Futures, answers: Mapping[Any, Any]) -> None:
        """Resolve the futures of answered questions, in the order of asking."""
        for key, futures in batch.items():
            if key not in answers:
                continue
            answer = answers[key]
            for future in _still_waiting(futures):
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            if not isinstance(answer, BaseException):
                self._learn(key, answer)


def _still_waiting(futures: list[asyncio.Future]) -> list[asyncio.Future]:
    """Return the futures that were not cancelled; setting a cancelled one would raise."""
    return [future for future in futures if not future.done()]
