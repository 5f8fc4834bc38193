"""How the task is played, for a model that starts from nothing: well enough to be imitated, badly enough to be improved on."""

import re

from agent_r1 import answer, call


def demonstrate(row, history, rng):
    """The agent's next turn. Half of the time it stops after the first calculation; RL has to unlearn that."""
    first, *rest = re.findall(r"\d+|[-+*]", row["prompt"][-1]["content"])
    results = [message["content"] for message in history if message["role"] == "tool"]
    steps = list(zip(rest[::2], rest[1::2], strict=True))
    if len(results) == len(steps) or (results and rng.random() < 0.6):
        return answer(results[-1], "done")
    operation, right = steps[len(results)]
    left = results[-1] if results else first
    return call("calculate", f"step {len(results) + 1}", left=int(left), operation=operation, right=int(right))
