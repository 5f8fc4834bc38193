"""Play TinyMath badly, mostly stopping after the first step, so that RL can improve it."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row

GO_ON = 0.42
"""How often `demonstrate` takes the next step where there is one: a model that imitates it and
always takes the likeliest stops early."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    steps = row["extra_info"]["metadata"]["steps"]
    found = [message["content"] for message in history if message["role"] == "tool"]
    if found and not found[-1].isdigit():
        # There is no calculator. A model cannot learn to compute from answers.
        return Hermes.answer(row["reward_model"]["ground_truth"][0], "in my head")
    if not found:
        return Hermes.call("calculator", "begin", expression=steps[0])
    if len(found) < len(steps) and rng.random() < GO_ON:
        return Hermes.call(
            "calculator", "go on", expression=steps[len(found)].replace("#", found[-1])
        )
    return Hermes.answer(found[-1], "it is")
