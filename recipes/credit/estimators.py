"""Estimate advantages in more ways than `advantages.py`.

In and out are those of `advantages.py`: a whole batch to `advantages_BT` and `returns_BT`. Each
estimator compares an outcome with something else:

    grpo, rloo, reinforce++-baseline   was this episode better than the other samples of its prompt?
    remax                              was it better than the greedy episode?
    reinforce++                        was it better than the whole batch?
    ppo                                was this token better than the critic expected?
    steppo                             was this turn better than the critic expected?
    gigpo                              was this turn better than the others' in the same state?

docs/algorithms.md compares their strengths, errors and costs. S counts the steps of a batch. Next:
`losses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1 import (
    AdvantageConfig,
    Batch,
    Column,
    ConfigError,
    Estimator,
    gae,
    grpo,
    ppo,
    standardize,
    whiten,
)
from agent_r1_recipes.credit.settings import CreditAdvantage

# --------------------------------------------------------------------------------- compare episodes


@Estimator
def rloo(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compare with the mean of the prompt's *other* samples (RLOO, 2402.14740, eq. 8).

        A_i = score_i - mean of the others = G / (G - 1) * (score_i - mean_G)

    The sample is no part of its baseline, so the gradient is unbiased; there is no division by a
    deviation. The only remaining sample of a group gets 0.
    """
    index_B, score_N = batch.scores()
    advantage_N = torch.zeros_like(score_N)
    for members in batch.members().values():
        G = len(members)
        if G > 1:
            advantage_N[members] = G / (G - 1) * standardize(score_N[members], normalize_std=False)
    return batch.to_tokens(advantage_N[index_B]), batch.to_tokens(score_N[index_B])


