"""The settings of MCP servers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, Field

from agent_r1 import ConfigError, EnvConfig, OutsideFingerprint, Trusted, VariableName

if TYPE_CHECKING:
    from agent_r1 import Config


def _startable(place: str) -> str:
    if not re.match(r"https?://\S+$", place) and not shlex.split(
        place
    ):  # raises ValueError for an open quotation mark
        raise ValueError("give the command that starts the server, or its URL")
    return place


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
CommandOrUrl = Annotated[str, AfterValidator(_startable)]


class McpSettings(EnvConfig):
    mcp: Trusted[dict[Name, CommandOrUrl]] = {}
    """MCP servers: NAME=COMMAND, which is started (no shell reads it), or
    NAME=http://HOST:PORT/mcp."""
    mcp_variables: OutsideFingerprint[list[VariableName]] = []
    """Names of environment variables, such as SHOP_API_KEY, that the servers' commands may see."""
    mcp_tokens: OutsideFingerprint[dict[Name, VariableName]] = {}
    """Server over HTTP -> name of the environment variable with its bearer token."""
    mcp_per_episode: list[str] = []
    """Servers that keep state: each episode opens its own session with them."""

    def without_commands(self) -> Self:
        nothing = {"mcp": {}, "mcp_per_episode": [], "mcp_variables": [], "mcp_tokens": {}}
        return super().without_commands().model_copy(update=nothing)

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        env = config.env
        uses = [("mcp_per_episode", name) for name in env.mcp_per_episode]
        uses += [("mcp_tokens", name) for name in env.mcp_tokens]
        for setting, name in uses:
            if name not in env.mcp:
                yield ConfigError(
                    f"env.{setting} names {name!r}, which env.mcp lacks; it has "
                    f"{', '.join(env.mcp) or 'no servers'}",
                    code="unknown_mcp_server",
                )
                break
