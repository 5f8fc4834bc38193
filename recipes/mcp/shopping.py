"""An example: questions about a price list, and a demonstrator that often guesses."""

import random
from itertools import product

from agent_r1 import Hermes

COLOURS = ("red", "blue", "green", "black", "white", "pink", "grey")
GOODS = ("lamp", "chair", "clock", "table", "spoon", "mirror", "shelf")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Quito", "Delhi", "Turin")
FIRST = {"train": 0, "val": 250, "test": 300}
"""Each split has things of its own, of 392."""


def price(thing):
    """Return the price in the list of prices.py, for the right answers."""
    return str(10 + sum(map(ord, thing)) % 90)


def questions(split, count, rng):
    things = [
        f"{colour} {good} in {city}" for colour, good, city in product(COLOURS, GOODS, CITIES)
    ]
    random.Random(0).shuffle(things)
    for thing in things[FIRST[split] :][:count]:
        question = f"What does a {thing} cost?"
        yield {"question": question, "answer": price(thing), "metadata": {"thing": thing}}


def demonstrate(row, history, rng):
    """Look the price up in half of the plays, and guess it in the others."""
    if history[-1]["role"] == "tool":
        return Hermes.answer(history[-1]["content"].strip())
    if rng.random() < 0.5:
        return Hermes.answer(str(rng.randrange(10, 100)))
    return Hermes.call("price", name=row["extra_info"]["metadata"]["thing"])


# As a newcomer writes it: without types.
# pyright: reportMissingParameterType=false
