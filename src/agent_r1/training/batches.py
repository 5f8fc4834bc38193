"""Choose the questions of a step, its usable episodes, and its minibatches.

All choices depend only on the seed and the step's number, so a resumed run repeats them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agent_r1.config.setting_types import algorithm_has
from agent_r1.config.settings import RolloutConfig
from agent_r1.core import Row, Trajectory
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.columns import Column
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.training_rows import Batch, collate, trajectory_rows


def make_batch(played: list[Trajectory], algorithm: str, columns: Sequence[Column] = ()) -> Batch:
    """Make the batch of a step from its usable episodes, with the estimator's columns."""
    usable = usable_trajectories(played, algorithm)
    rows = [row for number, trajectory in enumerate(usable) for row in trajectory_rows(trajectory, number, columns)]
    return collate(rows, usable, columns)


def usable_trajectories(trajectories: list[Trajectory], algorithm: str) -> list[Trajectory]:
    """Drop episodes that failed or sampled nothing, and groups of one if groups are compared.

    Raises AgentR1Error if none remains.
    """
    usable = [t for t in trajectories if not t.stop_reason.failed and any(s.action_ids for s in t.steps)]
    if algorithm_has(algorithm, "groups"):
        members = Counter(t.group_id for t in usable)
        usable = [t for t in usable if members[t.group_id] > 1]
    if not usable:
        ends = ", ".join(f"{n} {reason}" for reason, n in Counter(t.stop_reason for t in trajectories).items())
        raise AgentR1Error(
            f"there is nothing to learn from: the episodes ended with {ends}; raise rollout.max_context (the prompts may "
            "overflow it) or env.episode_timeout_s",
            code="nothing_to_learn",
        )
    return usable


def tasks_of_step(questions: list[Row], step: int, rollout: RolloutConfig, seed: int, again: int = 0) -> list[Task]:
    """List the episodes of a step, prompt by prompt.

    `again` counts the rounds that replace groups (recipes/credit/refill.py). An episode's randomness depends only on
    (seed, step, prompt, sample), so a resumed run repeats it.
    """
    n, per_step = len(questions), rollout.prompts_per_step
    chosen = _places(n, step, per_step, seed)
    if again:  # asking a question twice in a step would make two groups with two baselines
        asked = set(chosen)
        others = [place for place in epoch_order(n, step, derive_seed(seed, "again")) if place not in asked]
        chosen = others[(again - 1) * per_step : again * per_step]
    return [
        Task(questions[place], f"{step}-{p}", f"{step}-{p}-{g}", derive_seed(seed, "rollout", step, p, g))
        for p, place in enumerate(chosen, start=again * per_step)
        for g in range(rollout.samples_per_prompt)
    ]


def prompts_of_step(questions: list[Row], step: int, per_step: int, seed: int) -> list[Row]:
    """Return the questions of one step. Each epoch is shuffled anew; a step may span two epochs."""
    return [questions[place] for place in _places(len(questions), step, per_step, seed)]


def _places(n: int, step: int, per_step: int, seed: int) -> list[int]:
    positions = (divmod(position, n) for position in range((step - 1) * per_step, step * per_step))
    return [epoch_order(n, epoch, seed)[place] for epoch, place in positions]


@functools.lru_cache(maxsize=4)
def epoch_order(n: int, epoch: int, seed: int) -> list[int]:
    return torch.randperm(
        n, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch) % 2**63)
    ).tolist()


def minibatches(batch: Batch, count: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield the row indices of each optimiser step: `count` equal parts, `epochs` times.

    Trajectories are shuffled and never split: the rows of an episode share its advantage.
    """
    g = torch.Generator().manual_seed(seed % 2**63)
    trajectory_B = batch.trajectory_B.cpu()
    for _ in range(epochs):
        order = torch.randperm(int(trajectory_B.max()) + 1, generator=g)
        for part in order.tensor_split(min(count, len(order))):  # chunk(4) of 5 would make 3 parts
            yield torch.isin(trajectory_B, part).nonzero()[:, 0].to(batch.ids_BT.device)
