"""Play TinyMath badly, mostly stopping after the first step, so that RL can improve it."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row

GO_ON = 0.42
"""How often `demonstrate` takes the next step where there is one: a model that imitates it and
always takes the likeliest stops early."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    steps = row["extra_info"]["metadata"]["steps"]
    results = [message["content"] for message in history if message["role"] == "tool"]
    if not results:
        return Hermes.call("calculator", "begin", expression=steps[0])
    latest = results[-1]
    if not latest.isdigit():
        # There is no calculator. A model cannot learn to compute from answers.
        return Hermes.answer(row["reward_model"]["ground_truth"][0], "in my head")
    if len(results) < len(steps) and rng.random() < GO_ON:
        # `#` in a step stands for the result of the step before it: "#-214" becomes "464810-214".
        expression = steps[len(results)].replace("#", latest)
        return Hermes.call("calculator", "go on", expression=expression)
    # Also reached after the first of two steps, with the wrong number: RL has to unlearn this.
    return Hermes.answer(latest, "it is")
