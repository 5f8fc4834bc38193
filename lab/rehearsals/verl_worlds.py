"""Train two steps with verl's real trainer in other recipes, with other estimators.

SmolLM2 on GeoHop, sums, programs, a house to search, and a class in Gymnasium's form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENT = Path(sys.prefix) / "bin" / "agent-r1"
SMALL = [
    "data.val=2",
    "data.test=2",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_concurrent_episodes=4",
    "trainer.steps=2",
    "trainer.eval_every=0",
    "trainer.threads=1",
    "verl.stall_timeout_s=900",
]
TINY = [
    "data.train=64",
    "data.cold=600",
    "cold_start.copy_steps=200",
    "cold_start.mix_steps=200",
    "actor.minibatches=1",
]
WORLDS = {
    ("pocket", "grpo"): [  # four questions, learned by heart: then it searches
        "data.train=4",
        "cold_start.closed_book=0",
        "cold_start.mix_tokens=512",
        "cold_start.warm_steps=12",
        *("cold_start.lr=1.5e-3", "actor.lr=1e-6"),
        "cold_start.demonstrator=agent_r1_recipes.geohop.demonstrator:expert",
    ],
    ("tinymath", "steppo"): [*TINY, "critic.warmup_steps=0", "critic.minibatches=1"],
    ("tinycode", "rloo"): TINY,
    ("tinyquest", "gigpo"): TINY,
    ("small", "grpo"): [
        *TINY,
        "cold_start.copy_steps=20",
        "cold_start.mix_steps=60",
        f"env.name=gym:{ROOT / 'recipes' / 'gym' / 'corridor.py'}:Corridor",
    ],
}
"""(preset, estimator) -> settings: each world once."""


def run() -> dict[str, float]:
    """Return the largest difference of a token's probability between vLLM and the trainer.

    Also returns calls per episode. Raises if a run ends early, loses an episode, calls no tool, or
    if vLLM has other weights.
    """
    return {
        f"{name}_{key}": value
        for name, arm in WORLDS
        for key, value in train_world(name, arm).items()
    }


def train_world(preset: str, estimator: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="agent-r1-worlds-") as home:
        options = [estimator, "--preset", preset, *SMALL, *WORLDS[preset, estimator]]
        for command in (
            ["data"],
            ["index"],
            ["cold-start"],
            ["train", "--engine", "verl", "--run", "v", "--plain"],
        ):
            print(f"{estimator} on {preset}: {command[0]} ...", flush=True)
            subprocess.run(
                [AGENT, *command, *options], env=os.environ | {"AGENT_R1_HOME": home}, check=True
            )
        lines = [
            json.loads(line)
            for line in (Path(home) / "runs" / "v" / "metrics.jsonl").read_text().splitlines()
        ]
    apart = max(line["training/rollout_probs_diff_max"] for line in lines)
    calls = max(line["tool_calls/mean"] for line in lines)
    if (
        len(lines) != 2
        or apart > 0.01
        or not calls
        or any(line["rollout/lost_episodes"] for line in lines)
    ):
        raise AssertionError(
            f"{preset}: {len(lines)} steps, probabilities {apart:.2g} apart, {calls:g} calls per "
            "episode"
        )
    return {"probs_diff_max": round(apart, 5), "calls": calls}
