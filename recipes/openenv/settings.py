"""The setting of an OpenEnv server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agent_r1 import ConfigError, EnvConfig

if TYPE_CHECKING:
    from agent_r1 import Config


class OpenEnvSettings(EnvConfig):
    url: str | None = None
    """Address of the server of env.name=openenv, such as http://127.0.0.1:8000."""

    @staticmethod
    def conflicts(config: Config, trains: bool) -> Iterator[ConfigError]:
        if config.data.name != "openenv":
            return
        source = str(config.data.source).rstrip("/")
        if source != str(config.env.url).rstrip("/"):
            yield ConfigError(
                f"data.name=openenv lists the tasks of data.source={source}, and env.url="
                f"{config.env.url} plays them; give both the same address",
                code="address_without_name",
            )
