"""What a setting may be: the names to choose from, and kinds of numbers and texts.

In: nothing. Out: types, each with its bounds or its check. Next: `settings.py` makes the settings of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from agent_r1.config import tables
from agent_r1.config.own import is_own
from agent_r1.ground.errors import nearest

AtLeast1 = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0.01)]


Address = Annotated[str, Field(pattern=r"^https?://\S+$")]
"""Where a server answers."""


def _some_share(shares: dict[str, float]) -> dict[str, float]:
    if sum(shares.values()) == 0:
        raise ValueError("one share must be more than 0")
    return shares


def _one_of(kind: str) -> AfterValidator:
    """One of the names of a table, or user-defined code."""

    def check(name: str) -> str:
        known = tables.names(kind)
        if name not in known and not is_own(name):
            said = f"unknown{nearest(name, known)}; choose from {', '.join(known)}, or name code of yours as FILE.py:FUNCTION"
            raise PydanticCustomError("unknown_name", "{error}", {"error": said})
        return name

    return AfterValidator(check)


DataName = Annotated[str, _one_of("data")]


def _own(name: str) -> str:
    if not is_own(name):
        raise ValueError("this is code of yours, and named as FILE.py:NAME or MODULE:NAME")
    return name


Own = Annotated[str, AfterValidator(_own)]
"""The name of code of one's own: see own.py."""


RewardName = Annotated[str, _one_of("reward")]

Shares = Annotated[dict[str, Annotated[float, Field(ge=0)]], AfterValidator(_some_share), "replaced as a whole"]
"""How much there is of each kind; only the proportions count. A layer above replaces the whole table."""


def _named(kind: str) -> AfterValidator:
    """A name of the tables."""

    def check(name: str) -> str:
        if name not in (known := tables.names(kind)):
            raise PydanticCustomError("literal_error", "unknown", {"expected": f"{known}"})
        return name

    return AfterValidator(check)


Algorithm = Annotated[str, _named("estimator")]
Ratio = Annotated[str, _named("ratio")]


def algorithm_has(name: str, fact: Literal["critic", "groups", "greedy"]) -> bool:
    """Whether an estimator fits a critic, compares the samples of a prompt, or plays a greedy episode of each."""
    return bool(tables.facts("estimator", name, "algorithm").get(fact))


Engine = Literal["local", "verl"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3"]
