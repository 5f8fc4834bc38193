"""Define the values that settings accept: names, and kinds of numbers and texts.

In: nothing. Out: types with bounds or checks. Next: `settings.py` uses them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from agent_r1.config import tables
from agent_r1.config.plugins import is_user_code
from agent_r1.ground.errors import nearest

AtLeast1 = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0.01)]


def _one_of(kind: str) -> AfterValidator:
    """Accept a name of a table, or user-defined code."""

    def check(name: str) -> str:
        known = tables.names(kind)
        if name not in known and not is_user_code(name):
            message = f"unknown{nearest(name, known)}; choose from {', '.join(known)}, or name code of yours as FILE.py:FUNCTION"
            raise PydanticCustomError("unknown_name", "{error}", {"error": message})
        return name

    return AfterValidator(check)


DataName = Annotated[str, _one_of("data")]


def _check_user_code(name: str) -> str:
    if not is_user_code(name):
        raise ValueError("this must be code of yours, as FILE.py:NAME or MODULE:NAME")
    return name


UserCode = Annotated[str, AfterValidator(_check_user_code)]
"""Name of user-defined code: see plugins.py."""


RewardName = Annotated[str, _one_of("reward")]


def _named(kind: str) -> AfterValidator:
    """Accept a name of a table."""

    def check(name: str) -> str:
        if name not in (known := tables.names(kind)):
            raise PydanticCustomError("literal_error", "unknown", {"expected": f"{known}"})
        return name

    return AfterValidator(check)


Algorithm = Annotated[str, _named("estimator")]
RatioLevel = Annotated[str, _named("ratio")]


def algorithm_has(name: str, fact: Literal["critic", "groups", "greedy"]) -> bool:
    """Return whether an estimator has a critic, compares a prompt's samples, or plays greedy ones."""
    return bool(tables.entry_of("estimator", name, "algorithm").get(fact))


Engine = Literal["local", "verl"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]
