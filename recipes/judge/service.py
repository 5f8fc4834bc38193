"""Ask a server for scores, each case once. In: cases. Out: a number for each, or an error.

`judge.py` sends one case a request, and `reward_model.py` up to 64. Both are protected here:

- Everything from the first byte to the last retry has one deadline. So a server that hangs or drips
  costs its own episodes and no others.
- An overloaded server (429, 502, 503, 504) or a failed connection is asked again, after a pause.
- A case without a score is forgotten, and asked anew when it recurs. Its episode is aborted, which
  neither rewards nor penalises the agent.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from agent_r1 import AgentR1Error, first_line, send

MAX_SCORES = 100_000
"""Scores to remember. Samples of one question often say the same, and epochs repeat it."""
SCORE_TIMEOUT_S = 60.0
"""For one score, retries included."""
RETRIES = 2
"""Further tries of a request that an overloaded server or a broken connection refused."""
PAUSE_S = 0.5
"""Before the first of them; doubled each time."""
MAX_ANSWER_BYTES = 64 << 10
"""Of the answer to one request."""
OVERLOAD = (429, 502, 503, 504)
"""HTTP statuses that a later try may not have."""
FAILURES = (
    httpx.HTTPError,
    httpx.InvalidURL,
    TimeoutError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
"""What a server's answer can raise while it is read."""

Case = TypeVar("Case", bound=Hashable)


@dataclass
class _Batch(Generic[Case]):
    futures: dict[Case, Future[float]]
    deadline: float
    """By `time.monotonic`."""
    tries: int = 0

    def fail(self, error: Exception) -> None:
        for future in self.futures.values():
            future.set_exception(error)


class ScoreService(Generic[Case]):
    """A server of scores.

    Args:
        name: The server in messages, such as `the judge`.
        url: The address of its endpoint.
        key: The environment variable that may hold its key.
        write: Makes the JSON body of a request for some cases.
        read: Returns a score per case from the answer's JSON, or an exception in its place. Raises
            one of `FAILURES` if the whole answer is wrong.
        batch: Most cases of a request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: str,
        write: Callable[[list[Case]], dict[str, Any]],
        read: Callable[[Any, list[Case]], list[float | Exception]],
        batch: int = 1,
    ):
        self.name = name
        self.url = url
        self.batch = batch
        self._write = write
        self._read = read
        self._scores: dict[Case, Future[float]] = {}
        self._waiting: dict[Case, Future[float]] = {}
        """Cases of this turn of the event loop, which are not sent yet."""
        secret = os.environ.get(key)
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}

    async def score(self, case: Case) -> float:
        """Return the score of a case. Raises AgentR1Error without a finite one."""
        if case not in self._scores:
            self._scores[case] = Future()
            if len(self._scores) > MAX_SCORES:
                del self._scores[next(iter(self._scores))]
            self._waiting[case] = self._scores[case]
            # After all that is ready to run: dozens of episodes end with the same decoded turn.
            asyncio.get_running_loop().call_soon(self._send_waiting)
        future = self._scores[case]
        try:
            # Shielded, because other episodes may wait for the same score.
            return await asyncio.shield(asyncio.wrap_future(future))
        except FAILURES as error:
            if self._scores.get(case) is future:
                del self._scores[case]
            raise AgentR1Error(
                f"{self.name} at {self.url} gives no verdict: {first_line(error)}",
                code="no_verdict",
            ) from None

    def _send_waiting(self) -> None:
        waiting = list(self._waiting.items())
        self._waiting = {}
        deadline = time.monotonic() + SCORE_TIMEOUT_S
        for start in range(0, len(waiting), self.batch):
            self._send(_Batch(dict(waiting[start : start + self.batch]), deadline))

    def _send(self, batch: _Batch[Case]) -> None:
        response = send(
            "POST",
            self.url,
            body=self._write(list(batch.futures)),
            headers=self._headers,
            within_s=max(round(batch.deadline - time.monotonic(), 1), 0.1),
            max_bytes=MAX_ANSWER_BYTES,
        )
        response.add_done_callback(functools.partial(self._receive, batch))

    def _receive(self, batch: _Batch[Case], response: Future[Any]) -> None:
        """Resolve a batch, or send it again. Runs in the thread of all requests."""
        try:
            answer = response.result()
            if answer.status in OVERLOAD and self._try_again(batch):
                return
            if 400 <= answer.status < 500 and len(batch.futures) > 1:
                # One text that is too long for the server must not cost the others their scores.
                for case, future in batch.futures.items():
                    self._send(_Batch({case: future}, batch.deadline, batch.tries))
                return
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            scores = self._read(answer.json(), list(batch.futures))
            if len(scores) != len(batch.futures):
                raise ValueError(f"{len(scores)} scores for {len(batch.futures)} cases")
        except httpx.TransportError as error:
            if not self._try_again(batch):
                batch.fail(error)
        except FAILURES as error:
            batch.fail(error)
        else:
            for future, score in zip(batch.futures.values(), scores, strict=True):
                if isinstance(score, Exception):
                    future.set_exception(score)
                else:
                    future.set_result(score)

    def _try_again(self, batch: _Batch[Case]) -> bool:
        """Send a batch again after a pause. Return False if no try or no time is left."""
        pause_s = PAUSE_S * 2**batch.tries
        if batch.tries == RETRIES or time.monotonic() + pause_s >= batch.deadline:
            return False
        batch.tries += 1
        timer = threading.Timer(pause_s, self._send, [batch])
        timer.daemon = True
        timer.start()
        return True


CONTROL = re.compile(r"<(?=[|｜/]?\w[^<>\s]*>|[|｜])|\[(?=/?[A-Za-z_]+\])")
"""The first character of what looks like a control token: `<|im_end|>`, `</s>`, `[TOOL_CALLS]`."""


def break_control_tokens(text: str) -> str:
    """Put a blank into each sign of a control token: servers read them."""
    return CONTROL.sub(r"\g<0> ", text)


def finite(value: Any) -> float:
    """Return a score as a float. Raises ValueError for everything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no finite number")
    return float(value)
