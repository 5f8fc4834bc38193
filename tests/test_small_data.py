"""Clone few demonstrations without learning them by heart, and probe a start before RL."""

from __future__ import annotations

import re

import pytest
import runs
import small_task
import torch
from conftest import fails_with, question_row

from agent_r1.app import stages
from agent_r1.cold_start import clone, demonstrate, probe
from agent_r1.cold_start import stage as cold_start
from agent_r1.cold_start.demonstrate import Demonstration
from agent_r1.config import load_config
from agent_r1.core import Step, StopReason, Trajectory
from agent_r1.env.hermes import Hermes
from agent_r1.rollout.training_rows import TrainingRow
from agent_r1.workspace import Workspace

CONFIG = load_config("small", ["env.tools=[]"], algorithm="grpo")


def probe_of(rewards, em=None):
    """Summarize groups with these rewards; the answers' exact match is `em`, or the reward."""
    trajectories = []
    for g, group in enumerate(rewards):
        for reward in group:
            metrics = {"em": reward if em is None else em}
            row = question_row("q", ("a",))
            steps = [Step([1], [2], [0.0], reward)]
            trajectory = Trajectory(steps, f"{g}", StopReason.ANSWERED, row, metrics=metrics)
            trajectories.append(trajectory)
    return probe.summarize(trajectories, len(rewards[0]), entropy=0.001)


def test_three_starts_that_teach_nothing_are_told_apart():
    right = probe_of([[1.0] * 4] * 64)
    assert "nothing left to learn" in probe.warning_or_refusal(right, CONFIG)
    with fails_with("start_all_wrong", "cold_start.copy_steps=300"):
        probe.warning_or_refusal(probe_of([[0.0] * 4] * 64), CONFIG)
    memorised = probe_of([[1.0] * 4, [0.0] * 4] * 32)
    with fails_with("start_all_equal", "rollout.temperature"):
        probe.warning_or_refusal(memorised, CONFIG)
    with fails_with("start_all_equal", "cold_start.plays"):
        probe.warning_or_refusal(memorised, CONFIG)


def test_a_start_with_something_to_compare_is_not_refused():
    healthy = probe_of([[1.0, 0.0, 0.0, 1.0], [0.0] * 4] * 32)
    assert healthy.equal == 0.5 and probe.warning_or_refusal(healthy, CONFIG) == ""


@pytest.mark.parametrize(("preset", "differing", "refused"), [
    ("discover", 1, True), ("discover", 2, False), ("discover", 3, False),  # 32 groups a step
    ("small", 3, True), ("small", 4, False),  # 12 groups a step
])  # fmt: skip
def test_a_start_is_refused_if_a_step_has_less_than_one_group_to_compare(
    preset, differing, refused
):
    agreeing = [[0.0] * 4] * (64 - differing)
    start = probe_of([[1.0, 0.0, 0.0, 0.0]] * differing + agreeing)
    config = load_config(preset, algorithm="grpo")
    if refused:
        with fails_with("start_all_equal"):
            probe.warning_or_refusal(start, config)
    else:
        assert "have anything to compare" in probe.warning_or_refusal(start, config)


def test_penalties_for_the_form_are_nothing_to_learn_an_answer_from():
    form_only = probe_of([[0.0, -0.2, 0.0, -0.2]] * 64, em=0.0)
    with fails_with("start_all_wrong"):
        probe.warning_or_refusal(form_only, CONFIG)
    calls = load_config("small", ["env.call_reward=0.1"], algorithm="grpo")
    assert probe.warning_or_refusal(form_only, calls) == ""


def test_dynamic_sampling_is_warned_and_not_refused():
    refills = load_config("small", ["rollout.dynamic_sampling_rounds=4"], algorithm="grpo")
    memorised = probe_of([[1.0] * 4, [0.0] * 4] * 32)
    assert "dynamic sampling" in probe.warning_or_refusal(memorised, refills)


def test_a_probe_has_64_groups_also_of_few_questions():
    rows = [question_row(str(i), ("a",)) for i in range(5)]
    tasks = probe.probe_tasks(rows, 64, 8, seed=0)
    assert len(tasks) == 512 and len({task.group_id for task in tasks}) == 64
    assert len({task.seed for task in tasks}) == 512


def test_few_questions_are_played_several_times_and_some_are_held_out():
    assert demonstrate.plays_per_question(0, 200) == 5
    assert demonstrate.plays_per_question(0, 20) == 8
    assert demonstrate.plays_per_question(0, 1200) == 1
    assert demonstrate.plays_per_question(3, 1200) == 3
    few = [Demonstration([], None, question=str(i % 200)) for i in range(1000)]
    assert len(demonstrate.held_out_questions(few, 0)) == 20
    many = [Demonstration([], None, question=str(i)) for i in range(1200)]
    assert demonstrate.held_out_questions(many, 0) == set()
    five = [Demonstration([], None, question=str(i)) for i in range(5)]
    assert len(demonstrate.held_out_questions(five, 0)) == 1


def test_the_best_plays_become_four_of_five_and_are_added_three_times_at_most():
    assert demonstrate.repeats_of_best(best=610, total=1000) == 2
    share = (610 + 2 * 610) / (1000 + 2 * 610)
    assert share == pytest.approx(demonstrate.BEST_SHARE, abs=0.03)
    assert demonstrate.repeats_of_best(best=100, total=1000) == demonstrate.MOST_REPEATS == 3
    assert demonstrate.repeats_of_best(best=850, total=1000) == 0
    assert demonstrate.repeats_of_best(best=1000, total=1000) == 0


