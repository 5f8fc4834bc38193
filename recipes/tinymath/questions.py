"""The problems of TinyMath, each with its steps; `#` is what the step before came to.

    A shop has 877 boxes of 530 pens and sells 214 pens. ...     877*530   #-214
    A farm has 877 hens and buys 530. A fox takes 311. ...       877+530   #-311   #*214

The numbers from 100 to 999 are dealt out to the splits (`split_numbers`): no test number occurs in
a training problem.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from agent_r1_recipes.tinymath.draw import distinct, split_numbers

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "left": (
        "A shop has {a} boxes of {b} pens and sells {c} pens. How many pens are left?",
        ("{a}*{b}", "#-{c}"),
    ),
    "seats": (
        "A hall has {a} rows of {b} seats, and a balcony for {c} more. How many seats is that?",
        ("{a}*{b}", "#+{c}"),
    ),
    "nuts": (
        "Of {a} guests {b} go home. The others eat {c} nuts each. How many nuts is that?",
        ("{a}-{b}", "#*{c}"),
    ),
    "fares": (
        "A train brings {a} people and a bus {b}. They pay {c} coins each. How many coins is that?",
        ("{a}+{b}", "#*{c}"),
    ),
    "eggs": (
        "A farm has {a} hens and buys {b}. A fox takes {c}. The others lay {d} eggs each. How many "
        "eggs is that?",
        ("{a}+{b}", "#-{c}", "#*{d}"),
    ),
}
"""Kind: words and steps, for a > b > c > d."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different problems of a split."""
    numbers = split_numbers(range(100, 1000), split)

    def draw() -> dict[str, Any]:
        kind = rng.choice(list(KINDS))
        a, b, c, d = sorted(rng.sample(numbers, 4), reverse=True)
        words, step_forms = KINDS[kind]
        steps = [form.format(a=a, b=b, c=c, d=d) for form in step_forms]
        return {
            "question": words.format(a=a, b=b, c=c, d=d),
            "answer": str(right_answer(kind, a, b, c, d)),
            "kind": kind,
            "metadata": {"steps": steps},
        }

    return distinct(count, draw)


def right_answer(kind: str, a: int, b: int, c: int, d: int) -> int:
    """Compute the answer without the steps."""
    return {
        "left": a * b - c,
        "seats": a * b + c,
        "nuts": (a - b) * c,
        "fares": (a + b) * c,
        "eggs": (a + b - c) * d,
    }[kind]
