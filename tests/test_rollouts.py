"""The episodes of a step: the greedy ones of remax, and what a further round asks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import question_row
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import letters_run

from agent_r1.config.settings import RolloutConfig
from agent_r1.core import Step, StopReason, Trajectory
from agent_r1.rollout.rollouts import GREEDY, Greedy, Rollouts, tasks_of_step
from agent_r1.rollout.sampler import SamplerStats
from agent_r1.rollout.training_rows import collate, trajectory_rows
from agent_r1_recipes.credit.estimators import BASELINE


class Recorded(Rollouts):
    """Two prompts of two samples; the greedy ones are given."""

    def __init__(self, greedy: list[Trajectory]):
        self.greedy, self.policy = greedy, LocalPolicyStats()

    def episodes(self, step, again=0, prompts=None, *, samples=None, greedy=False):
        if greedy:
            assert samples == 1
            return self.greedy
        return [
            Trajectory([Step([1], [2], [-1.0])], group, StopReason.ANSWERED, {}) for group in "aabb"
        ]


class LocalPolicyStats:
    stats = SamplerStats()


def test_the_greedy_baseline_is_what_the_episode_was_paid_less_its_penalty():
    """Right and malformed: EM 1, and a reward of 0.8, which is what the samples are paid by. The
    other was broken off."""
    greedy = [
        Trajectory(
            [Step([1], [2], [-1.0], 0.8)],
            "a",
            StopReason.ANSWERED,
            {},
            metrics={"em": 1.0},
            score_name="em",
        ),
        Trajectory([Step([1], [2], [-1.0], 0.5)], "b", StopReason.TIME_OUT, {}),
    ]
    assert greedy[0].score == 1.0
    played = Greedy(Recorded(greedy)).play(1)
    assert [t.extra[GREEDY] for t in played.chosen] == pytest.approx(
        [0.8, 0.8, np.nan, np.nan], nan_ok=True
    )
    assert greedy[0] not in played.played
    rows = [row for n, t in enumerate(played.chosen) for row in trajectory_rows(t, n, [BASELINE])]
    baseline_B = collate(rows, columns=[BASELINE]).columns["baseline_B"]
    torch.testing.assert_close(baseline_B, torch.tensor([0.8, 0.8, np.nan, np.nan]), equal_nan=True)


def test_the_entropy_is_that_of_sampled_episodes(chat, monkeypatch):
    """remax also plays greedy episodes, and from one start model both algorithms sample the same
    ones."""
    remax, rloo = (
        letters_run(chat, monkeypatch, name, "trainer.steps=1").metrics[0]
        for name in ("remax", "rloo")
    )
    assert (
        remax["actor/entropy"] == rloo["actor/entropy"]
        and remax["rollout/decode_tokens"] > rloo["rollout/decode_tokens"]
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 40), st.integers(1, 30), st.integers(0, 3))
def test_the_rounds_of_a_step_ask_different_questions_under_different_names(n, step, seed):
    rollout = RolloutConfig(prompts_per_step=4, samples_per_prompt=2)
    questions = [question_row(f"Say {i}.") for i in range(n)]
    rounds = [tasks_of_step(questions, step, rollout, seed, again) for again in range(4)]
    first, *later = [[task.row["prompt"][0]["content"] for task in tasks] for tasks in rounds]
    asked = [text for texts in later for text in texts[::2]]
    assert len(set(asked)) == len(asked) == min(12, n - len(set(first))) and not set(asked) & set(
        first
    )
    tasks = sum(rounds, [])
    groups = {task.group_id: task.row["prompt"][0]["content"] for task in tasks}
    assert len(groups) == len(tasks) // 2 and all(
        groups[t.group_id] == t.row["prompt"][0]["content"] for t in tasks
    )
    assert len({task.session for task in tasks}) == len({task.seed for task in tasks}) == len(tasks)
    assert rounds == [tasks_of_step(questions, step, rollout, seed, again) for again in range(4)]