def test_few_demonstrations_are_cloned_with_more_weight_decay(monkeypatch, tmp_path):
    """Keep the weight decay of many demonstrations, and so the shipped starts."""
    decays = []

    def record(model, phase, *others):
        decays.append(phase.weight_decay)
        return clone.Ending(0)

    monkeypatch.setattr(cold_start, "clone", record)
    row = TrainingRow(0, "0", [1, 2, 3], [0, 0, 1], [0.0] * 3, [0.0] * 3, [0] * 3)
    chat = cold_start.byte_chat()
    config = load_config("small", ["cold_start.episodes=x.jsonl"])
    for held in ([], [row]):
        lesson = clone.Lesson([row], held)
        lessons = cold_start.Lessons(chat, copy=lesson, mix=lesson)
        monkeypatch.setattr(cold_start, "own_demonstrations", lambda *arguments, it=lessons: it)
        cold_start._teach(Workspace(config, tmp_path), tmp_path / f"model{len(held)}")
    assert decays == [0.01, 0.01, 3.0, 1.0]


def test_plays_of_a_demonstrator_without_chance_are_cloned_once(monkeypatch):
    rows = [question_row(str(i), ("1",)) for i in range(4)]

    def play(function, plays):
        monkeypatch.setattr(demonstrate.plugins, "load_trusted", lambda name, setting: function)
        return demonstrate.play_demonstrations(
            "f.py:f", rows, {}, CONFIG.rollout, CONFIG.env, 0, plays
        )

    assert len(play(lambda row, history: Hermes.answer("1"), 5)) == 4
    episodes = play(lambda row, history, rng: Hermes.answer(str(rng.randrange(2))), 5)
    assert len(episodes) == 20 and 0 < sum(e.score for e in episodes) < 20
    best = demonstrate.best_plays(episodes)
    assert best == {i for i, episode in enumerate(episodes) if episode.score == 1.0}


def test_cloning_stops_where_held_out_demonstrations_get_worse():
    """Held-out rows contradict the cloned ones, so the held-out loss rises from the first look."""
    from agent_r1.cold_start.tiny_model import new_model

    settings = CONFIG.model.model_copy(
        update={"hidden_size": 32, "heads": 2, "kv_heads": 2, "intermediate_size": 48}
    )
    model = new_model(settings, 20, seed=0)

    def row(i, token):
        return TrainingRow(i, str(i), [1, 2, 3, token], [0, 0, 0, 1], [0.0] * 4, [0.0] * 4, [0] * 4)

    contradiction = clone.Lesson([row(i, 6) for i in range(16)], [row(0, 5)])
    phase = clone.Phase("mix", contradiction, 400, 64, 1e-2)
    end = clone.clone(model, phase, 0, lambda step, loss: None)
    assert end.steps <= clone.CHECK_EVERY * (clone.PATIENCE + 2)
    # The best weights are back: the same look finds the best loss again.
    again = clone.HeldOut(contradiction.held_out, phase.tokens)
    again.look(model, torch.float32)
    assert again.best_loss == end.held_out_loss < float("inf")


@pytest.mark.parametrize(
    "price",
    ["env.call_reward=0.1", "env.format_penalty=0.1", "env.evidence_reward=0.1",
     "env.judge_max_tokens=8"],
)  # fmt: skip
def test_prices_do_not_make_the_cold_start_again(price):
    plain = Workspace(load_config("small", [])).cold_start
    assert Workspace(load_config("small", [price])).cold_start == plain


def test_a_judge_and_its_address_do_not_make_the_cold_start_again():
    plain = Workspace(load_config("small", [])).cold_start
    judge = ["env.reward=judge", "env.judge_url=http://127.0.0.1:9/v1"]
    assert Workspace(load_config("small", judge)).cold_start == plain
    assert Workspace(load_config("small", ["env.max_turns=3"])).cold_start != plain


def test_ctrl_c_during_the_cold_start_says_what_is_kept(monkeypatch, tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cold_start, "_teach", interrupted)
    with pytest.raises(KeyboardInterrupt, match="keeps no checkpoint.*data and index are kept"):
        stages.make_cold_start(Workspace(load_config("small", []), tmp_path))


def test_few_questions_are_played_often_and_held_out_by_default(tmp_path, monkeypatch, capsys):
    """Make the cold start of tests/small_task.py with its default settings, but for its length.

    `make long PART=small_task` trains it to the end, with 300 questions and on three seeds.
    """
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    of_train = ("--plain", "--run=small")
    words = [word for word in small_task.write(tmp_path, 60) if word not in of_train]
    short = ["cold_start.copy_steps=2", "cold_start.mix_steps=2", "cold_start.probe=0"]
    assert runs.main("data", *words) == 0
    assert runs.main("cold-start", *words, *short) == 0
    said = capsys.readouterr().out
    assert "copy: 2 of 2 steps, held-out loss" in said and "mix: 2 of 2 steps, held-out" in said
    best, all_plays = map(int, re.search(r"(\d+) \+ (\d+) demonstrations", said).groups())
    # 8 of the 40 training questions are held out. The others are played 8 times each, and their
    # best plays are there up to three times more.
    assert 32 <= best < 32 * 8 < all_plays <= 32 * 8 + 3 * best
