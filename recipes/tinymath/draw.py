"""Draw questions for a made-up task: numbers by split, and distinct questions.

In: a range of numbers, or a function that makes a question. Out: questions for `questions(split,
count, rng)`. Also for recipes/tinycode and recipes/two_tools.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from agent_r1 import ConfigError

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
    """Yield `count` different questions from `draw`. Raise ConfigError if there are not so many."""
    texts: set[str] = set()
    repeats = 0
    while len(texts) < count:
        question = draw()
        if question["question"] in texts:
            repeats += 1
            # If one question is left, so many draws in a row miss it once in 5 * 10^8 times.
            if repeats > 20 * len(texts) + 1000:
                raise ConfigError(
                    f"this task has only {len(texts)} different questions of a split, and "
                    f"{count} are wanted; lower data.train, data.val or data.test",
                    code="too_few_questions",
                )
            continue
        repeats = 0
        texts.add(question["question"])
        yield question
