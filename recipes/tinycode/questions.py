"""The problems of TinyCode, with the program that solves each, and programs that nearly do.

    Add the squares of 214, 530 and 877.                               print(214**2+530**2+877**2)
    How many whole numbers from 1 to 643 can be divided by 12?         print(643//12)
    Add all whole numbers from 120 to 455.                             print(sum(range(120,455+1)))

The numbers from 20 to 999 are dealt out to the splits (`split_numbers`): no test number occurs in a
training problem.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from agent_r1_recipes.tinymath.draw import distinct, split_numbers

KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "squares": (
        "Add the squares of {a}, {b} and {c}.",
        "{a}**2+{b}**2+{c}**2",
        ("{a}+{b}+{c}", "({a}+{b}+{c})**2", "{a}**2+{b}**2+{c}"),
    ),
    "multiples": (
        "How many whole numbers from 1 to {c} can be divided by {a}?",
        "{c}//{a}",
        ("{c}/{a}", "{c}%{a}", "{a}//{c}"),
    ),
    "range": (
        "Add all whole numbers from {a} to {c}.",
        "sum(range({a},{c}+1))",
        ("sum(range({a},{c}))", "{a}+{c}", "len(range({a},{c}))"),
    ),
    "remainder": (
        "What is left when {b} times {c} is divided by {a}?",
        "{b}*{c}%{a}",
        ("{b}*{c}//{a}", "{b}+{c}%{a}", "{b}*{c}"),
    ),
    "largest": (
        "What is the square of the largest of {a}, {b} and {c}?",
        "max({a},{b},{c})**2",
        ("max({a},{b},{c})", "max({a},{b},{c})*2", "{a}**2"),
    ),
}
"""Kind: words, program, near misses."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different problems of a split."""
    numbers = split_numbers(range(20, 1000), split)

    def draw() -> dict[str, Any]:
        kind = rng.choice(list(KINDS))
        a, b, c = sorted(rng.sample(numbers, 3))
        words, program, misses = KINDS[kind]
        return {
            "question": words.format(a=a, b=b, c=c),
            "answer": str(right_answer(kind, a, b, c)),
            "kind": kind,
            "metadata": {
                "program": program.format(a=a, b=b, c=c),
                "misses": [miss.format(a=a, b=b, c=c) for miss in misses],
            },
        }

    return distinct(count, draw)


def right_answer(kind: str, a: int, b: int, c: int) -> int:
    """Compute the answer without the program: nothing is executed to make the data."""
    return {
        "squares": a * a + b * b + c * c,
        "multiples": sum(n % a == 0 for n in range(1, c + 1)),
        "range": (c - a + 1) * (a + c) // 2,
        "remainder": b * c - a * (b * c // a),
        "largest": c * c,
    }[kind]
