"""What many coroutines ask in the same moment, answered as one batch. Next: `searcher.py`, and `BatchTool` (tool/batch.py).

A hundred episodes run side by side, and whenever the model has decoded a batch of turns, dozens of them ask in the same
moment. Asked one by one, each question would pay the fixed cost of an answer. So they are collected:

    ask("Sosnum author") ──┐
    ask("Tulo country")   ──┼─ the same turn of the event loop ──▶ one call of `work` ──▶ everyone wakes
    ask("Sosnum author") ──┘

The first question of a turn schedules `_flush` after everything that is ready to run now: `loop.call_soon` puts it
at the end of the queue. Until then questions only line up.

The work is done in a thread, one batch at a time; what comes in meanwhile makes the next batch. So work that is slow, or
a service that hangs, stops only those who asked: the deadline of a call (`call_tool`) holds.

If tokens are sampled in this process as well, the event loop waits for the answers, for `PATIENCE_S` at most. Otherwise the
clock would decide which episodes share the sampler's next batch, and the batch changes the last digits of a log-prob.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agent_r1.ground.device import SAMPLING_HERE

PATIENCE_S = 2.0
"""How long an event loop that samples waits for a batch."""

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")
Futures = dict[Question, list[asyncio.Future]]
"""Who waits for what, in the order in which it was first asked."""


@dataclass
class _Line:
    """Those who wait in one event loop."""

    loop: asyncio.AbstractEventLoop
    waiting: Futures = field(default_factory=dict)
    at_work: Futures = field(default_factory=dict)
    """What the thread works on. Empty: it is free."""
    called: bool = False
    """Whether `_flush` is about to run."""


class Coalescer(Generic[Question, Answer]):
    """For the coroutines of one thread. Event loops may follow one another (`asyncio.run` called again and again).

    `work` runs in a thread. It gets different questions in the order of their first asking, and returns the answer to each, or
    the exception to raise. What `recall` knows (of a question and how many ask it; None: nothing)
    is answered without it; `learn` hears of every answer.
    """

    def __init__(
        self,
        work: Callable[[list[Question]], Mapping[Question, Answer | BaseException]],
        recall: Callable[[Question, int], Answer | None] = lambda question, callers: None,
        learn: Callable[[Question, Answer], None] = lambda question, answer: None,
    ):
        self._work, self._recall, self._learn = work, recall, learn
        self._line: _Line | None = None
        # An event loop may begin while the batch that an earlier one gave up on is still at work.
        self._lock = threading.Lock()

    def ask(self, question: Question) -> asyncio.Future[Answer]:
        """Line up. The future raises what `work` returned as an exception."""
        loop = asyncio.get_running_loop()
        if self._line is None or self._line.loop is not loop:  # an earlier loop keeps its own line
            self._line = _Line(loop)
        line = self._line
        # Every caller waits on a future of its own: if its episode is cancelled, only that future is.
        future = loop.create_future()
        line.waiting.setdefault(question, []).append(future)
        if not line.called:
            line.called = True
            loop.call_soon(self._flush, line)
        return future

    @property
    def waiting(self) -> int:
        """Questions without an answer, also those whose callers gave up until their batch is done."""
        line = self._line
        return sum(map(len, [*line.waiting.values(), *line.at_work.values()])) if line else 0

    def _flush(self, line: _Line) -> None:
        """Answer what is remembered, and start the thread on the rest unless it runs already."""
        line.called = False
        batch, line.waiting = line.waiting, {}
        recalled = {key: self._recall(key, len(futures)) for key, futures in batch.items()}
        found: dict[Any, Any] = {key: known for key, known in recalled.items() if known is not None}
        new = {key: batch[key] for key in batch if key not in found and _still_waiting(batch[key])}
        if line.at_work:
            line.waiting = new
        elif new:
            found |= self._set_to_work(line, new)
        self._answer(batch, found)

    def _set_to_work(self, line: _Line, new: Futures) -> Mapping[Any, Any]:
        """Work in a thread. Returns the answers if this event loop is one that waits for them, and they came."""
        job: concurrent.futures.Future[Mapping[Any, Any]] = concurrent.futures.Future()

        def work() -> None:
            with self._lock:
                try:
                    job.set_result(self._work(list(new)))
                except BaseException as error:  # carried over to those who asked
                    job.set_result(dict.fromkeys(new, error))

        # A daemon, and no pool: work that hangs must not keep the interpreter from exiting.
        threading.Thread(target=work, name="batch", daemon=True).start()
        if line.loop in SAMPLING_HERE:
            concurrent.futures.wait([job], PATIENCE_S)
        if job.done():
            return job.result()
        line.at_work = new

        def tell(job: concurrent.futures.Future[Mapping[Any, Any]]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile: no coroutine waits any more
                line.loop.call_soon_threadsafe(self._work_is_done, line, job.result())

        job.add_done_callback(tell)
        return {}

    def _work_is_done(self, line: _Line, found: Mapping[Any, Any]) -> None:
        batch, line.at_work = line.at_work, {}
        self._answer(batch, found)
        self._flush(line)

    def _answer(self, batch: Futures, found: Mapping[Any, Any]) -> None:
        """Wake those whose answer was found, in the order in which they came."""
        for key in filter(found.__contains__, batch):
            answer = found[key]
            for future in _still_waiting(batch[key]):
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            if not isinstance(answer, BaseException):
                self._learn(key, answer)


class Latest(Generic[Question, Answer]):
    """The answers to the `most` latest questions, to `recall` and to `learn`."""

    def __init__(self, most: int):
        self._most = most
        self._known: OrderedDict[Question, Answer] = OrderedDict()  # the one that was asked longest ago first

    def recall(self, question: Question, callers: int = 1) -> Answer | None:
        return self._known.get(question)

    def learn(self, question: Question, answer: Answer) -> None:
        self._known[question] = answer
        self._known.move_to_end(question)
        if len(self._known) > self._most:
            self._known.popitem(last=False)


def _still_waiting(futures: list[asyncio.Future]) -> list[asyncio.Future]:
    """Drop the cancelled ones; setting a result of those would raise."""
    return [future for future in futures if not future.done()]
