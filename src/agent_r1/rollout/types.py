"""Re-export `agent_r1/core.py` under its former name."""

from agent_r1.core import *  # noqa: F403
