"""Draw questions for a made-up task: numbers by split, and distinct questions.

In: a range of numbers, or a function that makes a question. Out: questions for `questions(split,
count, rng)`. Also for recipes/tinycode and recipes/two_tools.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

FIFTHS = {"train": (0, 3), "val": (3, 4), "test": (4, 5)}
"""Each split's fifths of the shuffled numbers."""


def split_numbers(numbers: range, split: str) -> list[int]:
    """Return the numbers of a split: no number of a test problem occurs in training.

    They are shuffled, because the model copies only digits that it has seen at a position in
    training.
    """
    first, last = (len(numbers) * fifths // 5 for fifths in FIFTHS[split])
    return random.Random(0).sample(numbers, len(numbers))[first:last]


def distinct(count: int, draw: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield `count` different questions from `draw`."""
    asked: set[str] = set()
    while len(asked) < count:
        drawn = draw()
        if drawn["question"] not in asked:
            asked.add(drawn["question"])
            yield drawn
