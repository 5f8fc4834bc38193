"""A record of the right form, for tests. Its hashes are made up."""

from __future__ import annotations

from typing import Any

from agent_r1_recipes.browser.build import hashes

RECIPE = {
    "steps": 20,
    "questions": 16,
    "samples": 8,
    "minibatches": 2,
    "learningRate": 3e-4,
    "finalShare": 0.1,
    "largestNorm": 1.0,
    "clipLow": 0.2,
    "clipHigh": 0.28,
}


def good() -> dict[str, Any]:
    run = {"weights": "a" * 64, "right": 950}
    return {
        "format": 1,
        "name": "the start (1)",
        "track": "episodes",
        "recipe": dict(RECIPE),
        "binary": hashes()["binary"],
        "start": "c" * 64,
        "runs": [dict(run) for _ in range(5)],
        "cost": 2560,
    }
