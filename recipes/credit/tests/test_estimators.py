"""The estimators of this recipe by hand, by property and against verl. tests/test_advantages.py has
what all estimators share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import SEEDS, inputs_of, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1 import (
    Column,
    ConfigError,
    Step,
    StopReason,
    Trajectory,
    collate,
    grpo,
    load_config,
    ppo,
    trajectory_rows,
)
from agent_r1_recipes.credit.estimators import (
    STATES,
    gigpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    steppo,
)
from agent_r1_recipes.credit.process import scale_process_rewards

# ------------------------------------------------------------------------------------------ by hand


def test_rloo_by_hand():
    # Scores 1, 0, 0.5: the others' means are 0.25, 0.75, 0.5.
    advantages_BT, _ = rloo(*inputs_of([[0, 1], [0, 0], [0.5, 0]], [[1, 1], [0, 1], [1, 0]]))
    torch.testing.assert_close(advantages_BT, torch.tensor([[0.75, 0.75], [0, -0.75], [0, 0]]))


def test_a_sample_that_was_left_alone_learns_nothing():
    advantages_BT, _ = rloo(*inputs_of([[1.0], [1.0], [0.0]], [[1]] * 3, groups=["a", "b", "b"]))
    assert advantages_BT[:, 0].tolist() == [0, 1, -1]


def test_reinforce_plus_plus_by_hand():
    # gamma 1/2. One trajectory of three actions paid (0, 0, 4): G = 1, 2, 4; one of one action paid
    # 1: G = 1. Mean 2, unbiased variance (1 + 0 + 4 + 1) / 3 = 2.
    batch, section = inputs_of(
        [[0, 9, 0, 4], [1, 0, 0, 0]], [[1, 0, 1, 1], [1, 0, 0, 0]], gamma=0.5, lam=0.1
    )
    advantages_BT, returns_BT = reinforce_plus_plus(batch, section)
    torch.testing.assert_close(returns_BT, torch.tensor([[1.0, 0, 2, 4], [1, 0, 0, 0]]))
    torch.testing.assert_close(
        advantages_BT * 2**0.5, torch.tensor([[-1.0, 0, 0, 2], [-1, 0, 0, 0]])
    )


def test_reinforce_plus_plus_baseline_by_hand():
    # Group x: scores 2 and 0, y: 5 and 5. Centred: 1, -1, 0, 0 on 1, 2, 1, 1 tokens: mean -1/5,
    # unbiased variance ((6/5)^2 + 2 (4/5)^2 + 2 (1/5)^2) / 4 = 0.7.
    mask = [[1, 0], [1, 1], [1, 0], [0, 1]]
    batch, section = inputs_of([[2, 0], [0, 0], [5, 0], [0, 5]], mask, groups=["x", "x", "y", "y"])
    advantages_BT, _ = reinforce_plus_plus_baseline(batch, section)
    expected = torch.tensor([[1.2, 0], [-0.8, -0.8], [0.2, 0], [0, 0.2]]) / 0.7**0.5
    torch.testing.assert_close(advantages_BT, expected)


def test_remax_by_hand():
    columns = {
        "baseline_B": [0.25, 0.25, float("nan")]
    }  # the greedy episode of the third prompt was broken off
    batch, section = inputs_of(
        [[0, 1], [0, 0], [1, 0]], [[1, 1]] * 3, groups=["a", "a", "b"], columns=columns
    )
    advantages_BT, _ = remax(batch, section)
    torch.testing.assert_close(advantages_BT, torch.tensor([[0.75, 0.75], [-0.25, -0.25], [0, 0]]))
    with pytest.raises(ConfigError, match="the batch has no column baseline_B; declare it"):
        remax(replace(batch, columns={}), section)


def test_rewards_on_the_way_by_hand():
    # The first row earns .2 - .1 + .2 on the way and 1 at its end, the second -.4. To come: .3 .1
    # .2 .2 and -.4 -.4 0 0.
    process_BT = torch.tensor([[0.2, -0.1, 0, 0.2], [0, -0.4, 0, 0]])
    rewards_BT = process_BT + torch.tensor([[0, 0, 0, 1.0], [0, 0, -0.2, 0]])
    balanced_BT, scale = scale_process_rewards(rewards_BT, process_BT, 0.5)
    assert scale == pytest.approx(0.5 / 0.4, rel=1e-5)
    torch.testing.assert_close(
        balanced_BT, torch.tensor([[0.25, -0.125, 0, 1.25], [0, -0.5, -0.2, 0]]), atol=1e-5, rtol=0
    )
    # What is to come counts, not what has been paid: 1 and 2 of [-1, 2], where sums from the left
    # are -1 and 1.
    assert scale_process_rewards(torch.zeros(1, 2), torch.tensor([[-1.0, 2.0]]), 0.5)[
        1
    ] == pytest.approx(0.25, rel=1e-5)
    nothing_BT, _ = scale_process_rewards(rewards_BT, torch.zeros_like(rewards_BT), 0.5)
    assert torch.equal(nothing_BT, rewards_BT)


# Three steps of two, one and two tokens; gamma = lam = 1/2. Rewards of the steps 0, 0, 1; V at
# their first tokens .5, .2, .4: GAE_A and GAE_R of test_advantages.py.
STEPS = {"steps_BT": [[0, 0, -1, 1, -1, 2, 2]]}
STEP_REWARDS, STEP_MASK = [[0, 0, 9, 0, 9, 0, 1]], [[1, 1, 0, 1, 0, 1, 1]]
STEP_VALUES = [[0.5, 9, 9, 0.2, 9, 0.4, 9]]


def test_steppo_by_hand():
    settings_ = {"gamma": 0.5, "lam": 0.5, "normalize_std": False}
    batch, section = inputs_of(
        STEP_REWARDS, STEP_MASK, values=STEP_VALUES, columns=STEPS, **settings_
    )
    advantages_BT, returns_BT = steppo(batch, section)
    a1, a2, a3, r1, r2, r3 = -0.3625, 0.15, 0.6, 0.1375, 0.35, 1.0
    torch.testing.assert_close(advantages_BT, torch.tensor([[a1, a1, 0, a2, 0, a3, a3]]))
    torch.testing.assert_close(returns_BT, torch.tensor([[r1, r1, 0, r2, 0, r3, r3]]))
    assert steppo.critic_mask(batch).tolist() == [[1, 0, 0, 1, 0, 1, 0]]
    assert ppo.critic_mask(batch) is batch.mask_BT
    # Whitened over three steps, not over five tokens.
    whitened_BT, _ = steppo(batch, section.model_copy(update={"normalize_std": True}))
    a = torch.tensor([a1, a2, a3])
    torch.testing.assert_close(whitened_BT[0, [0, 3, 5]], (a - a.mean()) / a.std())


def test_steppo_goes_on_with_the_value_where_the_outcome_was_not_paid():
    # The state of the third step stands for the future. It was paid nothing: A3 = 0, R3 = V3. The
    # second sees 0.4 / 2 ahead: A2 = 0, R2 = 0.2. A1 = 0.5 * 0.2 - 0.5 = -0.4. Paid 1 on the way:
    # A3 = 1, A2 = 0.25 * 1, A1 = -0.4 + 0.25 * 0.25.
    columns = STEPS | {"truncated_B": [True]}
    settings_ = {"gamma": 0.5, "lam": 0.5, "normalize_std": False}
    for paid, (a1, a2, a3) in ((0, (-0.4, 0, 0)), (1, (-0.3375, 0.25, 1))):
        rewards = [[0, 0, 9, 0, 9, 0, paid]]
        advantages_BT, returns_BT = steppo(
            *inputs_of(rewards, STEP_MASK, values=STEP_VALUES, columns=columns, **settings_)
        )
        torch.testing.assert_close(advantages_BT, torch.tensor([[a1, a1, 0, a2, 0, a3, a3]]))
        torch.testing.assert_close(
            returns_BT, torch.tensor([[a1 + 0.5, a1 + 0.5, 0, a2 + 0.2, 0, a3 + 0.4, a3 + 0.4]])
        )


def test_gigpo_by_hand():
    """Two episodes begin in state 1; both come by state 2, and leave it differently.

    The winner alone sees state 3.
    """
    # Scores 1 and 0: A_episode = +-1/2 without deviation. gamma 1/2: the winner's steps return 1/4,
    # 1/2, 1, the loser's 0, 0. State 1: 1/4 and 0, mean 1/8. State 2: 1/2 and 0, mean 1/4. State 3
    # was met once.
    columns = {"steps_BT": [[0, 1, 2], [0, 1, -1]], "states_BT": [[1, 2, 3], [1, 2, 0]]}
    batch, section = inputs_of(
        [[0, 0, 1], [0, 0, 0]],
        [[1, 1, 1], [1, 1, 0]],
        columns=columns,
        gamma=0.5,
        normalize_std=False,
    )
    advantages_BT, _ = gigpo(batch, section)
    torch.testing.assert_close(
        advantages_BT, torch.tensor([[0.625, 0.75, 0.5], [-0.625, -0.75, 0]])
    )
    halved_BT, _ = gigpo(batch, section.model_copy(update={"step_weight": 0.5}))
    torch.testing.assert_close(
        halved_BT, torch.tensor([[0.5625, 0.625, 0.5], [-0.5625, -0.625, 0]])
    )
    # The same states of another prompt are other states.
    apart, _ = inputs_of(
        [[0, 0, 1], [0, 0, 0]] * 2, [[1, 1, 1]] * 4, groups=["a", "a", "b", "b"], gamma=0.5
    )
    apart.columns["states_BT"] = torch.tensor([[1, 2, 3], [4, 5, 6], [4, 5, 6], [1, 2, 3]])
    torch.testing.assert_close(gigpo(apart, section)[0], grpo(apart, section)[0])


# -------------------------------------------------------------------------------------- by property


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([1.0, 0.9]))
def test_steppo_is_ppo_where_each_step_is_one_token(seed, gamma):
    batch, section = random_inputs(seed, gamma=gamma, lam=0.8)
    batch.steps_BT = torch.arange(batch.mask_BT.shape[1]).expand(batch.mask_BT.shape)
    for ours, expected in zip(steppo(batch, section), ppo(batch, section), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_all_tokens_of_a_step_share_its_credit(seed):
    batch, section = random_inputs(seed, gamma=0.9, lam=0.8)
    for estimate in (steppo, gigpo):
        advantages_BT, _ = estimate(batch, section)
        for row in range(len(batch)):
            mine, steps = (
                advantages_BT[row][batch.mask_BT[row]],
                batch.steps_BT[row][batch.mask_BT[row]],
            )
            for step in steps.unique():
                assert len(mine[steps == step].unique()) == 1


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_gigpo_without_its_steps_is_grpo(seed):
    batch, section = random_inputs(seed, step_weight=0.0)
    torch.testing.assert_close(gigpo(batch, section)[0], grpo(batch, section)[0])


# ---------------------------------------------------------------------------- verl as the reference


@pytest.mark.cluster
@settings(max_examples=30, deadline=None)
@given(SEEDS, st.sampled_from([1.0, 0.9]))
def test_verls_own_agree(seed, gamma):
    from verl.trainer.ppo import core_algos

    batch, section = random_inputs(seed, several_rows=False, gamma=gamma)
    last_B = (
        batch.mask_BT.shape[1] - 1 - batch.mask_BT.flip(1).int().argmax(dim=1)
    )  # the outcome alone, on the last action
    outcome_BT = torch.zeros_like(batch.rewards_BT)
    outcome_BT[torch.arange(len(batch)), last_B] = batch.rewards_BT.sum(dim=1)
    batch = replace(batch, rewards_BT=outcome_BT, columns={"baseline_B": torch.randn(len(batch))})
    baseline = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    theirs = {
        rloo: core_algos.compute_rloo_outcome_advantage,
        reinforce_plus_plus: core_algos.compute_reinforce_plus_plus_outcome_advantage,
        reinforce_plus_plus_baseline: baseline,
        remax: core_algos.compute_remax_outcome_advantage,
    }
    for ours, reference in theirs.items():
        expected, _ = reference(
            token_level_rewards=batch.rewards_BT.clone(),
            response_mask=batch.mask_BT.float(),
            index=np.array(batch.groups, dtype=object),
            reward_baselines=batch.columns["baseline_B"],
            config=core_algos.AlgoConfig(gamma=gamma),
        )
        expected = (
            expected * batch.mask_BT
        )  # verl leaves numbers on masked tokens (its losses mask them later)
        torch.testing.assert_close(ours(batch, section)[0], expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------- what rows bring the estimators


def test_rows_know_their_steps_states_and_whether_the_outcome_was_paid():
    steps = [
        Step([1, 2], [3, 4], [-1.0, -1.0], extra={"state": 11}),
        Step([1, 2, 3, 4, 5], [6], [-1.0], extra={"state": 12}),
    ]
    trajectory = Trajectory(steps, "g", StopReason.MAX_TURNS, {}, truncated=True)
    batch = collate(trajectory_rows(trajectory, 0, [STATES]), columns=[STATES])
    assert batch.steps_BT.tolist() == [[-1, -1, 0, 0, -1, 1]]
    assert batch.columns["states_BT"].tolist() == [[0, 0, 11, 11, 0, 12]]
    assert batch.truncated_B.tolist() == [True]


def test_a_column_that_is_not_declared_is_refused_where_rows_meet_and_where_it_is_read():
    trajectory = Trajectory(
        [Step([1], [2, 3], [-1.0, -1.0], extra={"state": 4})], "g", StopReason.ANSWERED, {}
    )
    with pytest.raises(ValueError, match="rows and estimator differ in the columns states_BT"):
        collate(trajectory_rows(trajectory, 0), columns=[STATES])
    with pytest.raises(ValueError, match="rows and estimator differ in the columns states_BT"):
        collate(trajectory_rows(trajectory, 0, [STATES]))
    with pytest.raises(ConfigError, match="the batch has no column states_BT; declare it"):
        gigpo(
            collate([row for n in range(2) for row in trajectory_rows(trajectory, n)]),
            load_config("smoke").advantage,
        )
    short = Column("short_BT", torch.int64, lambda step: [1])
    with pytest.raises(ValueError, match="column short_BT: 1 values for a step of 2 action tokens"):
        trajectory_rows(trajectory, 0, [short])


def test_a_critic_or_a_group_decides_which_section_of_the_preset_counts():
    assert (
        load_config("discover", algorithm="steppo").rollout
        == load_config("discover", algorithm="ppo").rollout
    )
    assert (
        load_config("discover", algorithm="gigpo").rollout
        == load_config("discover", algorithm="grpo").rollout
    )
    for name in ("rloo", "gigpo", "reinforce++-baseline"):
        with pytest.raises(
            ConfigError, match=rf"^{name.replace('+', '.')} compares samples of one prompt"
        ):
            load_config("discover", ["rollout.samples_per_prompt=1"], algorithm=name)
