"""A reward of one's own: a function of the answer and the row, in the place of exact match.

    def close_enough(answer, row):
        return 1 - abs(float(answer) - float(row["reward_model"]["ground_truth"][0])) / 100

In: `env.reward=FILE.py:FUNCTION`. Out: what `env/hermes.py` pays on the last action. The score of an evaluation is then this
reward: nothing that is not exact match is called EM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from agent_r1 import own
from agent_r1.errors import ConfigError
from agent_r1.types import Row

Reward = Callable[[str, Row], float]


@cache
def reward_of(name: str) -> Reward:
    """The function of that name. Raises ConfigError where it is none."""
    function = own.load(name, "env.reward")
    if not callable(function):
        raise ConfigError(f"env.reward={name} is {type(function).__name__}; write `def reward(answer, row) -> float`")
    return function


def own_outcome(
    name: str, answer: str | None, well_formed: bool, row: Row, format_penalty: float
) -> tuple[float, dict[str, float]]:
    """(reward, parts): what the function pays for the answer (0 where there is none), minus the penalty for a malformed ending.

    Raises ValueError for what is no finite number; the function's own exceptions pass.
    """
    paid: Any = reward_of(name)(answer, row) if answer is not None else 0.0
    if not isinstance(paid, int | float) or not math.isfinite(paid):
        raise ValueError(f"env.reward={name} returned {paid!r}; it must be a finite number")
    parts = {"answer": float(paid), "format": 0.0 if well_formed else -format_penalty}
    return sum(parts.values()), parts
