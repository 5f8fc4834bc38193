"""The settings of what stays in sight."""

from typing import Literal

from pydantic import PositiveInt

from agent_r1 import EnvConfig


class ContextSettings(EnvConfig):
    context: Literal["append", "window", "summary"] = "append"
    """append (the whole episode) | window (the last `window_results` results) | summary (notes that
    the agent writes after every `window_results` results)."""
    window_results: PositiveInt = 4
    """Results that `window` keeps, and after which `summary` asks for notes."""
