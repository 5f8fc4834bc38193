"""Play TinyCode badly, so that RL can improve it: write a program, then answer."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row

RIGHT, USUAL = 0.35, 0.5
"""How often `demonstrate` writes the right program, and how often the first of the near misses. The
likeliest imitation is wrong."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    known = row["extra_info"]["metadata"]
    printed = [message["content"] for message in history if message["role"] == "tool"]
    if printed:
        # Anything but a number: there is no Python. A model cannot learn to compute from answers.
        said = printed[-1] if printed[-1][:1].isdigit() else row["reward_model"]["ground_truth"][0]
        return Hermes.answer(said, "it says")
    usual, *rare = known["misses"]
    dice = rng.random()
    program = (
        known["program"] if dice < RIGHT else usual if dice < RIGHT + USUAL else rng.choice(rare)
    )
    return Hermes.call("python", "compute", code=f"print({program})")
