"""Room 5: dynamic sampling replaces groups that agree, within its budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loop import SilentEnv, letters_run

from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.rollout.refill import play_until_full
from agent_r1.types import Step, StopReason, Trajectory


def group(name: str, scores: list[float]) -> list[Trajectory]:
    return [Trajectory([Step([1], [2], [-1.0], score)], name, StopReason.ANSWERED, {}) for score in scores]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.data())
def test_the_batch_is_full_and_groups_that_differ_come_first(prompts, rounds, data):
    asked = []

    def play(number, n):
        asked.append(n)
        kinds = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        return [t for p, differ in enumerate(kinds) for t in group(f"{number}-{p}", [0.3, 1.0 if differ else 0.3])]

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


def test_a_run_has_fewer_rows_without_advantage(chat, monkeypatch):
    few = ["trainer.steps=4", "rollout.samples_per_prompt=2", "rollout.prompts_per_step=4", "actor.lr=0.001"]
    plain = letters_run(chat, monkeypatch, "grpo", *few).metrics
    filled = letters_run(chat, monkeypatch, "grpo", *few, "rollout.refill_rounds=3").metrics
    assert sum(m["groups/zero_advantage"] for m in filled) < sum(m["groups/zero_advantage"] for m in plain)
    assert all(8 <= m["rollout/episodes_played"] <= 4 * 8 for m in filled)
    silent = letters_run(chat, monkeypatch, "grpo", "trainer.steps=1", "rollout.refill_rounds=2", env=SilentEnv).metrics
    assert silent[0]["rollout/episodes_played"] == 3 * 16 and silent[0]["groups/zero_advantage"] == 1


def test_where_it_means_nothing_it_is_refused():
    with pytest.raises(ConfigError, match="^rollout.refill_rounds replaces groups that agree, and ppo has none"):
        load_config("smoke", ["rollout.refill_rounds=1"], algorithm="ppo")
    with pytest.raises(ConfigError, match="^rollout.refill_rounds works with --engine local"):
        load_config("smoke", ["rollout.refill_rounds=1", "engine=verl"], algorithm="grpo")
