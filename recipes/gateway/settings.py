"""The settings of `train --agent`: an agent of its own, played through the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from agent_r1 import (
    ConfigError,
    NamesCode,
    OutsideFingerprint,
    RolloutConfig,
    Trusted,
    VariableName,
)

if TYPE_CHECKING:
    from agent_r1 import Config


class GatewaySettings(RolloutConfig):
    agent: Trusted[NamesCode[str | None]] = None
    """Your own agent instead of the episode loop; `train --agent` sets it. FILE.py:FUNCTION, which
    a worker imports once, or a command, which is started for each episode without a shell."""
    agent_python: Trusted[str | None] = None
    """The Python that imports FILE.py:FUNCTION, if the agent has an environment of its own."""
    agent_reward: Literal["environment", "agent"] = "environment"
    """environment: the last turn is scored as in our loop. agent: the agent's side reports the
    reward, by POST or on file descriptor 3."""
    agent_losses: OutsideFingerprint[Annotated[float, Field(ge=0, le=1)]] = 0.0
    """Share of a step's sampled tokens that may be lost for a named cause (undelivered, edited
    away, failed episode). More stops the run."""
    agent_processes: OutsideFingerprint[Annotated[int, Field(ge=1)]] = 32
    """Agents that run at the same time; each is a process."""
    agent_environment: list[VariableName] = []
    """Names of variables such as MY_API_KEY that the agent may see, though they look like keys."""

    @property
    def has_agent(self) -> bool:
        return self.agent is not None

    def without_commands(self) -> Self:
        changes = {"agent": None, "agent_python": None}
        return super().without_commands().model_copy(update=changes)

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        rollout = config.rollout
        if rollout.agent is None:
            return
        if config.engine == "verl":
            yield ConfigError(
                "rollout.agent requires the local engine: verl's workers do not start agents yet; "
                "use engine=local",
                code="agent_needs_local",
            )
        if rollout.flow:
            yield ConfigError(
                "rollout.agent and rollout.flow both replace the episode loop; set only one",
                code="exclusive_options",
            )
        if config.env.call_reward:
            yield ConfigError(
                "env.call_reward is paid for calls that our loop executes, and rollout.agent "
                "executes its own; set env.call_reward=0",
                code="unused_setting",
            )
