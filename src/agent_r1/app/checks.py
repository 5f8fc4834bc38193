"""Define a check of doctor: its facts and its row.

Its finding is that of `ground/preflight.py`. Engines add rows (`engine.py`), so the words stand
below both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent_r1.config import Config
from agent_r1.ground.preflight import Finding, GpuHere
from agent_r1.ground.shapes import Shape


class Needs(NamedTuple):
    """What a run needs of a machine."""

    memory: float
    """bytes of memory"""
    folders: dict[Path, float]
    """bytes of disk in each folder"""
    shape: Shape | None = None
    """sizes of the model of a verl run on GPUs; None for a run that needs no GPU"""
    problem: Finding | None = None
    """why the model or its context cannot be used"""


@dataclass(frozen=True)
class Facts:
    """Hold what the tests compare: a run's needs, and the GPUs of this machine."""

    config: Config
    gpus: list[GpuHere]
    shape: Shape | None
    """sizes of the model of a verl run on GPUs; None for a run that needs no GPU"""
    memory: float
    """bytes of memory that the run needs"""
    folders: dict[Path, float]
    """bytes of disk that the run needs in each folder"""
    model_problem: Finding | None
    """why the start model or its context cannot be used"""


def always(facts: Facts) -> bool:
    return True


BY_TEST = ""
"""The test returns the remedy, because it depends on what is wrong."""


@dataclass(frozen=True)
class CheckRow:
    """Describe one thing that doctor knows how to check."""

    name: str
    test: Callable[[Facts], Finding]
    remedy: str
    """for a finding that is not ok and names no remedy of its own"""
    applies: Callable[[Facts], bool] = always
