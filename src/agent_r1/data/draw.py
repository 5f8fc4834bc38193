"""Drawing questions for a made-up task: numbers by split, and questions that differ.

In: a range of numbers, or a function that makes a question. Out: what a recipe's `questions(split, count, rng)` yields.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

FIFTHS = {"train": (0, 3), "val": (3, 4), "test": (4, 5)}
"""Whose numbers are whose, once they have been shuffled."""


def split_numbers(numbers: range, split: str) -> list[int]:
    """The numbers of a split, so that no number of a test problem occurs in a training problem. Dealt out at random: a digit
    that never stood last in training would not be copied from there in the test."""
    first, last = (len(numbers) * fifths // 5 for fifths in FIFTHS[split])
    return random.Random(0).sample(numbers, len(numbers))[first:last]


def distinct(count: int, draw: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield `count` different questions that `draw` makes."""
    asked: set[str] = set()
    while len(asked) < count:
        drawn = draw()
        if drawn["question"] not in asked:
            asked.add(drawn["question"])
            yield drawn
