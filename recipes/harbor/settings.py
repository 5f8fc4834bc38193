"""Declare the setting of Harbor tasks."""

from typing import Literal

from agent_r1 import DataConfig, OutsideWhileDefault


class HarborSettings(DataConfig):
    harbor_engine: OutsideWhileDefault[Literal["auto", "docker", "podman", "bubblewrap"]] = "auto"
    """Where Harbor tasks run. auto (Podman or Docker if one answers, else bubblewrap) | docker |
    podman | bubblewrap (this machine's /usr, and a subset of Dockerfiles)."""
