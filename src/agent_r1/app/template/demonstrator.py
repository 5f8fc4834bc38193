"""Play the task well enough to imitate, and badly enough to improve on."""

import re

from agent_r1 import Hermes


def demonstrate(row, history, rng):
    """Return the agent's next turn. In 60 % of the cases it stops after the first result."""
    first, *rest = re.findall(r"\d+|[-+*]", row["prompt"][-1]["content"])
    results = [message["content"] for message in history if message["role"] == "tool"]
    steps = list(zip(rest[::2], rest[1::2], strict=True))
    if len(results) == len(steps) or (results and rng.random() < 0.6):
        return Hermes.answer(results[-1], "done")
    operation, right_number = steps[len(results)]
    left_number = results[-1] if results else first
    step = f"step {len(results) + 1}"
    return Hermes.call(
        "calculate", step, left=int(left_number), operation=operation, right=int(right_number)
    )
