"""The words of the domain live in `agent_r1/core.py`; this name is kept for programs that know it from here."""

from agent_r1.core import *  # noqa: F403
