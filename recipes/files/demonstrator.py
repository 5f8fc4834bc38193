"""Repair files badly, so that RL can improve it."""

from __future__ import annotations

import random
from typing import Any

from agent_r1 import Hermes, Message, Row

RIGHT = 0.35
"""How often `demonstrate` writes the right line."""
USUAL = 0.45
"""How often it writes the first near miss. It is above `RIGHT`: a model that always takes the
likeliest line is wrong before RL."""
RUNS = 0.3
"""How often it runs the example after the edit."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn."""
    metadata = row["extra_info"]["metadata"]
    usual, *rare = metadata["misses"]
    dice = rng.random()
    if dice < RIGHT:
        expression = metadata["repair"]
    elif dice < RIGHT + USUAL:
        expression = usual
    else:
        expression = rng.choice(rare)
    return _turn(metadata, history, expression, runs=rng.random() < RUNS)


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn without mistakes."""
    metadata = row["extra_info"]["metadata"]
    return _turn(metadata, history, metadata["repair"], runs=False)


def _turn(metadata: dict[str, Any], history: list[Message], expression: str, runs: bool) -> str:
    results = sum(message["role"] == "tool" for message in history)
    if results == 0:
        return Hermes.call("read", "look", path=metadata["path"])
    if results == 1:
        text = f"return {expression}"
        return Hermes.call("edit", "repair", path=metadata["path"], line=2, text=text)
    if results == 2 and runs:
        return Hermes.call("run", "try")
    return Hermes.answer("done", "it is")
