"""A small world for tests: its header packed with the start weights, and its settings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from agent_r1 import load_config
from agent_r1_recipes.browser import world

SMALL = [
    "data.train=64",
    "data.val=8",
    "data.test=40",
    "data.cold=40",
    "data.entities=60",
    "data.cold_entities=60",
]


def small_config() -> Any:
    return load_config("smoke", SMALL, algorithm="grpo")


def small_world() -> tuple[dict[str, Any], bytes]:
    header = world.header(small_config())
    return header, world.pack(header)


def small_plays() -> bytes:
    return world.pack_plays(world.describe_plays(small_config()))


def array(text: str) -> np.ndarray:
    """What `base64Of` of node.py printed."""
    return np.frombuffer(base64.b64decode(text), np.float32)


def base64_of(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype(np.float32).tobytes()).decode()
