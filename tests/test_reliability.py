"""Check pass@k and pass^k, their samples and intervals, and the plan of a comparison."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from statistics import fmean, variance

import numpy as np
import pytest
from conftest import fails_with, question_row, trajectory_of
from lab.rehearsals.coverage import DIFFICULTIES, covered
from runs import main

from agent_r1.core import StopReason
from agent_r1.evaluation.evaluate import card_text, evaluate, first_samples, sample_seed
from agent_r1.evaluation.power import (
    check_cards,
    measure,
    print_power,
    read_card,
    seeds_needed,
)
from agent_r1.evaluation.reliability import (
    KS,
    MEASURES,
    check_scores,
    interval_over_runs,
    mean_at,
    pass_all,
    pass_at,
    reliability,
    reliability_line,
    resampled_interval,
    student_quantile,
    values_of,
)
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.setup import make_loop

# --------------------------------------------------------------------------------------- estimators


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_the_estimators_are_the_averages_over_all_subsets(samples):
    for right in range(samples + 1):
        outcomes = [1] * right + [0] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert mean_at(k, right, samples) == pytest.approx(fmean(map(fmean, subsets)))
            assert pass_at(k, right, samples) == pytest.approx(fmean(map(max, subsets)))
            assert pass_all(k, right, samples) == pytest.approx(fmean(map(min, subsets)))


@pytest.mark.parametrize("estimator", MEASURES.values())
def test_more_attempts_than_samples_are_refused(estimator):
    assert estimator(8, 3, 8) >= 0
    for k in (9, 0):
        with fails_with("k_above_samples"):
            estimator(k, 3, 8)


def sample(question: int, number: int, score: float, name: str | None = None):
    """Make an episode that was scored, as sample `number` of a question."""
    metrics = {name or "em": score}
    episode = trajectory_of(([1], [2], score), metrics=metrics)
    episode.group_id, episode.sample, episode.score_name = str(question), number, name
    episode.row, episode.stop_reason = question_row(), StopReason.ANSWERED
    return episode


def test_the_part_of_the_card_by_hand():
    counts = [8, 8, 7, 0]
    episodes = [sample(q, j, float(j < c)) for q, c in enumerate(counts) for j in range(8)]
    part = reliability(episodes, "em", 1.0, None)
    assert part["right"] == counts and (part["samples"], part["questions"]) == (8, 4)
    assert part["mean@1"] == part["mean@8"] == part["pass@1"] == part["pass^1"] == 23 / 32
    assert part["pass@8"] == 3 / 4 and part["pass^8"] == 2 / 4
    assert part["pass^4"] == pytest.approx((1 + 1 + 35 / 70 + 0) / 4)
    assert values_of(part, "pass^8") == [1, 1, 0, 0]
    assert reliability_line(part).startswith("8 samples at temperature 1: mean 0.719 (95 % ")
    assert json.loads(card_text({"reliability": part})) == {"reliability": part}
    assert '"right": [8, 8, 7, 0]' in card_text({"reliability": part})
    # Five samples say nothing about eight.
    five = reliability([e for e in episodes if e.sample < 5], "em", 1.0, None)
    assert "pass^4" in five and "pass^8" not in five


def test_a_failed_episode_is_wrong_and_a_score_between_needs_a_threshold():
    failed = sample(0, 1, 1.0)
    failed.stop_reason = StopReason.TIME_OUT
    assert reliability([sample(0, 0, 1.0), failed], "em", 1.0, None)["right"] == [1]
    graded = [sample(0, j, score, "progress") for j, score in enumerate((0.2, 0.5, 1.0))]
    for refuse in (
        lambda: reliability(graded, "progress", 1.0, None),
        lambda: check_scores(graded, None),
    ):
        with fails_with("score_without_threshold"):
            refuse()
    part = reliability(graded, "progress", 1.0, 0.5)
    assert part["right"] == [2] and (part["score_name"], part["threshold"]) == ("progress", 0.5)
    assert "right from progress 0.5 on" in reliability_line(part)


# ------------------------------------------------------------------------------------------ samples


def test_the_seed_of_a_sample_depends_on_seed_question_and_number_only():
    seeds = {sample_seed(s, q, j) for s, q, j in itertools.product(range(3), range(20), range(8))}
    assert len(seeds) == 3 * 20 * 8


def test_eight_samples_differ_and_more_samples_only_add(micro, chat, cloned_model):
    def play(samples, questions=6, slots=8):
        policy = LocalPolicy(
            cloned_model, chat.stop_ids, slots=slots, max_context=micro.config.rollout.max_context
        )
        loop = make_loop(policy, chat, micro.tools, micro.config.rollout, micro.config.env)
        rows = micro.rows("val")[:questions]
        episodes = evaluate(loop, rows, temperature=1.0, seed=0, samples=samples)
        assert [(t.group_id, t.sample) for t in episodes] == [
            (str(i), j) for i in range(questions) for j in range(samples)
        ]
        return {(t.group_id, t.sample): [step.action_ids for step in t.steps] for t in episodes}

    eight = play(8)
    for question in range(6):
        assert len({str(eight[str(question), j]) for j in range(8)}) > 1
    assert len({str(ids) for ids in eight.values()}) > 6 * 4
    # Fewer samples, fewer questions, and other neighbours in the batch: the same episodes.
    for other in (play(1), play(3, slots=2), play(8, questions=2)):
        assert other == {key: eight[key] for key in other}


@pytest.fixture(scope="module")
def sampled(micro_model, tmp_path_factory):
    """The folder of an evaluation with four samples of each question, and its command."""
    root = tmp_path_factory.mktemp("sampled")
    command = ("eval", "--model", str(micro_model), "--samples", "4", "--out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(root / "home"))
        assert main(*command, str(root / "out")) == 0
        yield root / "out", command


def timeless(file):
    card = json.loads(file.read_text())
    return {key: card[key] for key in card if key not in ("wall_seconds", "resumed")}


@pytest.mark.parametrize("kept", [5, 30])
def test_a_resumed_evaluation_gives_the_same_card(sampled, tmp_path, kept):
    (out, command), torn = sampled, tmp_path / "torn"
    shutil.copytree(out, torn)
    lines = (torn / "1.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 12 * 4
    (torn / "1.jsonl").write_text("".join(lines[:kept]) + lines[kept][:100])
    (torn / "1.json").unlink()
    assert main(*command, str(torn)) == 0
    assert json.loads((torn / "1.json").read_text())["resumed"] == kept
    assert timeless(torn / "1.json") == timeless(out / "1.json")
    card = timeless(out / "1.json")
    assert card["n"] == card["reliability"]["questions"] == 12
    assert card["temperature"] == card["reliability"]["temperature"] == 1
    # The rest of the card is about the first samples.
    records = [json.loads(line) for line in lines]
    first = [record["metrics"]["em"] for record in records if record["sample"] == 0]
    assert card["em"] == pytest.approx(fmean(first))


def test_two_models_are_compared_question_by_question(sampled, tmp_path, capsys, micro_model):
    out = tmp_path / "out"
    models = ["--model", str(micro_model)] * 2
    assert main("eval", *models, "--samples", "2", "--limit", "6", "--out", str(out)) == 0
    comparison = json.loads((out / "comparison.json").read_text())["reliability"]
    low, high = comparison["pass^2"]["ci95"]
    assert comparison["pass^2"]["difference"] == 0 and low < 0 < high
    assert "second minus first: pass^2 +0.000" in capsys.readouterr().out
    refused = ("eval", "--model", str(micro_model), "--samples", "2", "--temperature", "0")
    assert main(*refused) == 2 and "times the same" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- intervals


def test_the_interval_is_jeffreys_for_shares_and_never_a_point():
    # Brown, Cai and DasGupta, Statistical Science 16 (2001), table 5: n = 20, x = 5 and x = 0.
    assert resampled_interval([1.0] * 5 + [0.0] * 15) == pytest.approx([0.102, 0.464], abs=0.006)
    assert resampled_interval([0.0] * 20) == pytest.approx([0, 0.117], abs=0.006)
    for value in (0.0, 0.5, 1.0):
        low, high = resampled_interval([value] * 500)
        assert low <= value <= high and high - low > 0.001


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_intervals_cover_about_what_they_say(difficulty):
    """The full simulation is a part of `make long`, and holds .93 to .97."""
    shares = covered(difficulty, questions=100, trials=120, keys=("mean@8", "pass@4", "pass^8"))
    assert all(0.88 <= share <= 1 for share in shares.values()), shares


def test_both_ends_add_runs_and_questions_in_quadrature():
    """Two runs with the means .50 and .51 on the same 40 questions.

    Their deviation is .01 / sqrt 2; Student's quantile for one degree of freedom is 12.706.
    """
    runs = [[1.0, 0.0] * 20, [1.0, 0.02] * 20]
    low, high = resampled_interval([fmean(pair) for pair in zip(*runs, strict=True)])
    half = 12.7062 * (0.01 / math.sqrt(2)) / math.sqrt(2)
    assert 0.5 * half < 0.505 - low < 5 * half
    expected = [0.505 - math.hypot(0.505 - low, half), 0.505 + math.hypot(high - 0.505, half)]
    assert interval_over_runs(runs, True) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("same_questions", [False, True])
def test_the_interval_over_three_runs_covers(same_questions):
    """Runs of .8 on average that differ by .04, of 100 questions each."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        levels = 0.8 + 0.04 * generator.standard_normal(3)
        if same_questions:
            # The shift of a question is the same in all runs.
            shifts = np.clip(0.12 * generator.standard_normal(100), -0.15, 0.15)
            chances = np.clip(levels[:, None] + shifts, 0, 1)
        else:
            chances = np.repeat(np.clip(levels, 0, 1)[:, None], 100, axis=1)
        runs = (generator.binomial(8, chances) / 8).tolist()
        low, high = interval_over_runs(runs, same_questions)
        assert high > low
        hits += low <= 0.8 <= high
    assert 182 <= hits <= 200


