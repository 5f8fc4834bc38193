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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, say

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
MOST_TOKENS = 10**9
"""Of one answer. No request has as many bytes, so a larger count is damage."""


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
        """Open or continue `path`. Raise AgentR1Error if it is no file, or in use.

        A line that cannot be read is named by its number, and left out.
        """
        self.prices = prices
        self.answers: dict[str, dict[str, Any]] = {}
        """Key of a request -> its answer."""
        self.tokens: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.dollars = 0.0
        """Of the answers, by the usage that the API reported."""
        self.uncertain_dollars = 0.0
        """Upper bound for attempts that brought no usage: the API may have charged them."""
        self.failures = 0
        self.without_usage = 0
        """Answers whose usage was not reported, or not believed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        if path.exists() and not path.is_file():  # a pipe would wait, and /dev/zero has no end
            raise AgentR1Error(
                f"{path} is not a regular file; choose another --out", code="unreadable_file"
            )
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
        content = self._file.read()
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                self._enter(read_record(line))
            except (ValueError, RecursionError) as error:
                say(
                    f"{path}: line {number} cannot be read ({str(error)[:100]}) and is left "
                    "out: its request is sent again, and what it cost is not counted",
                    sys.stderr,
                )
        if content and not content.endswith(b"\n"):  # a kill in the middle of a line
            self._file.write(b"\n")

    def _enter(self, record: dict[str, Any]) -> None:
        usage = record.get("usage")
        if "answer" in record:
            self.answers[record["key"]] = record["answer"]
            self.without_usage += not usage
        if record.get("failed"):
            self.failures += 1
        if usage:
            for name in COUNTS:
                self.tokens[name] += usage[name]
            self.dollars += self.prices.of(usage)
        elif record.get("bound"):
            self.uncertain_dollars += self.cost_of_bound(*record["bound"])

    @property
    def spent(self) -> float:
        """Return the most that everything so far may have cost, in US dollars."""
        return self.dollars + self.uncertain_dollars

    def cost_of_bound(self, prompt_tokens: int, sampled_tokens: int) -> float:
        """Return what these tokens cost, none of them from a cache."""
        usage = {"prompt_tokens": prompt_tokens, "cached_tokens": 0}
        return self.prices.of(usage | {"completion_tokens": sampled_tokens})

    def write(self, record: dict[str, Any]) -> None:
        """Count one record, and append its line. Raise OSError with the file's name."""
        line = json.dumps(record).encode()
        self._enter(read_record(line))
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:  # which has no name of its own
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        self._file.close()


def read_record(line: bytes) -> dict[str, Any]:
    """Read one line. Raise ValueError unless it has the form that `Ledger.write` writes."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("key"), str):
        raise ValueError("it is not a record with a key")
    if "answer" not in record and "failed" not in record:
        raise ValueError("it has neither an answer nor a failure")
    if "answer" in record:
        answer = record["answer"]
        is_answer = isinstance(answer, dict) and isinstance(answer.get("message"), dict)
        if not is_answer or not isinstance(answer.get("finish_reason"), str):
            raise ValueError("its answer has no message or no finish_reason")
    usage = record.get("usage")
    if usage is not None and not _is_usage(usage):
        raise ValueError("its usage has no three counts of tokens")
    bound = record.get("bound")
    if bound is not None and not _is_bound(bound):
        raise ValueError("its bound has no two counts of tokens")
    return record


def _is_usage(value: Any) -> bool:
    return isinstance(value, dict) and all(is_count(value.get(name)) for name in COUNTS)


def _is_bound(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def is_count(value: Any) -> bool:
    """Return whether `value` is a number of tokens that one answer may have."""
    return type(value) is int and 0 <= value <= MOST_TOKENS
