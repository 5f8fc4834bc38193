"""Room 9, evaluation: the card by hand, the interval against published values, and the same answers every time."""

from __future__ import annotations

import time

import pytest
from conftest import ScriptedPolicy, call, make_env_loop, question_row, trajectory_of
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.config import EnvConfig
from agent_r1.env import HermesToolEnv
from agent_r1.inference.evaluate import eval_card, evaluate, prompt_hash, wilson_interval
from agent_r1.rollout.engine import LocalPolicy
from agent_r1.rollout.episode import make_loop
from agent_r1.rollout.types import StopReason, Trajectory

KEYS = {
    "model", "dataset", "split", "n", "seed", "em", "em_ci95", "sub_em", "f1", "search_rate", "mean_turns",
    "mean_tool_calls", "invalid_call_rate", "truncated_rate", "stop_reasons", "retriever", "prompt_hash", "wall_seconds",
}  # fmt: skip
"""DESIGN.md, section 3."""


def done(em: float, f1: float, calls: int, invalid: int, turns: int, reason: StopReason, kind: str) -> Trajectory:
    """A finished episode with these measurements."""
    metrics = {
        "em": em,
        "sub_em": max(em, 0.5),
        "f1": f1,
        "tool_calls": calls,
        "invalid_calls": invalid,
        "turns": turns,
    }
    trajectory = trajectory_of(([1, 2], [3], em), metrics=metrics)
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
    facts = {"model": "m", "split": "test", "seed": 7, "retriever": "r", "started": time.perf_counter() - 2} | changes
    return eval_card(episodes, **facts)


def test_the_card_by_hand():
    card = card_of(EPISODES)
    assert set(card) >= KEYS
    assert (card["model"], card["dataset"], card["split"], card["n"], card["seed"]) == ("m", "test", "test", 5, 7)
    assert card["em"] == pytest.approx(2 / 5) and card["f1"] == pytest.approx(2.5 / 5)
    assert card["sub_em"] == pytest.approx((1 + 0.5 + 1 + 0.5 + 0.5) / 5)
    assert card["em_ci95"] == pytest.approx(wilson_interval(0.4, 5))
    assert card["search_rate"] == pytest.approx(3 / 5)
    assert card["mean_turns"] == pytest.approx(12 / 5) and card["mean_tool_calls"] == pytest.approx(8 / 5)
    assert card["invalid_call_rate"] == pytest.approx(1 / 8)  # of calls, not of episodes
    assert card["truncated_rate"] == pytest.approx(2 / 5)
    assert card["stop_reasons"] == {"answered": 3, "max_turns": 1, "max_tokens": 1}
    assert card["by_kind"] == {"1-hop": {"n": 2, "em": 0.5}, "2-hop": {"n": 3, "em": pytest.approx(1 / 3)}}
    assert card["retriever"] == "r" and 2 <= card["wall_seconds"] < 10


def test_a_card_without_any_call_divides_by_nothing():
    card = card_of([EPISODES[2]])
    assert (card["invalid_call_rate"], card["mean_tool_calls"], card["search_rate"]) == (0, 0, 0)


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
    assert 0 <= low <= right / n + 1e-9 and right / n - 1e-9 <= high <= 1 and high - low < 2 / n**0.5


def test_the_prompt_hash_is_of_the_prompts_alone():
    a, b = trajectory_of(([1, 2], [3], 0.0)), trajectory_of(([1, 2], [9, 9], 1.0), ([1, 2, 9, 9, 4], [5], 0.0))
    other, none = trajectory_of(([1, 3], [3], 0.0)), trajectory_of()
    assert prompt_hash([a]) == prompt_hash([b])
    assert len({prompt_hash(x) for x in ([a], [other], [a, other], [other, a], [none])}) == 5


# ----------------------------------------------------------------------------------------------- running an evaluation


def test_every_question_is_played_once_and_comes_back_in_order(chat):
    rows = [question_row(f"Question {i}?", (str(i),)) for i in range(7)]

    def script(session, turn, prompt_ids):
        if turn == 0 and int(session.rpartition("-")[2]) % 2:
            return call(query="x")
        return f"<answer>{chat.decode(prompt_ids).partition('Question ')[2][0]}</answer>"

    policy = ScriptedPolicy(chat, script)
    finished = []
    loop = make_env_loop(policy, lambda row: HermesToolEnv({}, EnvConfig(max_invalid_calls=9)), max_tokens_per_turn=33)
    trajectories = evaluate(loop, rows, temperature=0.25, seed=3, on_done=finished.append)
    assert [t.row for t in trajectories] == rows and len(finished) == 7
    assert all(t.metrics["em"] == 1 for t in trajectories)
    assert len({t.group_id for t in trajectories}) == 7
    samplings = [sampling for _, _, sampling in policy.seen]
    assert {(s.temperature, s.top_p, s.max_tokens) for s in samplings} == {(0.25, 1.0, 33)}
    assert len({s.seed for s in samplings}) == len(samplings) == 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_evaluation_repeats_itself(micro, chat, cloned_model, temperature):
    def cards(slots, seed=0):
        policy = LocalPolicy(cloned_model, chat.stop_ids, slots=slots, max_context=micro.config.rollout.max_context)
        loop = make_loop(policy, chat, micro.tools, micro.config)
        trajectories = evaluate(loop, micro.rows("val"), temperature=temperature, seed=seed)
        ids = [[s.action_ids for s in t.steps] for t in trajectories]
        return ids, {k: v for k, v in card_of(trajectories).items() if k != "wall_seconds"}

    (ids, card), (again, same), (other, _) = cards(8), cards(3), cards(8, seed=1)
    assert (ids, card) == (again, same)  # however many run side by side
    assert (other == ids) == (temperature == 0.0)