@pytest.mark.parametrize(
    ("share", "degrees", "value"),
    [(0.975, 2, 4.3027), (0.975, 9, 2.2622), (0.8, 4, 0.9410), (0.975, 100, 1.9840)],
)
def test_student_has_the_values_of_the_tables(share, degrees, value):
    assert student_quantile(share, degrees) == pytest.approx(value, abs=1e-4)


# ----------------------------------------------------------------------------- a planned comparison


def card_of_run(seed: int, counts: list[int], score: float, rows: str) -> dict:
    """Make an eval card with what a plan reads."""
    episodes = [sample(q, j, float(j < c)) for q, c in enumerate(counts) for j in range(8)]
    return {
        "model": f"runs/s{seed}",
        "model_hash": f"hash-{seed}",
        "seed": seed,
        "dataset": "tinyhop",
        "split": "test",
        "n": len(counts),
        "score": score,
        "score_ci95": [score - 0.02, score + 0.02],
        "score_name": "em",
        "rows_hash": rows,
        "reliability": reliability(episodes, "em", 1.0, None),
    }


@pytest.fixture
def cards():
    generator = np.random.default_rng(0)
    return [
        card_of_run(seed, generator.binomial(8, level, 200).tolist(), score, f"rows-{seed}")
        for seed, level, score in ((0, 0.97, 0.96), (1, 0.93, 0.93), (2, 0.96, 0.95))
    ]


