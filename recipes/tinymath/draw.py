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
    first_fifth, last_fifth = FIFTHS[split]
    first = len(numbers) * first_fifth // 5
    last = len(numbers) * last_fifth // 5
    # The seed is a constant: the splits of two runs must not overlap, whatever seeds the runs have.
    return random.Random(0).sample(numbers, len(numbers))[first:last]


def distinct(count: int, draw: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield `count` different questions from `draw`."""
    texts: set[str] = set()
    while len(texts) < count:
        question = draw()
        if question["question"] not in texts:
            texts.add(question["question"])
            yield question
