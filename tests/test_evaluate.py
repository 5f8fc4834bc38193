"""Room 9, evaluation: the card by hand, the interval against published values, and the same answers
every time."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time

import numpy as np
import pytest
import torch
from conftest import ScriptedPolicy, call, make_env_loop, question_row, trajectory_of
from hypothesis import given
from hypothesis import strategies as st
from runs import CARD_KEYS, main
from safetensors.torch import load_file, save_file

from agent_r1.config.settings import EnvConfig
from agent_r1.core import StopReason, Trajectory
from agent_r1.env import HermesToolEnv
from agent_r1.evaluation.evaluate import (
    compare,
    eval_card,
    evaluate,
    mcnemar,
    paired_interval,
    prompt_hash,
    score_line,
    wilson_interval,
)
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.setup import make_loop


def done(
    em: float, f1: float, calls: int, invalid: int, turns: int, reason: StopReason, kind: str
) -> Trajectory:
    """A finished episode with these measurements."""
    metrics = {
        "em": em,
        "sub_em": max(em, 0.5),
        "f1": f1,
        "tool_calls": calls,
        "invalid_calls": invalid,
    }
    trajectory = trajectory_of(
        *[([1, 2], [3], 0.0)] * (turns - 1), ([1, 2], [3], em), metrics=metrics
    )
    trajectory.stop_reason, trajectory.row = reason, question_row(extra_info={"kind": kind})
    return trajectory


EPISODES = [
    done(1, 1.0, 2, 0, 3, StopReason.ANSWERED, "2-hop"),
    done(0, 0.5, 1, 1, 2, StopReason.ANSWERED, "2-hop"),
    done(1, 1.0, 0, 0, 1, StopReason.ANSWERED, "1-hop"),
    done(0, 0.0, 5, 0, 5, StopReason.MAX_TURNS, "2-hop"),
    done(0, 0.0, 0, 0, 1, StopReason.MAX_TOKENS, "1-hop"),
]


def card_of(episodes, **changes):
    facts = {
        "model": "m",
        "split": "test",
        "seed": 7,
        "retriever": "r",
        "start_time": time.perf_counter() - 2,
    } | changes
    return eval_card(episodes, **facts)


def test_the_card_by_hand():
    card = card_of(EPISODES)
    assert set(card) >= set(CARD_KEYS)
    assert (card["model"], card["dataset"], card["split"], card["n"], card["seed"]) == (
        "m",
        "test",
        "test",
        5,
        7,
    )
    assert card["em"] == pytest.approx(2 / 5) and card["f1"] == pytest.approx(2.5 / 5)
    assert card["sub_em"] == pytest.approx((1 + 0.5 + 1 + 0.5 + 0.5) / 5)
    assert card["em_ci95"] == pytest.approx(wilson_interval(0.4, 5))
    assert card["search_rate"] == pytest.approx(3 / 5)
    assert card["mean_turns"] == pytest.approx(12 / 5) and card["mean_tool_calls"] == pytest.approx(
        8 / 5
    )
    assert card["invalid_call_rate"] == pytest.approx(1 / 8)  # of calls, not of episodes
    assert card["truncated_rate"] == pytest.approx(2 / 5)
    assert card["stop_reasons"] == {"answered": 3, "max_turns": 1, "max_tokens": 1}
    assert (card["score_name"], card["score"], card["score_ci95"]) == (
        "em",
        card["em"],
        card["em_ci95"],
    )
    assert (
        card["reward"] == pytest.approx(2 / 5) and card["reward_ci95"] == card["em_ci95"]
    )  # each was paid 0 or 1
    third = pytest.approx(1 / 3)
    assert card["by_kind"] == {
        "1-hop": {"n": 2, "score": 0.5, "em": 0.5},
        "2-hop": {"n": 3, "score": third, "em": third},
    }
    assert card["retriever"] == "r" and card["wall_seconds"] >= 2
    bare = card_of([EPISODES[2]])  # no call to divide by
    assert (bare["invalid_call_rate"], bare["mean_tool_calls"], bare["search_rate"]) == (0, 0, 0)


def test_only_what_was_measured_stands_on_the_card():
    """Nothing is called EM that is none, and what an environment does not say is not an error."""
    bare = [
        trajectory_of(([1], [2], 0.25), ([1, 2, 3], [4], 0.5)),
        trajectory_of(([1], [2], -0.25)),
    ]
    card = card_of(bare)
    assert not {"em", "em_ci95", "sub_em", "f1"} & card.keys()
    assert (card["score_name"], card["score"]) == ("reward", pytest.approx(0.25))
    assert (
        card["mean_turns"],
        card["mean_tool_calls"],
        card["search_rate"],
        card["invalid_call_rate"],
    ) == (
        1.5,
        0,
        0,
        0,
    )
    assert card["by_kind"] == {"1-hop": {"n": 2, "score": pytest.approx(0.25)}}
    # 0.75 and -0.25: a mean of 0.25 with a standard error of 0.5.
    assert card["reward_ci95"] == card["score_ci95"] == pytest.approx([0.25 - 0.98, 0.25 + 0.98])
    assert score_line(card) == "reward 0.250 (95 % -0.730 to 1.230)"
    assert (
        card_of([bare[1], EPISODES[0]])["score_name"] == "reward"
    )  # EM of some of the episodes is not the EM
    failed = dataclasses.replace(bare[1], stop_reason=StopReason.ERROR)
    assert (
        card_of([EPISODES[0], failed])["em"] == 0.5
    )  # its environment broke down, so it is not right


def test_a_score_of_its_own_stands_before_the_reward_and_both_have_an_interval():
    """The mean reward before and after RL stood nowhere where an environment reports a score."""
    episodes = [
        trajectory_of(([1], [2], paid), metrics={"right": right})
        for paid, right in ((0.9, 1.0), (0.3, 0.0))
    ]
    for episode in episodes:
        episode.score_name = "right"
    card = card_of(episodes)
    assert (card["score_name"], card["score"], card["score_ci95"]) == (
        "right",
        0.5,
        wilson_interval(0.5, 2),
    )
    assert (
        score_line(card) == "right 0.500 (95 % 0.095 to 0.905), reward 0.600 (95 % 0.012 to 1.188)"
    )


def test_a_question_whose_environment_failed_counts_as_wrong():
    """Left out, a world that breaks on its hard questions would raise the score."""
    failed = trajectory_of(([1], [2], 0.0))
    failed.stop_reason = StopReason.ERROR
    card = card_of([EPISODES[0], failed])
    assert (card["n"], card["score_name"], card["score"], card["em"]) == (2, "em", 0.5, 0.5)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_has_the_published_values(right, n, low, high):
    assert wilson_interval(right / n, n) == pytest.approx([low, high], abs=6e-5)
    mirrored = wilson_interval(1 - right / n, n)
    assert mirrored == pytest.approx([1 - high, 1 - low], abs=6e-5)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_its_share_and_stays_a_share(case):
    right, n = case
    low, high = wilson_interval(right / n, n)
    assert (
        0 <= low <= right / n + 1e-9 and right / n - 1e-9 <= high <= 1 and high - low < 2 / n**0.5
    )


def test_the_prompt_hash_is_of_the_prompts_alone():
    a, b = (
        trajectory_of(([1, 2], [3], 0.0)),
        trajectory_of(([1, 2], [9, 9], 1.0), ([1, 2, 9, 9, 4], [5], 0.0)),
    )
    other, none = trajectory_of(([1, 3], [3], 0.0)), trajectory_of()
    assert prompt_hash([a]) == prompt_hash([b])
    assert len({prompt_hash(x) for x in ([a], [other], [a, other], [other, a], [none])}) == 5


# ---------------------------------------------------------------------------- running an evaluation


def test_every_question_is_played_once_and_comes_back_in_order(chat):
    rows = [question_row(f"Question {i}?", (str(i),)) for i in range(7)]

    def script(session, turn, prompt_ids):
        if turn == 0 and int(session.rpartition("-")[2]) % 2:
            return call(query="x")
        return f"<answer>{chat.decode(prompt_ids).partition('Question ')[2][0]}</answer>"

    policy = ScriptedPolicy(chat, script)
    finished = []
    loop = make_env_loop(
        policy,
        lambda row: HermesToolEnv({}, EnvConfig(max_invalid_calls=9)),
        max_tokens_per_turn=33,
    )
    trajectories = evaluate(loop, rows, temperature=0.25, seed=3, on_done=finished.append)
    assert [t.row for t in trajectories] == rows and len(finished) == 7
    assert all(t.metrics["em"] == 1 for t in trajectories)
    assert len({t.group_id for t in trajectories}) == 7
    samplings = [sampling for _, _, sampling in policy.seen]
    assert {(s.temperature, s.max_tokens) for s in samplings} == {(0.25, 33)}
    assert len({s.seed for s in samplings}) == len(samplings) == 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_evaluation_repeats_itself(micro, chat, cloned_model, temperature):
    def cards(slots, seed=0):
        policy = LocalPolicy(
            cloned_model, chat.stop_ids, slots=slots, max_context=micro.config.rollout.max_context
        )
        loop = make_loop(policy, chat, micro.tools, micro.config.rollout, micro.config.env)
        trajectories = evaluate(loop, micro.rows("val"), temperature=temperature, seed=seed)
        ids = [[s.action_ids for s in t.steps] for t in trajectories]
        return ids, {k: v for k, v in card_of(trajectories).items() if k != "wall_seconds"}

    (ids, card), (again, same), (other, _) = cards(8), cards(3), cards(8, seed=1)
    assert (ids, card) == (again, same)  # however many run side by side
    assert (other == ids) == (temperature == 0.0)


# ----------------------------------------------------------------------- any model, and two of them


@pytest.fixture(scope="module")
def models(micro_model, tmp_path_factory):
    """AGENT_R1_HOME with nothing in it, and two models: the cloned one, and one that is a little
    worse for noise."""
    root = tmp_path_factory.mktemp("models")
    worse = shutil.copytree(micro_model, root / "worse")
    weights, noise = load_file(worse / "model.safetensors"), torch.Generator().manual_seed(0)
    weights = {k: w + 0.05 * torch.randn(w.shape, generator=noise) for k, w in weights.items()}
    save_file(weights, worse / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(root / "home"))
        yield micro_model, worse


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The folder of one evaluation, and the words that made it. Read it, never change it."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    command = ("eval", "--model", str(models[0]), "--temperature", "1", "--out")
    assert main(*command, str(out)) == 0
    return out, command


def timeless(path):
    return {
        k: v
        for k, v in json.loads(path.read_text()).items()
        if k not in ("wall_seconds", "resumed")
    }


def test_a_model_is_evaluated_with_a_line_for_each_question(models, whole, capsys):
    card = json.loads((whole[0] / "1.json").read_text())
    assert set(card) >= set(CARD_KEYS)
    assert (card["n"], card["split"], card["temperature"], card["resumed"]) == (12, "test", 1, 0)
    records = [json.loads(line) for line in (whole[0] / "1.jsonl").read_text().splitlines()]
    assert sorted(int(r["group_id"]) for r in records) == list(range(12))
    assert sum(r["metrics"]["em"] for r in records) == pytest.approx(card["em"] * 12)
    assert (
        main("inspect", str(whole[0] / "1.jsonl"), "-i", "3") == 0
    )  # a rollouts file like any other
    capsys.readouterr()
    assert main("eval", "--model", str(models[0]), "--limit", "5", "--split", "val") == 0
    said = capsys.readouterr().out
    assert "5 val questions" in said and "EM " in said


@pytest.mark.parametrize("kept", [0, 7])
def test_an_evaluation_goes_on_where_it_was_killed(whole, tmp_path, kept):
    (out, command), torn = whole, tmp_path / "torn"
    shutil.copytree(out, torn)
    lines = (torn / "1.jsonl").read_text().splitlines(keepends=True)
    half = lines[kept][:100] if kept < len(lines) else ""  # kill -9 in the middle of a line
    (torn / "1.jsonl").write_text("".join(lines[:kept]) + half)
    (torn / "1.json").unlink()
    assert main(*command, str(torn)) == 0
    assert json.loads((torn / "1.json").read_text())["resumed"] == kept
    assert timeless(torn / "1.json") == timeless(out / "1.json")
    assert len((torn / "1.jsonl").read_text().splitlines()) == 12


def test_two_models_on_the_same_questions(models, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main("eval", "--model", str(models[0]), "--model", str(models[1]), "--out", str(out)) == 0
    )
    first, second = (json.loads((out / f"{i}.json").read_text()) for i in (1, 2))
    comparison = json.loads((out / "comparison.json").read_text())
    assert first["prompt_hash"] == second["prompt_hash"] and comparison["em"] == [
        first["em"],
        second["em"],
    ]
    assert comparison["difference"] == pytest.approx(second["em"] - first["em"])
    assert "McNemar p =" in capsys.readouterr().out
    assert main("eval", *["--model", str(models[0])] * 3) == 2


def test_a_comparison_by_hand():
    first, second = [1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0, 1, 1]
    result = compare(first, second)
    assert (result["n"], result["only_first"], result["only_second"]) == (8, 1, 4)
    assert result["em"] == [3 / 8, 6 / 8] and result["difference"] == 3 / 8
    assert result["p_mcnemar"] == pytest.approx(2 * (1 + 5) / 2**5)
    centre, variance = 3 / 10, (6 / 10 - 0.3**2) / 10
    assert result["ci95"] == pytest.approx(
        [centre - 1.96 * variance**0.5, centre + 1.96 * variance**0.5]
    )


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_symmetric_and_a_probability(b, c):
    p = mcnemar(b, c)
    assert 0 < p <= 1 and p == mcnemar(c, b)
    assert mcnemar(max(b, c) + 2, min(b, c)) < p or p == 1  # more on one side is stronger evidence


def test_the_paired_interval_covers_what_it_says():
    """1,000 draws of 150 questions: 95 % intervals hold the true difference in about 95 % of
    them."""
    draws = np.random.default_rng(0).multinomial(150, [0.08, 0.2, 0.72], size=1000).tolist()
    hits = sum(
        low <= 0.12 <= high for low, high in (paired_interval(b, c, 150) for b, c, _ in draws)
    )
    assert 930 <= hits <= 970
    assert paired_interval(0, 150, 150)[1] <= 1 and sum(paired_interval(9, 9, 50)) == pytest.approx(
        0
    )