def test_the_variances_are_split_by_hand(cards):
    em, mean, power = measure(cards)
    assert (em.name, mean.name, power.name) == ("em", "mean@8", "pass^8")
    of_questions = fmean(s * (1 - s) for s in (0.96, 0.93, 0.95))
    assert em.between_questions == pytest.approx(of_questions)
    total = variance([0.96, 0.93, 0.95])
    assert em.between_runs == pytest.approx(max(0, total - of_questions / 200))
    assert em.upper > em.between_runs and em.interval is None
    low, high = power.interval
    assert low < fmean(power.means) < high
    # On the same questions, their part is in no difference between the runs.
    same = [card | {"rows_hash": "x"} for card in cards]
    assert measure(same)[0].between_runs == pytest.approx(total)


def test_the_planned_seeds_show_the_difference_in_80_of_100_comparisons():
    """1,500 simulated pairs of recipes that differ by .03, with the planned number of seeds."""
    between_runs, between_questions, questions = 0.0004, 0.05, 500
    spread = between_runs + between_questions / questions
    seeds = seeds_needed(0.03, spread)
    generator = np.random.default_rng(0)
    first, second = generator.normal(0, math.sqrt(spread), (2, 1500, seeds))
    second += 0.03
    pooled = (first.var(axis=1, ddof=1) + second.var(axis=1, ddof=1)) / 2
    t = (second.mean(axis=1) - first.mean(axis=1)) / np.sqrt(2 * pooled / seeds)
    found = (np.abs(t) > student_quantile(0.975, 2 * seeds - 2)).mean()
    assert 0.77 <= found <= 0.90
    assert seeds_needed(0.0001, spread) is None


def test_the_plan_is_printed_and_what_cannot_be_planned_is_refused(cards, tmp_path, capsys):
    files = []
    for card in cards:
        files.append(tmp_path / f"{card['seed']}.json")
        files[-1].write_text(json.dumps(card))
    words = ["eval", "--power", ".02", "--cards", *map(str, files)]
    assert main(*words) == 0
    shown = capsys.readouterr().out
    assert "pass^8: mean" in shown and "questions per run | seeds per recipe" in shown
    assert main(*words[:-1]) == 2 and "name three or more" in capsys.readouterr().err
    with fails_with("too_few_runs"):
        print_power(0.02, [])
    with fails_with("one_run_twice"):
        check_cards([*cards, cards[0]])
    with fails_with("cards_differ"):
        check_cards([*cards[:2], cards[2] | {"dataset": "another"}])
    files[0].write_text("{}")
    with fails_with("bad_card"):
        read_card(files[0])
    assert KS == (1, 2, 4, 8) and first_samples([sample(0, 1, 1.0)]) == []
