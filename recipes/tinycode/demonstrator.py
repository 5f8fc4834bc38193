"""Play TinyCode badly, so that RL can improve it: write a program, then answer."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row

RIGHT = 0.35
"""How often `demonstrate` writes the right program."""
USUAL = 0.5
"""How often it writes the first of the near misses. It is above `RIGHT`: a model that always takes
the likeliest program is wrong before RL."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    metadata = row["extra_info"]["metadata"]
    outputs = [message["content"] for message in history if message["role"] == "tool"]
    if outputs:
        answer = outputs[-1]
        if not answer[:1].isdigit():
            # There is no Python. A model cannot learn to compute from answers.
            answer = row["reward_model"]["ground_truth"][0]
        return Hermes.answer(answer, "it says")
    usual, *rare = metadata["misses"]
    dice = rng.random()
    if dice < RIGHT:
        program = metadata["program"]
    elif dice < RIGHT + USUAL:
        program = usual
    else:
        program = rng.choice(rare)
    return Hermes.call("python", "compute", code=f"print({program})")
