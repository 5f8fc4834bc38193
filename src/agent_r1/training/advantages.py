"""Advantages: how much better was each action token than expected?

In: the rewards, masks (and values) of a batch of training sequences (`rollout/rows.py`). Out: one number per action
token. Next: `losses.py` makes tokens with a positive advantage more likely and the others less. Pure functions of
tensors; the local loop and verl call the same ones. recipes/credit has other ways to give credit.

Beside B and T: N trajectories, G of them samples of one prompt, A action tokens of the batch, L of the longest
trajectory.

Only sampled tokens are actions. Tool results and prompts stand in the same row, so every function here looks through
`mask_BT` first and gives 0 to all other tokens: credit goes only to what the policy chose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1.config.settings import AdvantageConfig
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.rows import Batch, Column, scatter

Credit = Callable[[Batch, AdvantageConfig], tuple[Tensor, Tensor]]
"""A whole batch (every sample of a prompt must be in it) to `advantages_BT` and `returns_BT`, float32, 0 where the mask
is 0. Reads `rewards_BT`, `mask_BT`, `groups`, `trajectory_B` and, with a critic, `values_BT`."""


@dataclass(frozen=True)
class Estimator:
    """A way to give credit, and what it asks of a batch. Whether it has a critic or compares groups stands in a table
    of names."""

    credit: Credit
    columns: tuple[Column, ...] = ()
    """What it reads in addition to what every batch has."""
    critic_mask: Callable[[Batch], Tensor] = lambda batch: batch.mask_BT
    """[B, T]: the tokens at which the critic is fitted."""

    def __call__(self, batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        return self.credit(batch, advantage)


def estimator(*columns: Column, **asks: Callable[[Batch], Tensor]) -> Callable[[Credit], Estimator]:
    """Decorate a function that gives credit."""
    return lambda credit: Estimator(credit, columns, **asks)


# ------------------------------------------------------------------------------------------------------------- grpo


@estimator()
def grpo(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (GRPO, 2402.03300, section 4.1.2, outcome supervision).

        score_i = sum of all rewards of trajectory i        A_i = (score_i - mean_G) / (std_G + 1e-6)

    over the G trajectories of one prompt; every action token of trajectory i gets A_i. The other samples of the prompt
    stand in for a critic: their mean is the baseline. `normalize_std=False` leaves the division out (Dr. GRPO,
    2503.20783): it weighs up prompts on which nearly all samples agree. std is the unbiased one (G - 1), as in verl.

    Statistics are over trajectories, not rows: an episode that rewrote its context has several rows, one score and one
    vote. Raises ConfigError for a group of one.
    """
    index_B, score_N = batch.scores()
    advantage_N = torch.zeros_like(score_N)
    for group, members in members_of(batch.groups, index_B).items():
        if len(members) == 1:
            raise ConfigError(
                f"grpo: group {group!r} has a single trajectory and nothing to compare it with; set "
                "rollout.samples_per_prompt to 2 or more and keep the samples of a prompt in one batch, or use ppo",
                code="group_of_one",
            )
        advantage_N[members] = standardize(score_N[members], advantage.normalize_std)
    return batch.to_tokens(advantage_N[index_B]), batch.to_tokens(score_N[index_B])


def standardize(score_G: Tensor, normalize_std: bool) -> Tensor:
    """Scores of a group less their mean, and divided by their deviation if asked for; 0 exactly where all agree."""
    # Equal scores carry no information and must give 0 exactly. float32 has 7 digits: the mean of seven times 0.8 is
    # not 0.8, nor is 0.3 + 0.3 + 0.3 equal to 0.9, and such noise divided by (0 + 1e-6) is an advantage of 0.05.
    if score_G.max() - score_G.min() <= 1e-6 * score_G.abs().max():
        return torch.zeros_like(score_G)
    centered_G = score_G - score_G.mean()
    return centered_G / (score_G.std() + 1e-6) if normalize_std else centered_G


