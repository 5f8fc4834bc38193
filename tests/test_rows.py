"""Room 5, rows: masks, the row rule, and where rewards sit."""

from __future__ import annotations

import pytest
import torch
from conftest import trajectory_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.core import StopReason
from agent_r1.rollout.training_rows import collate, trajectory_rows

PROMPT, ACTION, RESULT, ANSWER = [1, 2, 3], [10, 11], [4, 5], [12, 13, 14]


def two_turns():
    """Prompt, call, result, answer: the episode of the textbook."""
    return trajectory_of((PROMPT, ACTION, 0.25), (PROMPT + ACTION + RESULT, ANSWER, 1.0))


def test_an_appended_context_is_one_row_by_hand():
    [row] = trajectory_rows(two_turns(), 7)
    assert row.trajectory == 7 and row.group_id == "g"
    assert row.input_ids == [1, 2, 3, 10, 11, 4, 5, 12, 13, 14]
    assert row.action_mask == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert row.step_ids == [-1, -1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert row.rewards == [0, 0, 0, 0, 0.25, 0, 0, 0, 0, 1.0]
    assert row.logprobs == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0, -0.1, -0.2, -0.3])


def test_a_rewritten_context_begins_a_new_row():
    rows = trajectory_rows(
        trajectory_of(
            (PROMPT, ACTION, 0.25), ([1, 9], ANSWER, 1.0), ([1, 9, *ANSWER, 8], [15], 2.0)
        ),
        0,
    )
    assert [row.input_ids for row in rows] == [[1, 2, 3, 10, 11], [1, 9, 12, 13, 14, 8, 15]]
    assert [row.action_mask for row in rows] == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 0, 1]]
    assert [row.rewards for row in rows] == [[0, 0, 0, 0, 0.25], [0, 0, 0, 0, 1.0, 0, 2.0]]
    assert [row.step_ids for row in rows] == [[-1, -1, -1, 0, 0], [-1, -1, 1, 1, 1, -1, 2]]


@pytest.mark.parametrize(
    "second",
    [
        PROMPT + ACTION[:1],
        PROMPT + [99] + ACTION[1:] + RESULT,
        PROMPT + RESULT,
        [],
        PROMPT + ACTION[:1] + RESULT,
    ],
    ids=["shorter", "one token differs", "action dropped", "empty", "half of the action dropped"],
)
def test_a_context_that_does_not_extend_all_tokens_so_far_is_a_rewrite(second):
    assert len(trajectory_rows(trajectory_of((PROMPT, ACTION, 0.0), (second, ANSWER, 0.0)), 0)) == 2


def test_an_observation_may_add_nothing():
    """The policy simply goes on: still the same row, and two steps in it."""
    [row] = trajectory_rows(trajectory_of((PROMPT, ACTION, 0.0), (PROMPT + ACTION, ANSWER, 1.0)), 0)
    assert row.step_ids == [-1, -1, -1, 0, 0, 1, 1, 1]


def test_an_episode_without_a_sampled_token_has_no_row():
    assert trajectory_rows(trajectory_of(), 0) == []
    assert trajectory_rows(trajectory_of((PROMPT, [], 0.0)), 0) == []


def test_an_empty_turn_leaves_the_others_in_place():
    trajectory = trajectory_of(
        (PROMPT, ACTION, 0.5),
        (PROMPT + ACTION + RESULT, [], 0.0),
        (PROMPT + ACTION + RESULT, [7], 1.0),
    )
    [row] = trajectory_rows(trajectory, 0)
    assert row.rewards == [0, 0, 0, 0, 0.5, 0, 0, 1.0]


def test_an_outcome_behind_an_empty_turn_is_paid_to_the_last_token_that_was_chosen():
    """The outcome sits on the last step; had that one sampled nothing, running out of turns would
    cost nothing."""
    seen = PROMPT + ACTION + RESULT
    [row] = trajectory_rows(
        trajectory_of((PROMPT, ACTION, 0.5), (seen, [], 0.25), (seen + RESULT, [], -1.0)), 0
    )
    assert row.rewards == [0, 0, 0, 0, 0.5 + 0.25 - 1.0] + [0] * 4
    rows = trajectory_rows(
        trajectory_of((PROMPT, ACTION, 0.5), ([9], [], -1.0)), 0
    )  # the context was rewritten
    assert [r.rewards for r in rows] == [[0, 0, 0, 0, -0.5]]
    [row] = trajectory_rows(trajectory_of((PROMPT, [], -1.0), (PROMPT + RESULT, ACTION, 0.5)), 0)
    assert row.rewards == [0] * 6 + [-0.5]


# --------------------------------------------------------------------------------------- properties


