"""The setting of a sampler that is not quite the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from agent_r1 import ConfigError, RolloutConfig

if TYPE_CHECKING:
    from agent_r1 import Config


class Mismatch(BaseModel, extra="forbid"):
    """Describe how the sampler differs from the trainer (recipes/robustness/off_policy.py)."""

    bf16: bool = False
    """The sampler's weights and computation are in bfloat16."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The sampler draws from the likeliest tokens that together have this probability."""
    steps_old: NonNegativeInt = 0
    """Age of the sampler's weights, in steps. A resumed run has saved none and begins with the
    newest."""
    tis_cap: PositiveFloat | None = None
    """Correction: a token's loss is weighted by min(trainer's probability / sampler's, tis_cap).
    Unset: no correction."""


class MismatchSettings(RolloutConfig):
    mismatch: Mismatch | None = None
    """Experiment of the local loop: make the sampler differ from the trainer.

    For example {bf16: true, top_p: 0.9, steps_old: 4}; `tis_cap: 2` corrects it
    (docs/algorithms.md)."""

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        if config.rollout.mismatch and config.engine != "local":
            yield ConfigError(
                "rollout.mismatch requires --engine local; with verl the sampler is a separate "
                "program anyway",
                code="local_engine_only",
            )
