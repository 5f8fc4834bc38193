"""Make a step's batch, the minibatches of its updates, and micro-batches that fit into memory.

In: a step's episodes. Out: a `Batch`, and the row numbers of its parts. Next: `forward.py` computes
with them; `prefix_tree.py` cuts the micro-batches of an update. All choices depend only on the seed
and the step's number, so a resumed run repeats them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from agent_r1.core import Trajectory
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.training_rows import Batch, TrainingRow, collate, trajectory_rows
from agent_r1.training.advantages import Estimator


def make_batch(trajectories: list[Trajectory], estimator: Estimator) -> Batch:
    """Make the batch of a step from its usable episodes, with the estimator's columns."""
    usable = usable_trajectories(trajectories, estimator.groups)
    rows: list[TrainingRow] = []
    for number, trajectory in enumerate(usable):
        rows += trajectory_rows(trajectory, number, estimator.columns)
    return collate(rows, usable, estimator.columns)


def usable_trajectories(trajectories: list[Trajectory], groups: bool) -> list[Trajectory]:
    """Drop episodes that failed or sampled nothing, and groups of one if groups are compared.

    Raises AgentR1Error if none remains.
    """
    usable: list[Trajectory] = []
    for trajectory in trajectories:
        # A time-out or a lost server says nothing about the policy.
        sampled_something = any(step.action_ids for step in trajectory.steps)
        if sampled_something and not trajectory.stop_reason.failed:
            usable.append(trajectory)
    if groups:
        members = Counter(t.group_id for t in usable)
        usable = [t for t in usable if members[t.group_id] > 1]
    if not usable:
        counts = Counter(t.stop_reason for t in trajectories)
        ends = ", ".join(f"{n} {reason}" for reason, n in counts.items())
        raise AgentR1Error(
            f"there is nothing to learn from: the episodes ended with {ends}; raise "
            "rollout.max_context (the prompts may overflow it) or env.episode_timeout_s",
            code="nothing_to_learn",
        )
    return usable


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


def micro_batches(
    lengths_B: Tensor, max_tokens: int, rows: Tensor | None = None
) -> Iterator[Tensor]:
    """Group (some) rows by length into micro-batches of at most `max_tokens`, padding included."""
    rows = torch.arange(len(lengths_B), device=lengths_B.device) if rows is None else rows
    order = rows[lengths_B[rows].argsort(descending=True, stable=True)]
    start = 0
    while start < len(order):
        count = max(1, max_tokens // int(lengths_B[order[start]]))
        yield order[start : start + count]
        start += count
