"""Record exact advantages of two episodes' turns, and GRPO's, for lesson 5.

python -m lab.experiments.exact_turns --run discover-grpo --step 25 --question 0

All plays of one test question are enumerated, up to a rest of the probability. So the values V of
each state and Q of each turn are sums, and not estimates. Then eight plays are drawn as a group,
which gives GRPO's advantages. Kept are the group's first right play and its first wrong one, in
docs/lessons/exact_turns.json. `lab/pictures/book.py` draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from agent_r1 import Workspace, find_model, standardize, write_whole
from agent_r1_recipes.exact.tree import Agent, Play, enumerate_plays
from agent_r1_recipes.exact.truth import turn_values

FILE = Path(__file__).parents[2] / "docs" / "lessons" / "exact_turns.json"
GROUP = 8
MASS = 0.99
"""Share of the probability to enumerate."""
MAX_TOKENS = 60_000


def describe(agent: Agent, plays: list[Play], play: Play, advantage: float) -> dict[str, Any]:
    """Return an episode's turns, each with V before it, Q of it, and their difference."""
    values, choices = turn_values(plays)
    turns: list[dict[str, Any]] = []
    so_far: tuple[tuple[int, ...], ...] = ()
    for step in play.trajectory.steps:
        value = values[so_far].value
        so_far = (*so_far, tuple(step.action_ids))
        choice = choices[so_far].value
        text = agent.chat.turn_text(step.action_ids)
        turns.append({"text": text, "V": value, "Q": choice, "A": choice - value})
    return {"reward": play.trajectory.reward, "grpo": advantage, "turns": turns}


def record(run: str | None, step: int, question: int, seed: int) -> dict[str, Any]:
    """Enumerate one question, draw a group, and describe its first right and wrong plays."""
    model, config = find_model(run, step=step)
    workspace = Workspace(config)
    agent = Agent.load(model, config, workspace.load_tools())
    row = workspace.load_rows("test")[question]
    [tree] = enumerate_plays(agent, [row], MASS, samples=0, seed=seed, max_tokens=MAX_TOKENS)
    plays = tree.plays
    chances = [math.exp(play.logprob) for play in plays]
    group = random.Random(seed).choices(plays, chances, k=GROUP)
    rewards = torch.tensor([play.trajectory.reward for play in group])
    advantages = standardize(rewards, normalize_std=True).tolist()
    episodes = []
    for reward in (1.0, 0.0):
        for play, advantage in zip(group, advantages, strict=True):
            if play.trajectory.reward == reward:
                episodes.append(describe(agent, plays, play, advantage))
                break
    return {
        "question": row["prompt"][-1]["content"],
        "step": step,
        "share": tree.share,
        "plays": len(plays),
        "rewards": rewards.tolist(),
        "episodes": episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", help="name of the run's folder (default: the newest)")
    parser.add_argument("--step", type=int, default=25, help="step of the checkpoint")
    parser.add_argument("--question", type=int, default=0, help="number of the test question")
    parser.add_argument("--seed", type=int, default=0, help="of the group")
    arguments = parser.parse_args()
    question = record(arguments.run, arguments.step, arguments.question, arguments.seed)
    write_whole(FILE, json.dumps(question, indent=1, ensure_ascii=False) + "\n")
    for episode in question["episodes"]:
        print(f"reward {episode['reward']:g}, GRPO {episode['grpo']:+.3f}")
        for turn in episode["turns"]:
            print(f"  V {turn['V']:.3f}  A {turn['A']:+.3f}  {turn['text'][:100]!r}")


if __name__ == "__main__":
    main()
