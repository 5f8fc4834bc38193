"""Declare the settings of credit: refilling, process rewards, and ratios over spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from agent_r1 import (
    ActorConfig,
    AdvantageConfig,
    ConfigError,
    OutsideWhileDefault,
    RolloutConfig,
)

if TYPE_CHECKING:
    from agent_r1 import Config


class CreditRollout(RolloutConfig):
    dynamic_sampling_rounds: NonNegativeInt = 0
    """Dynamic sampling: rounds per step, at most, in which new prompts replace groups that agree
    (dynamic_sampling.py)."""
    exposure_reward: OutsideWhileDefault[NonNegativeFloat] = 0.0
    """Process reward of an episode whose searches show all passages of the evidence, shared among
    the turns that first show one. For questions that name their passages (first_exposure.py)."""

    @property
    def replaces_equal_groups(self) -> bool:
        return bool(self.dynamic_sampling_rounds)

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        if config.rollout.exposure_reward and (
            config.rollout.dynamic_sampling_rounds or config.algorithm_has("greedy")
        ):
            yield ConfigError(
                "rollout.exposure_reward pays episodes after they were chosen, so neither dynamic "
                "sampling nor a greedy episode has it; set rollout.dynamic_sampling_rounds to 0, "
                "and use an algorithm other than remax",
                code="unused_setting",
            )
        if config.rollout.exposure_reward and config.engine != "local":
            yield ConfigError(
                "rollout.exposure_reward requires --engine local; set it to 0",
                code="local_engine_only",
            )
        if not config.rollout.dynamic_sampling_rounds:
            return
        if not config.algorithm_has("groups"):
            yield ConfigError(
                "rollout.dynamic_sampling_rounds replaces groups that agree, and "
                f"{config.algorithm} has none; set it to 0",
                code="no_groups",
            )
        if config.engine != "local":
            yield ConfigError(
                "rollout.dynamic_sampling_rounds requires --engine local, because verl has no "
                "limit for it; set it to 0",
                code="local_engine_only",
            )


class CreditAdvantage(AdvantageConfig):
    process_weight: NonNegativeFloat | None = None
    """Weight of process rewards relative to the outcome, after PRIME's normalisation: with 1, the
    row with the largest sum gets 1. Unset: process rewards are not scaled."""
    step_weight: NonNegativeFloat = 1.0
    """gigpo: weight of the comparison of steps, relative to the comparison of episodes."""

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        if config.algorithm_has("greedy") and config.advantage.process_weight is not None:
            yield ConfigError(
                f"{config.algorithm} compares with a greedy episode, whose rewards are not scaled; "
                "unset advantage.process_weight, "
                "or use another algorithm",
                code="unused_setting",
            )


class CreditActor(ActorConfig):
    span_clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """`actor.clip_low` if actor.ratio_level is step or sequence: such means move much less than
    single tokens."""
    span_clip_high: NonNegativeFloat = 4e-4

    @property
    def clip(self):
        """Return the narrower range if ratios are means over spans."""
        clip = super().clip
        if self.ratio_level in ("step", "sequence"):
            return clip._replace(low=self.span_clip_low, high=self.span_clip_high)
        return clip
