"""Room 7: advantages by hand, by property, and against verl."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import SEEDS, inputs_of, random_inputs
from conftest import fails_with
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_r1.config import ALGORITHMS
from agent_r1.config.tables import algorithm_has
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import grpo, ppo
from agent_r1.training.parts import get_estimator

ESTIMATORS = {name: get_estimator(name) for name in ALGORITHMS}
NAMES = pytest.mark.parametrize("name", sorted(ESTIMATORS))

# ------------------------------------------------------------------------------------- grpo by hand


def test_grpo_by_hand():
    # Scores 1, 0, 0, 1: mean 1/2; unbiased variance 4 * (1/2)^2 / 3 = 1/3; A = +-0.5 / (sqrt(1/3) +
    # 1e-6) = +-0.866024
    rewards = [[0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0]]
    mask = [[1, 0, 1], [1, 1, 1], [0, 0, 1], [0, 1, 0]]
    advantages_BT, returns_BT = grpo(*inputs_of(rewards, mask))
    a = 0.866024
    torch.testing.assert_close(
        advantages_BT,
        torch.tensor([[a, 0, a], [-a, -a, -a], [0, 0, -a], [0, a, 0]]),
        atol=1e-6,
        rtol=0,
    )
    # Dr. GRPO: without the division
    advantages_BT, returns_BT = grpo(*inputs_of(rewards, mask, normalize_std=False))
    torch.testing.assert_close(
        advantages_BT, torch.tensor([[0.5, 0, 0.5], [-0.5, -0.5, -0.5], [0, 0, -0.5], [0, 0.5, 0]])
    )


def test_grpo_sums_process_rewards_and_separates_groups():
    # Group x: scores 0.1 + 1 = 1.1 and 0.1: mean 0.6, A = +-0.5. Group y: scores 3 and 1: mean 2, A
    # = +-1.
    advantages_BT, returns_BT = grpo(
        *inputs_of(
            [[0.1, 1], [0, 3], [0.1, 0], [1, 0]],
            [[1, 1]] * 4,
            groups=["x", "y", "x", "y"],
            normalize_std=False,
        )
    )
    torch.testing.assert_close(advantages_BT[:, 0], torch.tensor([0.5, 1.0, -0.5, -1.0]))
    torch.testing.assert_close(returns_BT[:, 1], torch.tensor([1.1, 3.0, 0.1, 1.0]))


def test_grpo_gives_a_trajectory_of_several_rows_one_vote():
    # Trajectory 0 has three rows and scores 0.5 + 0 + 0.5 = 1; trajectory 1 scores 0. Mean 1/2, A =
    # +-1/2. Were rows counted, the mean would be (0.5 + 0 + 0.5 + 0) / 4 = 1/4.
    rewards, mask = [[0, 0.5], [0, 0], [0.5, 0], [0, 0]], [[0, 1], [1, 1], [1, 0], [1, 1]]
    advantages_BT, returns_BT = grpo(
        *inputs_of(rewards, mask, trajectories=[7, 7, 7, 2], normalize_std=False)
    )
    expected = torch.tensor([[0, 0.5], [0.5, 0.5], [0.5, 0], [-0.5, -0.5]])
    torch.testing.assert_close(advantages_BT, expected)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.8, -0.2, 1e6])
def test_grpo_group_without_variance_is_exactly_zero(score, normalize_std):
    # The same total in other parts: as float32 sums these differ in the last digit
    split = [[0.3, score, 0.6], [0.3, 0.6, score], [score, 0.0, 0.9], [0.9, score, 0.0]]
    for rewards in ([[score, 0, 0]] * 7, split):
        advantages_BT, returns_BT = grpo(
            *inputs_of(rewards, [[1, 1, 1]] * len(rewards), normalize_std=normalize_std)
        )
        assert torch.equal(advantages_BT, torch.zeros(len(rewards), 3))


def test_grpo_refuses_a_group_of_one():
    with fails_with("group_of_one"):
        grpo(
            *inputs_of(
                [[1.0]] * 4, [[1]] * 4, groups=["a", "a", "b", "b"], trajectories=[0, 1, 2, 2]
            )
        )


# -------------------------------------------------------------------------------------- ppo by hand

# Three actions, gamma = lam = 1/2, r = (0, 0, 1), V = (0.5, 0.2, 0.4), backwards:
#   t=3: delta = 1 - 0.4             =  0.6
#        A = 0.6                               R = 0.6    + 0.4 = 1
#   t=2: delta = 0 + 0.5 * 0.4 - 0.2 =  0
#        A = 0    + 0.25 * 0.6  = 0.15         R = 0.15   + 0.2 = 0.35
#   t=1: delta = 0 + 0.5 * 0.2 - 0.5 = -0.4
#        A = -0.4 + 0.25 * 0.15 = -0.3625      R = -0.3625 + 0.5 = 0.1375
GAE_A, GAE_R = (-0.3625, 0.15, 0.6), (0.1375, 0.35, 1.0)


def test_gae_by_hand_skips_tool_tokens():
    advantages_BT, returns_BT = ppo(
        *inputs_of(
            rewards=[[9, 0, 0, 9, 9, 1, 9]],  # 9: garbage on tokens that are no actions
            mask=[[0, 1, 1, 0, 0, 1, 0]],
            values=[[9, 0.5, 0.2, 9, 9, 0.4, 9]],
            gamma=0.5,
            lam=0.5,
            normalize_std=False,
        )
    )
    (a1, a2, a3), (r1, r2, r3) = GAE_A, GAE_R
    torch.testing.assert_close(advantages_BT, torch.tensor([[0, a1, a2, 0, 0, a3, 0]]))
    torch.testing.assert_close(returns_BT, torch.tensor([[0, r1, r2, 0, 0, r3, 0]]))


def test_gae_by_hand_crosses_the_rows_of_a_trajectory_and_no_others():
    # The same three actions in two rows, between two other trajectories of one action: A = r - V =
    # 2 - 1 and 3 - 5
    advantages_BT, returns_BT = ppo(
        *inputs_of(
            rewards=[[0, 2], [0, 0], [0, 1], [3, 0]],
            mask=[[0, 1], [1, 1], [0, 1], [1, 0]],
            values=[[0, 1], [0.5, 0.2], [0, 0.4], [5, 0]],
            trajectories=[0, 1, 1, 2],
            gamma=0.5,
            lam=0.5,
            normalize_std=False,
        )
    )
    a1, a2, a3 = GAE_A
    torch.testing.assert_close(advantages_BT, torch.tensor([[0, 1], [a1, a2], [0, a3], [-2, 0]]))


def test_whitening_by_hand():
    # With V = 0, gamma = 1, lam = 1 the advantages are the rewards to go: 1, 3, 5 in three
    # trajectories of one action. Mean 3, unbiased variance (4 + 0 + 4) / 2 = 4, so -1, 0, 1.
    # Returns are not whitened.
    advantages_BT, returns_BT = ppo(
        *inputs_of([[1, 0], [0, 3], [5, 0]], [[1, 0], [0, 1], [1, 0]], values=[[0, 0]] * 3)
    )
    torch.testing.assert_close(advantages_BT, torch.tensor([[-1.0, 0], [0, 0], [1, 0]]))
    torch.testing.assert_close(returns_BT, torch.tensor([[1.0, 0], [0, 3], [5, 0]]))


def test_ppo_refuses_what_it_cannot_do():
    with fails_with("needs_critic"):
        ppo(*inputs_of([[1.0]], [[1]]))
    for mask in (0, 1):
        with fails_with("too_few_to_whiten"):
            ppo(*inputs_of([[1.0]], [[mask]], values=[[0.0]]))


# --------------------------------------------------------------------------------------- properties


@NAMES
@given(SEEDS, st.booleans(), st.sampled_from([float("nan"), float("inf"), -1e30, 7.0]))
def test_what_stands_on_masked_tokens_is_never_seen(name, seed, normalize_std, garbage):
    batch, advantage = random_inputs(seed, gamma=0.9, lam=0.8, normalize_std=normalize_std)
    out = ESTIMATORS[name](batch, advantage)
    other = ESTIMATORS[name](
        replace(
            batch,
            rewards_BT=torch.where(batch.mask_BT, batch.rewards_BT, garbage),
            values_BT=torch.where(batch.mask_BT, batch.values_BT, garbage),
            mask_BT=batch.mask_BT.float(),  # a float mask means the same
            steps_BT=torch.where(batch.mask_BT, batch.steps_BT, 7),
            columns=batch.columns
            | {"states_BT": torch.where(batch.mask_BT, batch.columns["states_BT"], 7)},
        ),
        advantage,
    )
    for result, twin in zip(out, other, strict=True):
        assert result.dtype == torch.float32 and result.shape == batch.mask_BT.shape
        assert torch.isfinite(result).all() and torch.equal(result, twin)
        assert torch.equal(result[~batch.mask_BT], torch.zeros((~batch.mask_BT).sum()))


@NAMES
@given(SEEDS, st.booleans())
def test_permuting_trajectories_permutes_the_result(name, seed, normalize_std):
    batch, advantage = random_inputs(seed, gamma=0.9, lam=0.8, normalize_std=normalize_std)
    shuffled = torch.randperm(
        int(batch.trajectory_B.max()) + 1, generator=torch.Generator().manual_seed(seed)
    )
    order = torch.cat([(batch.trajectory_B == t).nonzero()[:, 0] for t in shuffled])
    tensors = {
        name: column[order]
        for name, column in vars(batch).items()
        if isinstance(column, torch.Tensor)
    }
    columns = {name: column[order] for name, column in batch.columns.items()}
    moved = Batch(**tensors, groups=[batch.groups[i] for i in order], columns=columns)
    (out, out_returns), (other, other_returns) = (
        ESTIMATORS[name](batch, advantage),
        ESTIMATORS[name](moved, advantage),
    )
    torch.testing.assert_close(other, out[order])
    torch.testing.assert_close(other_returns, out_returns[order])


@NAMES
@given(SEEDS)
def test_the_outcome_reaches_every_action_token_whatever_the_mask(name, seed):
    """One trajectory is paid 1 on its last action token, all others nothing."""
    batch, advantage = random_inputs(seed, normalize_std=False)
    winner = batch.trajectory_B == int(batch.trajectory_B[seed % len(batch.trajectory_B)])
    row, column = (batch.mask_BT & winner[:, None]).nonzero()[-1]
    rewards_BT = torch.zeros_like(batch.rewards_BT)
    rewards_BT[row, column] = 1.0
    paid = replace(batch, rewards_BT=rewards_BT, values_BT=torch.zeros_like(rewards_BT))
    advantages_BT, returns_BT = ESTIMATORS[name](paid, advantage)
    actions_of_winner = batch.mask_BT & winner[:, None]
    assert (advantages_BT[actions_of_winner] > 0).all()
    assert (advantages_BT[~actions_of_winner] <= 0).all()
    assert torch.equal(
        returns_BT, actions_of_winner.float()
    )  # undiscounted: everyone on the way saw 1 to come


@given(SEEDS)
def test_gae_with_gamma_and_lambda_one_is_reward_to_go_minus_value(seed):
    batch, advantage = random_inputs(seed, normalize_std=False)
    advantages_BT, returns_BT = ppo(batch, advantage)
    for t in batch.trajectory_B.unique():
        at = batch.mask_BT & (batch.trajectory_B == t)[:, None]
        to_go = batch.rewards_BT[at].flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(returns_BT[at], to_go, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            advantages_BT[at], to_go - batch.values_BT[at], atol=1e-5, rtol=1e-5
        )


@given(SEEDS)
def test_gae_does_not_care_how_actions_are_laid_out(seed):
    """Moving the actions of each trajectory into one dense row changes nothing: tool tokens and
    rows do not count."""
    batch, advantage = random_inputs(seed, gamma=0.9, lam=0.7)
    advantages_BT, returns_BT = ppo(batch, advantage)
    at = [batch.mask_BT & (batch.trajectory_B == t)[:, None] for t in batch.trajectory_B.unique()]
    width = max(int(a.sum()) for a in at)

    def dense(x_BT):
        return torch.stack(
            [torch.nn.functional.pad(x_BT[a], (0, width - int(a.sum()))) for a in at]
        )

    packed, _ = ppo(
        replace(
            batch,
            rewards_BT=dense(batch.rewards_BT),
            mask_BT=dense(batch.mask_BT),
            values_BT=dense(batch.values_BT),
            groups=["q"] * len(at),
            trajectory_B=torch.arange(len(at)),
        ),
        advantage,
    )
    torch.testing.assert_close(packed, dense(advantages_BT))


@given(SEEDS)
@example(174046)  # two rewards that differ by less than a thousandth
@example(29576)  # and by less than a ten-thousandth, 2.6962 and 2.6961
def test_normalised_statistics(seed):
    batch, advantage = random_inputs(seed, several_rows=False)
    whitened = ppo(batch, advantage)[0][batch.mask_BT]
    assert whitened.mean().item() == pytest.approx(
        0, abs=1e-3
    ) and whitened.var().item() == pytest.approx(1, abs=1e-3)
    per_row = grpo(batch, advantage)[0].sum(1) / batch.mask_BT.sum(1)
    for group in set(batch.groups):
        here = torch.tensor([g == group for g in batch.groups])
        spread = batch.rewards_BT[here].sum(1).std().item()
        one = spread / (
            spread + 1e-6
        )  # rewards that nearly agree are not blown up to a spread of 1
        # Float32 rounds a reward by up to eps * |reward|, and the division enlarges that.
        size = batch.rewards_BT[here].abs().sum(1).max().item()
        rounding = torch.finfo(torch.float32).eps * size * int(here.sum()) / (spread + 1e-6)
        assert per_row[here].sum().item() == pytest.approx(0, abs=1e-3 + rounding)
        assert per_row[here].std().item() == pytest.approx(one, abs=1e-3)


# ------------------------------------------------------------------------------------------ by name


@NAMES
def test_rows_must_be_in_order(name):
    with pytest.raises(ValueError, match="consecutive"):
        ESTIMATORS[name](
            *inputs_of([[1.0]] * 3, [[1]] * 3, values=[[0.0]] * 3, trajectories=[0, 1, 0])
        )


# ---------------------------------------------------------------------------- verl as the reference


@pytest.mark.cluster
@settings(max_examples=40, deadline=None)
@given(SEEDS, st.booleans())
def test_grpo_equals_verl(seed, normalize_std):
    from verl.trainer.ppo import core_algos

    batch, advantage = random_inputs(seed, several_rows=False, normalize_std=normalize_std)
    expected, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=batch.rewards_BT.clone(),
        response_mask=batch.mask_BT.float(),
        index=np.array(batch.groups, dtype=object),
        norm_adv_by_std_in_grpo=normalize_std,
    )
    torch.testing.assert_close(grpo(batch, advantage)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.cluster
@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.5]))
def test_gae_equals_verl(seed, gamma, lam):
    from verl.trainer.ppo import core_algos

    batch, advantage = random_inputs(seed, several_rows=False, gamma=gamma, lam=lam)
    mask_BT = batch.mask_BT.float()
    expected, expected_returns = core_algos.compute_gae_advantage_return(
        token_level_rewards=batch.rewards_BT,
        values=batch.values_BT,
        response_mask=mask_BT,
        gamma=gamma,
        lam=lam,
    )
    advantages_BT, returns_BT = ppo(batch, advantage)
    # verl leaves numbers on masked tokens (its losses mask them later)
    torch.testing.assert_close(advantages_BT, expected * mask_BT, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(returns_BT, expected_returns * mask_BT, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------- truncated episodes


def test_ppo_goes_on_with_the_value_where_the_outcome_was_not_paid():
    """The same three values at single tokens; the second episode ended, so its V is 0 after the
    last token."""
    columns = {"truncated_B": [True, False]}
    batch, section = inputs_of(
        [[0, 0, 0]] * 2,
        [[1] * 3] * 2,
        values=[[0.5, 0.2, 0.4]] * 2,
        columns=columns,
        gamma=0.5,
        lam=0.5,
        normalize_std=False,
    )
    advantages_BT, returns_BT = ppo(batch, section)
    torch.testing.assert_close(advantages_BT, torch.tensor([[-0.4, 0, 0], [-0.425, -0.1, -0.4]]))
    torch.testing.assert_close(returns_BT, torch.tensor([[0.1, 0.2, 0.4], [0.075, 0.1, 0]]))


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if not algorithm_has(name, "critic")]
)
def test_without_a_critic_a_truncated_episode_is_refused(algorithm):
    """It would count as one that earned nothing, and so would be held against the policy."""
    columns = {"steps_BT": [[0, 1]] * 2, "states_BT": [[1, 2]] * 2} | {
        "truncated_B": [True, False],
        "baseline_B": [0.0, 0.0],
    }
    batch, section = inputs_of([[0, 0], [0, 1]], [[1, 1]] * 2, columns=columns)
    with pytest.raises(
        ConfigError,
        match="^1 episodes were truncated .* use an estimator with a critic, such as ppo",
    ):
        get_estimator(algorithm)(batch, section)
    batch.truncated_B[0] = False
    assert get_estimator(algorithm)(batch, section)[0].abs().max() > 0
