"""The setting of an OpenEnv server."""

from agent_r1 import EnvConfig


class OpenEnvSettings(EnvConfig):
    url: str | None = None
    """Address of the server of env.name=openenv, such as http://127.0.0.1:8000."""
