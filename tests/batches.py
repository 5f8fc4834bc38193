"""Batches for estimators, from nested lists and at random."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from agent_r1.config.settings import AdvantageConfig
from agent_r1.rollout.training_rows import Batch
from agent_r1_recipes.credit.settings import CreditAdvantage

SEEDS = st.integers(0, 10**6)
FIELDS = ("steps_BT", "truncated_B")
"""Those of `inputs_of`'s columns that every batch has."""


def inputs_of(
    rewards, mask, values=None, groups=None, trajectories=None, columns=None, **settings_
) -> tuple[Batch, AdvantageConfig]:
    """What an estimator takes, from nested lists; by default one group, each row a trajectory, and
    one step."""
    rows = len(rewards)
    same = [[0] * len(rewards[0])] * rows
    columns = {"steps_BT": same, "states_BT": same, "baseline_B": [0.0] * rows} | (columns or {})
    batch = Batch(
        rewards_BT=torch.tensor(rewards, dtype=torch.float32),
        mask_BT=torch.tensor(mask),
        values_BT=None if values is None else torch.tensor(values, dtype=torch.float32),
        groups=groups or ["q"] * rows,
        trajectory_B=torch.tensor(trajectories or list(range(rows))),
        columns={
            name: torch.tensor(column) for name, column in columns.items() if name not in FIELDS
        },
        **{name: torch.tensor(column) for name, column in columns.items() if name in FIELDS},
    )
    return batch, CreditAdvantage(**settings_)


def random_inputs(
    seed: int, *, several_rows: bool = True, **settings_
) -> tuple[Batch, AdvantageConfig]:
    """2-3 prompts x 2-4 trajectories x 1-3 rows; random masks with at least one action token a
    row."""
    g = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    T, groups, trajectories, n = draw(2, 9), [], [], 0
    for prompt in range(draw(2, 3)):
        for _ in range(draw(2, 4)):
            rows = draw(1, 3) if several_rows else 1
            groups += [f"prompt-{prompt}"] * rows
            trajectories += [n] * rows
            n += 1
    B = len(groups)
    mask_BT = torch.rand(B, T, generator=g) < 0.5
    mask_BT[torch.arange(B), torch.randint(T, (B,), generator=g)] = True
    batch = Batch(
        rewards_BT=torch.randn(B, T, generator=g) * mask_BT,
        mask_BT=mask_BT,
        values_BT=torch.randn(B, T, generator=g),
        groups=groups,
        trajectory_B=torch.tensor(trajectories),
        steps_BT=(torch.rand(B, T, generator=g) < 0.3).cumsum(dim=1),
        truncated_B=torch.zeros(B, dtype=torch.bool),
        columns={"states_BT": torch.randint(3, (B, T), generator=g), "baseline_B": torch.zeros(B)},
    )
    return batch, CreditAdvantage(**settings_)
