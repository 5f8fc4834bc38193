"""Declare what play without skill may earn."""

from typing import Annotated

from annotated_types import Ge, Lt

from agent_r1 import EnvConfig, OutsideFingerprint


class CheckSettings(EnvConfig):
    floor: OutsideFingerprint[Annotated[float, Ge(0), Lt(1)] | None] = None
    """Share of the way from the least to the oracle's reward that play without skill may reach in
    `agent-r1 env check`. None: .05, or what env.format_penalty implies."""
    floor_reason: OutsideFingerprint[str] = ""
    """Why a floor above .3 is right, such as `two doors, and random play finds one`."""
