"""Make Populations, a world that needs two tools, and a bad demonstrator for it.

Some questions need a search, some need the calculator, and half of them need both, in the right
order:

    How many inhabitants has Bandel?                             search
    What is 47 + 12?                                             calculator
    How many inhabitants do Bandel and Kirtan have together?     search, search, calculator

It has the form of a user-defined task (docs/tutorial/): the preset names `questions` and
`demonstrate`. The tools are built in, and the score is exact match.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from agent_r1 import Hermes, Message, Row
from agent_r1_recipes.laptop.tinyhop import HEADS, TAILS
from agent_r1_recipes.tinymath.draw import distinct

KINDS = {"search": 0.25, "calculator": 0.25, "together": 0.3, "more": 0.2}
"""Kind of question -> share of it. The last two take both tools."""
PLACES = {"train": (0, 2400), "val": (2400, 2800), "test": (2800, 3528)}
"""Which of the names are towns of which split: no town of the test is met in training."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield questions about the towns of a split, with passages that state their inhabitants."""
    names: list[str] = []
    for head in HEADS:
        names += [(head + tail).capitalize() for tail in TAILS]
    random.Random(0).shuffle(names)
    first, last = PLACES[split]
    towns = {name: rng.randrange(11, 100) for name in names[first:last]}

    def draw() -> dict[str, Any]:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        a, b = sorted(rng.sample(list(towns), 2), key=towns.get, reverse=True)
        x = towns[a]
        y = towns[b]
        sign = "+"
        if kind == "calculator":
            x = rng.randrange(11, 100)
            y = rng.randrange(11, 100)
            if rng.random() < 0.4:
                sign = "-"
        elif kind == "more":
            sign = "-"
        value = x + y
        if sign == "-":
            value = x - y
        # Kind -> the question, its answer, and the towns that have to be looked up.
        text, value, places = {
            "search": (f"How many inhabitants has {a}?", x, [a]),
            "calculator": (f"What is {x} {sign} {y}?", value, []),
            "together": (f"How many inhabitants do {a} and {b} have together?", value, [a, b]),
            "more": (f"How many more inhabitants has {a} than {b}?", value, [a, b]),
        }[kind]
        expression = f"{x} {sign} {y}"
        if kind == "search":
            expression = ""  # nothing to compute
        passages = []
        for town in places:
            passages.append({"title": town, "text": f"{town} has {towns[town]} inhabitants."})
        return {
            "question": text,
            "answer": str(value),
            "kind": kind,
            "metadata": {"towns": places, "sum": expression},
            "passages": passages,
        }

    return distinct(count, draw)


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the agent's next turn. It errs on purpose: it guesses, stops after the first town, or
    adds without the calculator.
    """
    metadata = row["extra_info"]["metadata"]
    results = [message["content"] for message in history if message["role"] == "tool"]
    inhabitants = dict(re.findall(r"(\w+) has (\d+) inhabitants", "\n".join(results)))
    unread = [town for town in metadata["towns"] if town not in inhabitants]
    if unread:
        if inhabitants and rng.random() < 0.5:
            return Hermes.answer(inhabitants[metadata["towns"][0]], "enough")
        return Hermes.call("search", "look it up", query=unread[0])
    if not metadata["sum"]:
        return Hermes.answer(inhabitants[metadata["towns"][0]], "found")
    # A bare number is the calculator's result: a passage has words.
    if results and re.fullmatch(r"-?\d+", results[-1]):
        return Hermes.answer(results[-1], "done")
    if rng.random() < 0.45:
        # Guess one of the two numbers: "47 + 12" -> 47 or 12.
        return Hermes.answer(rng.choice(metadata["sum"].split()[::2]), "guess")
    return Hermes.call("calculator", "work it out", expression=metadata["sum"])
