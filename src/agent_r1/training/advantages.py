"""Estimate advantages: how much better each action token did than expected.

In: rewards, masks and values of a batch of training rows (`rollout/training_rows.py`). Out: one
number per action token. Next: `losses.py` makes tokens with a positive advantage more likely and
tokens with a negative one less likely.

The local loop and verl call the same functions; recipes/credit has more estimators.

Only sampled tokens are actions. Rows also have prompts and tool results, so every estimator selects
by `mask_BT` first and returns 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1.config.settings import AdvantageConfig
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.columns import Column
from agent_r1.rollout.training_rows import Batch, scatter

Credit = Callable[[Batch, AdvantageConfig], tuple[Tensor, Tensor]]
"""Maps a batch with all samples of its prompts to `advantages_BT` and `returns_BT`.

Both are float32, and 0 where the mask is 0.

Reads `rewards_BT`, `mask_BT`, `groups`, `trajectory_B` and, with a critic, `values_BT`.
"""


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages, with the inputs that it needs. Use it as a decorator.

    The last three properties are stated in a table of names, since a configuration is checked
    before any code is imported; `parts.get_estimator` copies them.
    """

    credit: Credit
    columns: tuple[Column, ...] = ()
    """Inputs beyond those that every batch has."""
    critic_mask: Callable[[Batch], Tensor] = lambda batch: batch.mask_BT
    """[B, T]: the tokens that train the critic. By default, all action tokens; steppo of
    recipes/credit takes the first of each turn."""
    groups: bool = False
    """It compares the samples of a prompt, so a group of one teaches nothing."""
    critic: bool = False
    """It reads `values_BT`."""
    greedy: bool = False
    """It compares with one more episode of each prompt, played greedily."""

    def __call__(self, batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        return self.credit(batch, advantage)


# --------------------------------------------------------------------------------------------- grpo


@Estimator
def grpo(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compare each trajectory with its group (GRPO, 2402.03300, section 4.1.2).

    It is the form with outcome supervision.

        score_i = sum of all rewards of trajectory i
        A_i     = (score_i - mean_G) / (std_G + 1e-6)

    over the G trajectories of one prompt. Every action token of trajectory i gets A_i. The mean
    replaces a critic as the baseline. std uses G - 1, as in verl. Dividing gives more weight to
    prompts whose samples nearly agree (Dr. GRPO, 2503.20783); `normalize_std=False` omits the
    division.

    Statistics are over trajectories: an episode that rewrote its context has several rows but one
    score. Raises ConfigError for a group of one.
    """
    # N trajectories, not B rows: an episode that rewrote its context has several rows and one vote.
    index_B, score_N = batch.scores()
    advantage_N = torch.zeros_like(score_N)
    for group, members in batch.members().items():
        if len(members) == 1:
            raise ConfigError(
                f"grpo: group {group!r} has a single trajectory and nothing to compare it with; "
                "set rollout.samples_per_prompt to 2 or more and keep the samples of a prompt in "
                "one batch, or use ppo",
                code="group_of_one",
            )
        # Within the group only: a hard question's scores say nothing about an easy one's. Scores 1,
        # 1, 0 and -0.2 give .859, .859, -.703 and -1.015 (lesson 5).
        advantage_N[members] = standardize(score_N[members], advantage.normalize_std)
    return batch.to_tokens(advantage_N[index_B]), batch.to_tokens(score_N[index_B])


def standardize(score_G: Tensor, normalize_std: bool) -> Tensor:
    """Subtract the group's mean from its scores; optionally divide by their standard deviation."""
    # Equal scores must give exactly 0. In float32 the mean of seven times 0.8 is not 0.8, and
    # dividing such an error by (0 + 1e-6) would give an advantage of 0.05.
    if score_G.max() - score_G.min() <= 1e-6 * score_G.abs().max():
        return torch.zeros_like(score_G)
    deviation_G = score_G - score_G.mean()
    if not normalize_std:
        return deviation_G
    return deviation_G / (score_G.std() + 1e-6)


# ---------------------------------------------------------------------------------------------- ppo


@Estimator
def ppo(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (GAE, 1506.02438, eq. 16) over action tokens a_1 ... a_L.

    They are those of one trajectory.

        delta_t = r_t + gamma * V_{t+1} - V_t                V_{L+1} = 0: the episode is over
        A_t     = delta_t + gamma * lam * A_{t+1}            A_{L+1} = 0
        R_t     = A_t + V_t                                  the critic's target

    t counts *action tokens*. The last token of a tool call is followed by the first token sampled
    after the result, possibly in the next row. If tool tokens counted, a result of 300 tokens would
    discount the future by (gamma * lam)^300. Below gamma * lam = 1, a search would get less credit
    the longer its result. Also, delta would use values at tool tokens, where the critic is never
    trained.

    An episode that a limit stopped is over as well: its outcome was paid, so nothing is
    bootstrapped. Only an outcome marked `truncated` is bootstrapped: V_{L+1} is not computed, so
    V_L replaces gamma * V_{L+1}, and delta_L = r_L.

    `normalize_std` then whitens the advantages (not R_t) over the batch's action tokens: mean 0,
    unbiased variance 1, as in verl. Raises ConfigError without values, or with fewer than two
    tokens to whiten.
    """
    if batch.values_BT is None:
        raise ConfigError(
            "ppo needs the values of a critic; pass values_BT, or use grpo, which needs none",
            code="needs_critic",
        )
    # Keep action tokens only. Row-major order is time order, also across the rows of a trajectory.
    action_BT = batch.mask_BT.bool()
    index_B, _ = batch.number_trajectories()
    row_A = action_BT.nonzero()[:, 0]
    trajectory_A = index_B[row_A]
    reward_A = batch.rewards_BT[action_BT].float()
    value_A = batch.values_BT[action_BT].detach().float()
    truncated_A = None if batch.truncated_B is None else batch.truncated_B[row_A]
    advantage_A = gae(reward_A, value_A, trajectory_A, advantage.gamma, advantage.lam, truncated_A)
    # Before whitening: the critic learns returns in units of reward.
    return_A = advantage_A + value_A
    if advantage.normalize_std:
        advantage_A = whiten(advantage_A)
    return scatter(advantage_A, action_BT), scatter(return_A, action_BT)


def gae(
    reward_A: Tensor,
    value_A: Tensor,
    trajectory_A: Tensor,
    gamma: float,
    lam: float,
    truncated_A: Tensor | None = None,
) -> Tensor:
    """Run the recursion over concatenated actions: tokens for ppo, steps for steppo and gigpo.

    Actions are padded to a table with one line per trajectory, [N, L]; the recursion runs backwards
    in time. Zeros at the end of shorter lines keep V and A at 0. A `truncated` trajectory gets its
    last value added to its last reward.
    """
    if truncated_A is not None:
        # A token is its trajectory's last if the next token belongs to another one. Padding by
        # (-1, 1) drops the first entry and appends -1, so each place holds the next one's number.
        last_A = F.pad(trajectory_A, (-1, 1), value=-1) != trajectory_A
        reward_A = torch.where(last_A & truncated_A, reward_A + value_A, reward_A)
    length_N = torch.bincount(trajectory_A, minlength=1)  # minlength: an empty batch has N = 1
    # A token's place in its line is its distance from the trajectory's first action token.
    start_N = length_N.cumsum(0) - length_N
    place_A = torch.arange(len(trajectory_A), device=trajectory_A.device) - start_N[trajectory_A]
    rewards_NL = reward_A.new_zeros(len(length_N), int(length_N.max()))
    values_NL = torch.zeros_like(rewards_NL)
    advantages_NL = torch.zeros_like(rewards_NL)
    rewards_NL[trajectory_A, place_A] = reward_A
    values_NL[trajectory_A, place_A] = value_A
    next_value_N = rewards_NL.new_zeros(len(length_N))
    next_advantage_N = next_value_N
    # All trajectories at once: L passes (28 for lesson 3's group, with rows of up to 123 tokens),
    # not one per token of the batch. Lesson 5 has an episode of six action tokens by hand.
    for t in reversed(range(rewards_NL.shape[1])):
        # After a trajectory's last token both "next" values are 0: the episode is over.
        delta_N = rewards_NL[:, t] + gamma * next_value_N - values_NL[:, t]
        next_advantage_N = delta_N + gamma * lam * next_advantage_N
        next_value_N = values_NL[:, t]
        advantages_NL[:, t] = next_advantage_N
    return advantages_NL[trajectory_A, place_A]


def whiten(x_A: Tensor, unit: str = "action tokens") -> Tensor:
    """Scale to mean 0 and unbiased variance 1. Raise ConfigError for fewer than two values."""
    if len(x_A) < 2:
        raise ConfigError(
            f"cannot whiten {len(x_A)} {unit}; sample more episodes, or set "
            "advantage.normalize_std=false",
            code="too_few_to_whiten",
        )
    # 1e-8 keeps equal values finite: they become 0.
    return (x_A - x_A.mean()) * torch.rsqrt(x_A.var() + 1e-8)
