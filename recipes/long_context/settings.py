"""The settings of what stays in sight."""

from typing import Literal

from pydantic import PositiveInt

from agent_r1 import EnvConfig


class ContextSettings(EnvConfig):
    context: Literal["append", "window", "summary"] = "append"
    """append (the agent sees all of its episode) | window (the last `window_results` results) | summary (it sums up after so many
    and goes on from that)."""
    window_results: PositiveInt = 4
    """How many results `window` keeps, and `summary` waits for."""