@st.composite
def trajectories(draw):
    """Random episodes: each step appends to the context or rewrites it, and is paid something."""
    ids = st.lists(st.integers(1, 5), max_size=6)
    steps, context = [], []
    for _ in range(draw(st.integers(0, 5))):
        rewrite = draw(st.booleans())
        observation = draw(ids.filter(bool)) if rewrite or not context else context + draw(ids)
        action = draw(ids)
        steps.append((observation, action, draw(st.sampled_from([0.0, -0.2, 0.1, 1.0]))))
        context = observation + action
    trajectory = trajectory_of(*steps, group=draw(st.sampled_from(["g", "h"])))
    trajectory.stop_reason = draw(st.sampled_from(StopReason))
    return trajectory


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_rows_hold_exactly_what_was_sampled_and_paid(trajectory):
    rows = trajectory_rows(trajectory, 0)
    sampled = [i for s in trajectory.steps for i in s.action_ids]
    masked = [i for row in rows for i, m in zip(row.input_ids, row.action_mask, strict=True) if m]
    assert masked == sampled and sum(sum(row.action_mask) for row in rows) == len(sampled)
    logprobs = [x for row in rows for x, m in zip(row.logprobs, row.action_mask, strict=True) if m]
    assert logprobs == [x for s in trajectory.steps for x in s.action_logprobs]
    assert sum(sum(row.rewards) for row in rows) == pytest.approx(
        trajectory.reward if sampled else 0
    )
    for row in rows:
        assert {len(x) for x in (row.action_mask, row.logprobs, row.rewards, row.step_ids)} == {
            len(row.input_ids)
        }
        for mask, logprob, reward, step in zip(
            row.action_mask, row.logprobs, row.rewards, row.step_ids, strict=True
        ):
            assert (step >= 0) == bool(mask)
            assert mask or (
                logprob == 0 and reward == 0
            )  # never a reward on a token that nobody chose
        steps = [s for s in row.step_ids if s >= 0]
        assert steps == sorted(steps)


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_every_step_can_be_found_in_its_row(trajectory):
    """Up to a step's last action token, its row is exactly what the policy saw and did."""
    rows = trajectory_rows(trajectory, 0)
    for number, step in enumerate(trajectory.steps):
        if not step.action_ids:
            continue
        [row] = [row for row in rows if number in row.step_ids]
        end = len(row.step_ids) - row.step_ids[::-1].index(number)
        assert row.input_ids[:end] == step.observation_ids + step.action_ids
        if all(other.action_ids for other in trajectory.steps):
            assert row.rewards[end - 1] == step.reward
        assert row.step_ids.count(number) == len(step.action_ids)


# ------------------------------------------------------------------------------------------ batches

batches = st.lists(trajectories(), min_size=1, max_size=5).map(
    lambda ts: [row for i, t in enumerate(ts) for row in trajectory_rows(t, i)]
).filter(bool)  # fmt: skip


def test_a_batch_is_padded_with_nothing():
    rows = trajectory_rows(two_turns(), 0) + trajectory_rows(
        trajectory_of((PROMPT, ACTION, 0.5), group="h"), 1
    )
    batch = collate(rows)
    assert batch.ids_BT.tolist() == [
        [1, 2, 3, 10, 11, 4, 5, 12, 13, 14],
        [1, 2, 3, 10, 11, 0, 0, 0, 0, 0],
    ]
    assert batch.mask_BT.tolist()[1] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert batch.rewards_BT.tolist()[1] == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0]
    assert (
        batch.lengths_B.tolist() == [10, 5]
        and batch.trajectory_B.tolist() == [0, 1]
        and batch.groups == ["g", "h"]
    )
    assert (batch.ids_BT.dtype, batch.mask_BT.dtype) == (torch.int64, torch.float32)
    assert (batch.logprobs_BT.dtype, batch.rewards_BT.dtype) == (torch.float32, torch.float32)
    assert len(batch) == 2


def assert_same(a, b) -> None:
    for name, x in vars(a).items():
        y = getattr(b, name)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


@settings(deadline=None, max_examples=40)
@given(batches, st.randoms(use_true_random=False))
def test_permuting_rows_permutes_the_batch(rows, rng):
    order = rng.sample(range(len(rows)), len(rows))
    assert_same(collate([rows[i] for i in order]), collate(rows)[torch.tensor(order)])


@settings(deadline=None, max_examples=40)
@given(batches, st.data())
def test_some_rows_of_a_batch_are_the_batch_of_these_rows(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    assert_same(collate(rows)[torch.tensor(chosen)], collate([rows[i] for i in chosen]))


def test_a_batch_moves_as_a_whole():
    batch = collate(trajectory_rows(two_turns(), 0))
    assert_same(batch.to("cpu"), batch)
    assert all(
        t.device.type == "meta"
        for t in vars(batch.to("meta")).values()
        if isinstance(t, torch.Tensor)
    )
