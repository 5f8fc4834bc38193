"""Credit turns by their return-to-go, once with a baseline and once with a bias.

In and out are those of the core's estimators. Both give each turn the sum of its rewards and of all
later ones (the return-to-go), less a baseline. The difference is what the baseline averages over.
Next: `rows.py`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from agent_r1 import AdvantageConfig, Batch, Estimator
from agent_r1_recipes.credit.estimators import steps_of


@partial(Estimator, groups=True)
def return_to_go(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compare the return-to-go of a turn with the other samples' whole returns.

        A_t = R_t - mean of the other samples' R_1

    The baseline is the same for all turns of an episode and does not contain it: no bias.
    """
    return _compare(batch, by_turn=False)


@partial(Estimator, groups=True)
def turn_index(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Centre the reward of a turn among the samples' turns of the same number.

        c_t = r_t - mean of the r_t of all samples that have a turn t
        A_t = c_t + c_{t+1} + ...

    A warning, not a method (verl#7244). Whether a sample has a turn t depends on its own earlier
    choices, so the later means are no baseline for them. An agent that may stop learns to stop:
    going on subtracts a mean, and having stopped subtracts nothing.
    """
    return _compare(batch, by_turn=True)


def _compare(batch: Batch, by_turn: bool) -> tuple[Tensor, Tensor]:
    steps = steps_of(batch)
    group_N = {n: group for group, members in batch.members().items() for n in members}
    trajectory_S = steps.trajectory_S.tolist()
    reward_S = steps.reward_S.tolist()
    if by_turn:
        number_S = _numbers(trajectory_S)
        same: dict[tuple[str, int], list[float]] = defaultdict(list)
        for n, number, reward in zip(trajectory_S, number_S, reward_S, strict=True):
            same[group_N[n], number].append(reward)
        for place, (n, number) in enumerate(zip(trajectory_S, number_S, strict=True)):
            rewards = same[group_N[n], number]
            reward_S[place] -= sum(rewards) / len(rewards)
    to_go_S = reward_S
    for place in range(len(reward_S) - 2, -1, -1):
        if trajectory_S[place] == trajectory_S[place + 1]:
            to_go_S[place] += to_go_S[place + 1]
    advantage_S = torch.tensor(to_go_S)
    if not by_turn:
        _, score_N = batch.scores()
        for members in batch.members().values():
            total = score_N[members].sum()
            for n in members:
                others = (total - score_N[n]) / max(len(members) - 1, 1)
                advantage_S[steps.trajectory_S == n] -= others
    advantages_BT = steps.to_tokens(advantage_S, batch)
    return advantages_BT, advantages_BT


def _numbers(trajectory_S: list[int]) -> list[int]:
    """Count the steps of each trajectory, from 0."""
    counts: dict[int, int] = defaultdict(int)
    numbers = []
    for n in trajectory_S:
        numbers.append(counts[n])
        counts[n] += 1
    return numbers
