"""Room 5: dynamic sampling replaces groups that agree, within its budget."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from letters import SilentEnv, letters_run

from agent_r1 import ConfigError, Step, StopReason, Trajectory, load_config
from agent_r1_recipes.credit.dynamic_sampling import play_until_full


def group(name: str, scores: list[float]) -> list[Trajectory]:
    return [
        Trajectory([Step([1], [2], [-1.0], score)], name, StopReason.ANSWERED, {})
        for score in scores
    ]


@given(st.integers(1, 5), st.integers(0, 3), st.data())
def test_the_batch_is_full_and_groups_that_differ_come_first(prompts, rounds, data):
    asked = []

    def play(number, n):
        asked.append(n)
        kinds = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        return [
            t
            for p, differ in enumerate(kinds)
            for t in group(f"{number}-{p}", [0.3, 1.0 if differ else 0.3])
        ]

    batch, played = play_until_full(play, prompts, rounds)
    groups = {t.group_id: set() for t in batch}
    for t in batch:
        groups[t.group_id].add(t.reward)
    differ = {t.group_id for t in played if t.reward == 1.0}
    assert len(batch) == 2 * prompts and len(groups) == prompts
    assert sum(len(scores) > 1 for scores in groups.values()) == min(prompts, len(differ))
    assert len(asked) <= rounds + 1 and asked[0] == prompts and all(n > 0 for n in asked)
    assert [t for t in played if t.group_id in groups] == batch
    if len(differ) < prompts:  # only an exhausted budget leaves groups that agree
        assert len(asked) == rounds + 1


def test_an_episode_that_failed_decides_nothing():
    """Its reward is no judgement, so a group in which it alone differs has nothing to teach."""
    cut_off = Trajectory([Step([1], [2], [-1.0], 0.0)], "0-0", StopReason.TIME_OUT, {})
    rounds = [[*group("0-0", [0.3, 0.3]), cut_off], group("1-0", [0.3, 0.3, 1.0])]
    batch, played = play_until_full(lambda number, n: rounds[number], 1, 1)
    assert {t.group_id for t in batch} == {"1-0"} and len(played) == 6


def test_a_run_has_fewer_rows_without_advantage(chat, monkeypatch):
    few = [
        "trainer.steps=4",
        "rollout.samples_per_prompt=2",
        "rollout.prompts_per_step=4",
        "actor.lr=0.001",
    ]
    plain = letters_run(chat, monkeypatch, "grpo", *few).metrics
    filled = letters_run(
        chat, monkeypatch, "grpo", *few, "rollout.dynamic_sampling_rounds=3", count=16
    ).metrics
    assert sum(m["groups/zero_advantage"] for m in filled) < sum(
        m["groups/zero_advantage"] for m in plain
    )
    assert all(8 <= m["rollout/episodes_played"] <= 4 * 8 for m in filled)
    few = ["trainer.steps=1", "rollout.dynamic_sampling_rounds=2"]
    silent = letters_run(chat, monkeypatch, "grpo", *few, env=SilentEnv, count=12).metrics
    assert (
        silent[0]["rollout/episodes_played"] == 3 * 16 and silent[0]["groups/zero_advantage"] == 1
    )
    silent = letters_run(chat, monkeypatch, "grpo", *few, env=SilentEnv, count=5).metrics
    assert silent[0]["rollout/episodes_played"] == 5 * 8  # no question is left to be asked


def test_what_is_reported_is_what_was_played(chat, monkeypatch):
    """The chosen groups are the undecided ones: their score is nearer to a half."""
    run = letters_run(chat, monkeypatch, "grpo", "trainer.steps=2", "rollout.samples_per_prompt=2",
                      "rollout.dynamic_sampling_rounds=2",
                      "rollout.prompts_per_step=4", count=12)  # fmt: skip
    for metrics, played, batch in zip(run.metrics, run.trajectories, run.batches, strict=True):
        assert metrics["rollout/episodes_played"] == len(played) > 8
        assert metrics["critic/score/mean"] == pytest.approx(fmean(t.reward for t in played))
        assert metrics["rollout/score_chosen"] == pytest.approx(
            fmean(t.reward for t in batch.trajectories)
        )
        tokens = [sum(len(step.action_ids) for step in t.steps) for t in played]
        assert metrics["response_length/mean"] == pytest.approx(fmean(tokens))
    assert run.metrics[0]["critic/score/mean"] != pytest.approx(
        run.metrics[0]["rollout/score_chosen"], abs=0.01
    )


def test_where_it_means_nothing_it_is_refused():
    with pytest.raises(
        ConfigError,
        match="^rollout.dynamic_sampling_rounds replaces groups that agree, and ppo has none",
    ):
        load_config("smoke", ["rollout.dynamic_sampling_rounds=1"], algorithm="ppo")
    with pytest.raises(
        ConfigError, match="^rollout.dynamic_sampling_rounds requires --engine local"
    ):
        load_config("smoke", ["rollout.dynamic_sampling_rounds=1", "engine=verl"], algorithm="grpo")
