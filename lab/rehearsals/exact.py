"""Compare the exact reward of an agent with 100,000 sampled episodes.

The world Stop, each question of the frozen start; a run's checkpoint would take hours. An error of
three standard deviations in one of six questions has a chance of .016.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import torch

from agent_r1 import AgentEnvLoop, LocalPolicy, Sampling, Task, derive_seed, run_episodes
from agent_r1_recipes.exact.frozen import load_frozen
from agent_r1_recipes.exact.stop import Stop, stop_rows, stop_trees
from agent_r1_recipes.exact.truth import expectation

EPISODES = 100_000
PART = 2_000
"""Episodes of one event loop."""


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    agent, facts = load_frozen("stop-start")
    rows = stop_rows()
    policy = LocalPolicy(agent.model, agent.chat.stop_ids, slots=256, max_context=64)
    limits = agent.player().flow.limits
    loop = AgentEnvLoop(policy, agent.chat, limits, lambda row: Stop())
    sampling = Sampling(limits.max_tokens_per_turn)
    largest = 0.0
    for number, (row, tree) in enumerate(zip(rows, stop_trees(agent), strict=True)):
        rewards: list[float] = []
        while len(rewards) < EPISODES // len(rows):
            tasks = []
            for place in range(len(rewards), len(rewards) + PART):
                seed = derive_seed("exact", number, place)
                tasks.append(Task(row, "g", f"s{place}", seed))
            episodes = asyncio.run(run_episodes(loop, tasks, sampling, None, 256))
            rewards += [episode.reward for episode in episodes]
        sample = torch.tensor(rewards, dtype=torch.float64)
        truth = expectation(tree, lambda t: t.reward, 0.0, 2.0).estimate
        error = float(sample.std()) / math.sqrt(len(sample))
        deviation = (float(sample.mean()) - truth) / error
        print(f"question {number}: exact {truth:.4f}, sampled {float(sample.mean()):.4f}, "
              f"{deviation:+.1f} standard deviations", flush=True)  # fmt: skip
        largest = max(largest, abs(deviation))
    if largest > 3:
        raise RuntimeError(f"sampled episodes are {largest:.1f} standard deviations from the sum")
    return {
        "episodes": PART * math.ceil(EPISODES // len(rows) / PART) * len(rows),
        "questions": len(rows),
        "largest deviation": round(largest, 2),
        "reward on file": facts["reward"],
    }
