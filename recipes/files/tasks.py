"""Make folders with one wrong line, its repair, and repairs that nearly fit.

    Fix dasnol.py: it subtracts its number, and should add it.
    return a*b-37                       the file
    return a*b+37                       right
    return a+b+37, return a*b*37        near misses

The number is only in the file, so the agent has to read it. No name and no number of a test task
occurs in a training task.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from agent_r1_recipes.tinymath.draw import distinct, split_numbers

KINDS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "add": (
        "it subtracts its number, and should add it.",
        "a*b-{k}", "a*b+{k}", ("a*b*{k}", "a*b-{k}", "a+b+{k}"),
    ),
    "limit": (
        "its number is the most, and should be the least.",
        "min(a,{k})", "max(a,{k})", ("min(b,{k})", "min(a,{k})", "max(a,b)"),
    ),
    "last": (
        "its sum leaves out the last number.",
        "sum(range({k},a+{k}))", "sum(range({k},a+{k}+1))",
        ("sum(range({k}+1,a+{k}))", "sum(range({k},a+{k}))", "sum(range({k},a))"),
    ),
    "order": (
        "it should subtract first.",
        "a-b*{k}", "(a-b)*{k}", ("(a*b)-{k}", "a-b*{k}", "(b-a)*{k}"),
    ),
    "rest": (
        "it should return the remainder.",
        "a//{k}", "a%{k}", ("a/{k}", "a//{k}", "{k}%a"),
    ),
}  # fmt: skip
"""Kind: words, the wrong expression, the right one, near misses."""
_FIRST = """das bel kor mil nus pat rim sol tam vek gor fen lud hap jor wim zed cal dun bro
tev yam pel sid fos kub lan mor gab"""
_LAST = """nol ker tis mar pun dek lar vos hin gat sul rem fod bik cas jun wen zor tap nim lok ped
rus gim hov beg dit nox ral pev"""
FIRST, LAST = _FIRST.split(), _LAST.split()
TESTS = 5
"""Hidden calls, after the example's."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different tasks of a split."""
    names = split_numbers(range(len(FIRST) * len(LAST)), split)
    numbers = split_numbers(range(11, 1000), split)

    def file_name() -> str:
        place = rng.choice(names)
        return f"{FIRST[place % len(FIRST)]}{LAST[place // len(FIRST)]}.py"

    def draw() -> dict[str, Any]:
        kind = rng.choice(list(KINDS))
        words, wrong, right, misses = KINDS[kind]
        k = rng.choice(numbers)
        path, other = file_name(), file_name()
        files = {
            other: f"def cost(a, b):\n    return a+b+{rng.choice(numbers)}\n",
            path: f"def cost(a, b):\n    return {wrong.format(k=k)}\n",
        }
        return {
            "question": f"Fix {path}: {words}",
            "kind": kind,
            "metadata": {
                "files": json.dumps(files),
                "path": path,
                "kind": kind,
                "number": k,
                "repair": right.format(k=k),
                "misses": [miss.format(k=k) for miss in misses],
            },
        }

    return distinct(count, draw)


def arguments_of(path: str, number: int) -> list[list[int]]:
    """Return the arguments of the example, then those of the hidden tests.

    They are on both sides of the number, so that each near miss is wrong somewhere.
    """
    rng = random.Random(f"{path}/{number}")
    calls = []
    for place in range(1 + TESTS):
        low = rng.randrange(3, number)
        high = number + rng.randrange(3, 90)
        a = high if place % 2 else low
        calls.append([a, rng.randrange(2, 60)])
    return calls


def right_value(kind: str, k: int, a: int, b: int) -> int:
    """Compute the right value without any text: nothing is executed to know it."""
    return {
        "add": a * b + k,
        "limit": max(a, k),
        "last": sum(range(k, k + a + 1)),
        "order": (a - b) * k,
        "rest": a % k,
    }[kind]