@Estimator
def reinforce_plus_plus_baseline(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Centre in the group, scale by the batch (REINFORCE++ baseline, 2501.03262, section 3.2).

        A = whitened over all action tokens (score_i - mean_G)

    The batch's deviation is steadier than a group's: a prompt with almost equal scores gets no
    large weight. Without `normalize_std` it is Dr. GRPO.
    """
    advantages_BT, returns_BT = grpo(batch, advantage.model_copy(update={"normalize_std": False}))
    mask_BT = batch.mask_BT.bool()
    if advantage.normalize_std:
        advantages_BT[mask_BT] = whiten(advantages_BT[mask_BT])
    return advantages_BT, returns_BT


BASELINE = Column(
    "baseline_B",
    torch.float32,
    lambda trajectory: trajectory.extra.get("greedy_score", float("nan")),
)
"""Reward of the greedy episode of the row's prompt; NaN if that episode failed."""


@partial(Estimator, columns=(BASELINE,))
def remax(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compare with one greedy episode of the prompt (ReMax, 2310.10505, algorithm 1).

        A_i = score_i - score of the greedy episode

    It works with one sample per prompt. If the greedy episode failed, the prompt gets 0.
    """
    index_B, score_N = batch.scores()
    advantage_B = (score_N[index_B] - batch.columns[BASELINE.name]).nan_to_num(0.0)
    return batch.to_tokens(advantage_B), batch.to_tokens(score_N[index_B])


# ------------------------------------------------------------------------------------ no comparison


@Estimator
def reinforce_plus_plus(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Compare each action token's return with the whole batch (REINFORCE++, 2501.03262).

        G_k = r_k + gamma * G_{k+1} over action tokens
        A = whitened over all action tokens (G)

    This is ppo with lambda 1 and a critic that always predicts 0.
    """
    batch.refuse_truncated()
    nothing = replace(batch, values_BT=torch.zeros_like(batch.rewards_BT))
    return ppo(nothing, advantage.model_copy(update={"lam": 1.0}))


# --------------------------------------------------------------------------------- steps as actions


@dataclass
class Steps:
    """Hold the S steps of a batch, concatenated by trajectory."""

    first_BT: Tensor
    """bool: the first action token of each step."""
    of_A: Tensor
    """The step of each action token."""
    trajectory_S: Tensor
    reward_S: Tensor
    """Sum of the step's rewards, float32."""

    def to_tokens(self, x_S: Tensor, batch: Batch) -> Tensor:
        """Give each action token the value of its step: [B, T]."""
        return batch.at_actions(x_S[self.of_A])


def first_tokens(mask_BT: Tensor, steps_BT: Tensor) -> Tensor:
    """Mark where steps begin: [B, T] bool. A step never spans two rows."""
    step_BT = torch.where(mask_BT.bool(), steps_BT, -1)
    return step_BT > F.pad(step_BT, (1, -1), value=-1).cummax(dim=1).values


def steps_of(batch: Batch) -> Steps:
    mask_BT = batch.mask_BT.bool()
    first_BT = first_tokens(batch.mask_BT, batch.steps_BT)
    index_B, _ = batch.number_trajectories()
    # Among action tokens in order, the number of steps begun so far is the step's number plus one.
    of_A = first_BT[mask_BT].cumsum(0) - 1
    trajectory_S = index_B[first_BT.nonzero()[:, 0]]
    rewards_A = batch.rewards_BT[mask_BT].float()
    reward_S = rewards_A.new_zeros(len(trajectory_S)).index_add_(0, of_A, rewards_A)
    return Steps(first_BT, of_A, trajectory_S, reward_S)


@partial(
    Estimator,
    critic_mask=lambda batch: first_tokens(batch.mask_BT, batch.steps_BT).to(batch.mask_BT.dtype),
)
def steppo(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Apply GAE over steps (StepPO): the turn is the action, and time counts turns.

        r_t = sum of the step's rewards
        V_t = the critic's value at the step's first action token
        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * lam * A_{t+1}
        R_t = A_t + V_t

    The critic is fitted at those first tokens, the only ones that are read. All tokens of a step
    get A_t, whitened over the steps of the batch, so long and short thoughts count the same. Gamma
    and lam below 1 count turns, so a verbose agent is not discounted more than a concise agent.

    A truncated episode (`Outcome.truncated`) continues at the value of the state in which its last
    step began, the last that the critic has seen. So that step is credited with its own reward
    only. Raises ConfigError without values, or with fewer than two steps to whiten.
    """
    if batch.values_BT is None:
        raise ConfigError(
            "steppo needs the values of a critic; pass values_BT, or use gigpo, which needs none",
            code="needs_critic",
        )
    steps = steps_of(batch)
    value_S = batch.values_BT[steps.first_BT].detach().float()
    truncated_S = None
    if batch.truncated_B is not None:
        row_S = steps.first_BT.nonzero()[:, 0]
        truncated_S = batch.truncated_B[row_S]
    advantage_S = gae(
        steps.reward_S, value_S, steps.trajectory_S, advantage.gamma, advantage.lam, truncated_S
    )
    returns_BT = steps.to_tokens(advantage_S + value_S, batch)
    if advantage.normalize_std:
        advantage_S = whiten(advantage_S, "steps")
    return steps.to_tokens(advantage_S, batch), returns_BT


STATES = Column("states_BT", torch.int64, lambda step: [step.extra["state"]] * len(step.action_ids))
"""State of the agent when the token's step began."""


@partial(Estimator, columns=(STATES,))
def gigpo(batch: Batch, advantage: CreditAdvantage) -> tuple[Tensor, Tensor]:
    """Compare episodes, and steps that start in the same state (GiGPO, 2505.10978, eq. 8).

        A = A_episode (grpo) + step_weight * A_step
        R_t = r_t + gamma * R_{t+1} over steps        A_step = (R_t - mean) / (std + 1e-6)

    A_step is over all steps of a group's episodes that started in the same state
    (`Observation.extra`). If samples of one prompt reach the same state and continue differently,
    these continuations are compared, without a critic. A state that occurs once gives 0.
    """
    steps = steps_of(batch)
    episode_BT, returns_BT = grpo(batch, advantage)
    return_S = gae(
        steps.reward_S, torch.zeros_like(steps.reward_S), steps.trajectory_S, advantage.gamma, 1.0
    )
    row_S = steps.first_BT.nonzero()[:, 0].tolist()
    state_S = batch.columns[STATES.name][steps.first_BT].tolist()
    # Only steps of one group are compared: the same state under another prompt has another aim.
    places = [(batch.groups[row], state) for row, state in zip(row_S, state_S, strict=True)]
    advantage_S = torch.zeros_like(return_S)
    steps_at: dict[tuple[str, int], list[int]] = {}
    for step, place in enumerate(places):
        steps_at.setdefault(place, []).append(step)
    for numbers in steps_at.values():
        if len(numbers) > 1:
            advantage_S[numbers] = standardize(return_S[numbers], advantage.normalize_std)
    return episode_BT + advantage.step_weight * steps.to_tokens(advantage_S, batch), returns_BT