def members_of(groups: list[Hashable], index_B: Tensor) -> dict[Hashable, list[int]]:
    """The trajectories (numbers 0..N-1) of each group; for gigpo the steps that were taken at each place."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for group, trajectory in dict.fromkeys(zip(groups, index_B.tolist(), strict=True)):
        members[group].append(trajectory)  # one of several rows counts once
    return members


# -------------------------------------------------------------------------------------------------------------- ppo


@estimator()
def ppo(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (GAE, 1506.02438, eq. 16) over the action tokens a_1 ... a_L of a trajectory.

        delta_t = r_t + gamma * V_{t+1} - V_t                V_{L+1} = 0: the episode is over A_t     = delta_t + gamma
        * lam * A_{t+1}            A_{L+1} = 0 R_t     = A_t + V_t                                  the critic's target

    t counts *action tokens*: the successor of the last token of a tool call is the first token that the agent samples
    after the result, even when 300 tokens of result lie between, or when the context was rewritten and it stands in the
    next row. Were tool tokens counted, (1) a long result would discount the future by (gamma * lam)^300, so that the
    decision to search gets the less credit the more it found, and (2) delta would be built from values at tool tokens,
    where the critic is never trained.

    A cut-off episode is over as well: its outcome has been paid, so nothing is bootstrapped. An outcome that is marked
    as `truncated` says otherwise. Then the last state that the critic has valued stands for the rest, and delta_L =
    r_L.

    With `normalize_std` the advantages (not R_t) are then whitened over all action tokens of the batch: mean 0,
    unbiased variance 1, as in verl. Raises ConfigError without values, or with fewer than two tokens to whiten.
    """
    if batch.values_BT is None:
        raise ConfigError(
            "ppo needs the values of a critic; pass values_BT, or use grpo, which needs none", code="needs_critic"
        )
    # Throw the other tokens away. Row-major order is time order, across the rows of a trajectory too.
    acted_BT, (index_B, _) = batch.mask_BT.bool(), batch.numbered()
    trajectory_A = index_B[acted_BT.nonzero()[:, 0]]
    reward_A, value_A = batch.rewards_BT[acted_BT].float(), batch.values_BT[acted_BT].detach().float()
    truncated_A = None if batch.truncated_B is None else batch.truncated_B[acted_BT.nonzero()[:, 0]]
    advantage_A = gae(reward_A, value_A, trajectory_A, advantage.gamma, advantage.lam, truncated_A)
    return_A = advantage_A + value_A
    if advantage.normalize_std:
        advantage_A = whiten(advantage_A)
    return scatter(advantage_A, acted_BT), scatter(return_A, acted_BT)


def gae(
    reward_A: Tensor, value_A: Tensor, trajectory_A: Tensor, gamma: float, lam: float, truncated_A: Tensor | None = None
) -> Tensor:
    """The recursion over actions that stand end to end, trajectory by trajectory: tokens for ppo, steps for steppo and
    gigpo.

    They are laid out as one line per trajectory, N x L; then it is the textbook's, backwards in time. Shorter
    trajectories end in zeros, which leave V and A at 0 as they must be. The last action of a truncated trajectory is
    followed by a state of its own value, so its delta is what it was paid.
    """
    if truncated_A is not None:
        last_A = F.pad(trajectory_A, (-1, 1), value=-1) != trajectory_A
        reward_A = torch.where(last_A & truncated_A, reward_A + value_A, reward_A)
    length_N = torch.bincount(trajectory_A, minlength=1)  # 1: a batch without any action still has a line
    start_N = length_N.cumsum(0) - length_N
    place_A = torch.arange(len(trajectory_A), device=trajectory_A.device) - start_N[trajectory_A]
    rewards_NL = reward_A.new_zeros(len(length_N), int(length_N.max()))
    values_NL, advantages_NL = torch.zeros_like(rewards_NL), torch.zeros_like(rewards_NL)
    rewards_NL[trajectory_A, place_A], values_NL[trajectory_A, place_A] = reward_A, value_A
    next_value_N = next_advantage_N = rewards_NL.new_zeros(len(length_N))
    for t in reversed(range(rewards_NL.shape[1])):
        delta_N = rewards_NL[:, t] + gamma * next_value_N - values_NL[:, t]
        next_advantage_N = delta_N + gamma * lam * next_advantage_N
        next_value_N = values_NL[:, t]
        advantages_NL[:, t] = next_advantage_N
    return advantages_NL[trajectory_A, place_A]


def whiten(x_A: Tensor, of: str = "action tokens") -> Tensor:
    """Mean 0, unbiased variance 1. Raises ConfigError for fewer than two values; `of` says what they belong to."""
    if len(x_A) < 2:
        raise ConfigError(
            f"cannot whiten {len(x_A)} {of}; sample more episodes, or set advantage.normalize_std=false",
            code="too_few_to_whiten",
        )
    return (x_A - x_A.mean()) * torch.rsqrt(x_A.var() + 1e-8)
