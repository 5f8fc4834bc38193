"""Define the values that settings accept.

In: nothing. Out: types with bounds. Next: `settings.py` uses them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_r1.config import tables

AtLeast1 = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0.01)]


def algorithm_has(name: str, fact: Literal["critic", "groups", "greedy"]) -> bool:
    """Return whether an estimator has a critic, compares a prompt's samples, or plays greedy ones."""
    return bool(tables.entry_of("estimator", name, "algorithm").get(fact))


Engine = Literal["local", "verl"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]
