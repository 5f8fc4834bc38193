"""The settings of a model of an API: address, prices, form of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat

from agent_r1 import ConfigError, OutsideFingerprint, RolloutConfig, VariableName

if TYPE_CHECKING:
    from agent_r1 import Config


class ApiSettings(RolloutConfig):
    api: OutsideFingerprint[str | None] = None
    """Address of an OpenAI-compatible API, such as https://api.example.com/v1; `eval --api` and
    `demonstrate --api` set it."""
    api_records: OutsideFingerprint[str | None] = None
    """Folder in which every answer is kept; `--out` sets it."""
    api_key: OutsideFingerprint[VariableName] = "OPENAI_API_KEY"
    """Name of the environment variable with the key. The key itself is never a setting."""
    api_calls: OutsideFingerprint[Literal["auto", "native", "text"]] = "auto"
    """native: the API's own tool calls. text: calls in the dialect's words, for a server without
    them. auto: native if the environment speaks Hermes."""
    api_concurrent: OutsideFingerprint[Annotated[int, Field(ge=1)]] = 8
    """Requests at the same time."""
    api_attempts: OutsideFingerprint[Annotated[int, Field(ge=1)]] = 6
    """Attempts of one request: after 408, 409, 429, 5xx, a broken answer, or no answer."""
    api_timeout_s: OutsideFingerprint[Annotated[float, Field(ge=0.1)]] = 300.0
    """Seconds for one answer."""
    api_longest_wait_s: OutsideFingerprint[NonNegativeFloat] = 120.0
    """Longest wait between two attempts. A server that asks for more (Retry-After) ends the run,
    which the same command continues later."""
    api_omit: OutsideFingerprint[list[str]] = []
    """Fields that this API refuses, such as `temperature`."""
    api_limit: OutsideFingerprint[str] = "max_tokens"
    """Name of the field with the limit of a turn; some APIs call it max_completion_tokens."""
    api_thoughts: OutsideFingerprint[bool] = False
    """Send the model's thoughts (reasoning_content) back to it; few APIs require it."""
    api_price_in: OutsideFingerprint[NonNegativeFloat | None] = None
    """US dollars per million tokens of the prompt."""
    api_price_cached: OutsideFingerprint[NonNegativeFloat | None] = None
    """The same for tokens that the API read from its cache; default: api_price_in."""
    api_price_out: OutsideFingerprint[NonNegativeFloat | None] = None
    """US dollars per million sampled tokens, thoughts included."""
    api_budget: OutsideFingerprint[NonNegativeFloat | None] = None
    """US dollars that this evaluation may cost, with its earlier parts; `--budget` sets it."""

    def without_commands(self) -> Self:
        return super().without_commands().model_copy(update={"api": None})

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        rollout = config.rollout
        if rollout.api is None:
            return
        if rollout.flow or rollout.has_agent:
            yield ConfigError(
                "rollout.api plays with our loop, so rollout.flow and rollout.agent cannot replace "
                "it; leave one of them out",
                code="exclusive_options",
            )
        has_prices = rollout.api_price_in is not None and rollout.api_price_out is not None
        default_key = type(rollout).model_fields["api_key"].default
        if rollout.api_key != default_key and rollout.api_key not in os.environ:
            yield ConfigError(
                "rollout.api_key names an environment variable, and there is none of this name; "
                "export it with the key. The name is not shown here, because it may be a key",
                code="no_variable",
            )
        if rollout.api_budget is not None and rollout.api_limit in rollout.api_omit:
            yield ConfigError(
                f"a budget needs the limit of a turn, and rollout.api_omit leaves out "
                f"{rollout.api_limit!r}: without it a turn may cost anything. Leave one of them "
                "out, or rename the limit with rollout.api_limit",
                code="missing_limit",
            )
        if rollout.api_budget is not None and not has_prices:
            yield ConfigError(
                "a budget needs prices: set rollout.api_price_in and rollout.api_price_out, in US "
                "dollars per million tokens",
                code="missing_price",
            )
