"""The stair of a race: episodes to a validation, exact tests over pairs, and Holm's correction."""

import json
import math

import pytest
from conftest import fails_with

from agent_r1 import load_config
from agent_r1_recipes.race.stair import (
    Climb,
    Stair,
    climb,
    compare_climbs,
    compare_stair,
    half_of_median,
    holm,
    mcnemar,
    print_stair,
)

THREE = "val-aux/tinyhop/3-hop/acc/mean@1"


def made(*episodes):
    return [Climb(count, count / 10, [(100, 0.5)], 20.0) for count in episodes]


def test_a_stair_is_a_kind_and_a_share():
    stair = Stair.parse("3-hop >= .5")
    assert (stair.kind, stair.level, str(stair)) == ("3-hop", 0.5, "3-hop >= 0.5")
    assert stair.score({"val-aux/tinyhop/13-hop/acc/mean@1": 1.0, THREE: 0.25}) == 0.25
    assert stair.score({"val-core/tinyhop/acc/mean@1": 1.0}) is None
    assert Stair.parse("all>=1").score({"val-core/tinyhop/acc/mean@1": 0.75, THREE: 0.0}) == 0.75


@pytest.mark.parametrize("text", ["3-hop", "3-hop>.5", "3-hop>=0", "all>=1.5", ">=.5", ""])
def test_another_form_is_refused(text):
    with fails_with("wrong_type"):
        Stair.parse(text)


def write(folder, *lines):
    folder.mkdir()
    text = "".join(json.dumps({"timing_s/step": 2.0} | line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_the_first_validation_at_the_level_counts(tmp_path):
    """Steps of 96 episodes; a later fall changes nothing."""
    config = load_config("small")
    run = write(tmp_path / "a", {}, {THREE: 0.4}, {}, {THREE: 0.5}, {}, {THREE: 0.3})
    found = climb(run, Stair("3-hop", 0.5), config, 96)
    assert (found.episodes, found.seconds, found.training_seconds) == (4 * 96, 8.0, 12.0)
    assert found.scores == [(192, 0.4), (384, 0.5), (576, 0.3)]
    never = climb(run, Stair("3-hop", 0.6), config, 96)
    assert math.isinf(never.episodes) and never.record()["episodes"] is None
    with fails_with("unknown_name", "a has no validation of 4-hop"):
        climb(run, Stair("4-hop", 0.5), config, 96)


def test_replaced_groups_and_greedy_episodes_count(tmp_path):
    run = write(tmp_path / "a", {"rollout/episodes_played": 150.0}, {THREE: 1.0})
    assert climb(run, Stair("3-hop", 0.5), load_config("small"), 96).episodes == 150 + 96
    remax = load_config("small", algorithm="remax")
    # 12 prompts a step: 12 greedy episodes.
    assert climb(run, Stair("3-hop", 0.5), remax, 108).episodes == 150 + 12 + 108


def test_mcnemar_by_hand():
    """One of five pairs against: (1 + 5) / 32, twice. Eight to none: 2 / 256."""
    assert mcnemar(1, 4) == mcnemar(4, 1) == 2 * 6 / 32
    assert mcnemar(0, 8) == 2 / 256
    assert mcnemar(3, 3) == mcnemar(0, 0) == 1.0


def test_holm_by_hand():
    """.01 x 3, .03 x 2, and .04 x 1, which may not be less than the one before."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


def test_pairs_by_hand():
    first = made(800, 1600, math.inf, math.inf)
    other = made(400, 1600, 1600, math.inf)
    result = compare_climbs(first, other, deadline=800)
    assert result["within the deadline"] == {"only first": 0, "only other": 0, "p": 1.0}
    assert result["ever"] == {"only first": 0, "only other": 1, "p": 1.0}
    assert result["sooner"] == {"only first": 0, "only other": 2, "p": 0.5}
    result = compare_climbs(first, other, deadline=700)
    assert (result["within the deadline"]["only other"]) == 1


def test_a_deadline_is_half_of_the_median():
    assert half_of_median(made(400, 800, 1200), 3000) == 400
    # Of an even number, the later of the two in the middle.
    assert half_of_median(made(400, 800), 3000) == 400
    assert half_of_median(made(400, math.inf, math.inf), 3000) == 1500


def test_one_test_is_primary_and_the_others_are_corrected(capsys):
    climbs = {
        "grpo": dict(enumerate(made(*[1600] * 8))),
        "gigpo": dict(enumerate(made(*[800] * 8))),
    }
    figures = compare_stair(Stair("3-hop", 0.5), climbs, budget=3200)
    tests = figures["tests"]
    assert figures["deadline"] == 800
    assert tests["gigpo, within the deadline"] == {
        "only first": 0, "only other": 8, "p": 2 / 256, "pairs": 8,
    }  # fmt: skip
    assert tests["gigpo, sooner"]["p (Holm)"] == 2 * 2 / 256
    assert tests["gigpo, ever"]["p (Holm)"] == 1.0
    print_stair(figures)
    out = capsys.readouterr().out
    assert "gigpo, within the deadline: 8 pairs for it, 0 against, of 8; p 0.0078\n" in out
    assert "gigpo, sooner: 8 pairs for it, 0 against, of 8; p 0.0156 (Holm)" in out
    assert "reached by 8 of 8, median 1,600 episodes" in out
    # A seed without a partner is no pair, and with three arms every test is corrected.
    climbs["gigpo"][9] = made(100)[0]
    climbs["ppo"] = dict(enumerate(made(*[math.inf] * 8)))
    tests = compare_stair(Stair("3-hop", 0.5), climbs, budget=3200)["tests"]
    assert tests["gigpo, within the deadline"]["pairs"] == 8
    assert tests["gigpo, within the deadline"]["p (Holm)"] == pytest.approx(6 * 2 / 256)
    json.dumps(figures, allow_nan=False)


def test_an_arm_without_runs_is_named(capsys):
    figures = compare_stair(Stair("all", 0.5), {"grpo": {0: made(96)[0]}, "ppo": {}}, 960)
    print_stair(figures)
    assert "ppo                              no finished run" in capsys.readouterr().out
    assert compare_stair(Stair("all", 0.5), {"grpo": {}, "ppo": {}}, 960)["tests"] == {}
