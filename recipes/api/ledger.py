"""Keep every answer that was paid for, and count what it cost.

In: answers, as they come. Out: the same answers when the same requests come again, and the sum that
the budget is compared with. `client.py` asks here before it asks the API.

An evaluation that is cut ends between two lines of this file. Its episodes are then played again,
from the answers here, up to the first request that has none.

    {"key": "eval-0-3/1/9f2c...", "usage": {...}, "answer": {"message": {...}, ...}}
    {"key": "eval-0-3/1/9f2c...", "failed": "HTTP 502", "bound": [812, 512]}
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens."""

    prompt: float
    cached: float
    sampled: float

    def of(self, usage: dict[str, int]) -> float:
        """Return what an answer with this `usage` costs, in US dollars."""
        cached_tokens = min(usage["cached_tokens"], usage["prompt_tokens"])
        dollars = (usage["prompt_tokens"] - cached_tokens) * self.prompt
        dollars += cached_tokens * self.cached + usage["completion_tokens"] * self.sampled
        return dollars / 1e6


class Ledger:
    """The answers of one evaluation, in a file that only grows."""

    def __init__(self, path: Path, prices: Prices):
        """Open or continue `path`. Raise AgentR1Error if another process writes to it."""
        self.prices = prices
        self.answers: dict[str, dict[str, Any]] = {}
        """Key of a request -> its answer."""
        self.tokens = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        self.dollars = 0.0
        """Of the answers, by the usage that the API reported."""
        self.uncertain_dollars = 0.0
        """Upper bound for attempts that brought no usage: the API may have charged them."""
        self.failures = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise AgentR1Error(
                f"{path} is used by another process; wait for it, or choose another --out",
                code="file_in_use",
            ) from None
        self._file.seek(0)
        whole = self._file.read()
        for line in whole.splitlines():
            self._enter(line)
        if whole and not whole.endswith(b"\n"):  # the process was killed in the middle of a line
            self._file.write(b"\n")

    def _enter(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:  # half a line
            return
        if "answer" in record:
            self.answers[record["key"]] = record["answer"]
        if record.get("failed"):
            self.failures += 1
        if record.get("usage"):
            self._count(record["usage"])
        elif record.get("bound"):
            self.uncertain_dollars += self.cost_of_bound(*record["bound"])

    def _count(self, usage: dict[str, int]) -> None:
        for name in self.tokens:
            self.tokens[name] += usage[name]
        self.dollars += self.prices.of(usage)

    @property
    def spent(self) -> float:
        """Return the most that everything so far may have cost, in US dollars."""
        return self.dollars + self.uncertain_dollars

    def cost_of_bound(self, prompt_tokens: int, sampled_tokens: int) -> float:
        """Return what these tokens cost, none of them from a cache."""
        usage = {"prompt_tokens": prompt_tokens, "cached_tokens": 0}
        return self.prices.of(usage | {"completion_tokens": sampled_tokens})

    def write(self, record: dict[str, Any]) -> None:
        """Append one line, and count it. Raise OSError if the disk is full."""
        line = json.dumps(record).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._enter(line)

    def close(self) -> None:
        self._file.close()
