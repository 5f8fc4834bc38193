"""Plan a comparison: how many questions and seeds show a difference? `agent-r1 eval --power .02`

In: eval cards of several runs of one recipe. Out: a table on the screen. The plan is for two
recipes that are each run with other seeds, with 80 % power and a two-sided test at 5 %.

A run's mean has two sources of chance: other questions, and another training run.

    variance of a mean over R runs = (between runs + between questions / n) / R

The cards give both variances. More questions shrink only the second one, so more seeds are needed
in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any

from agent_r1.evaluation.reliability import (
    KS,
    interval_over_runs,
    student_quantile,
    values_of,
)
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.ui import say

QUESTIONS = (100, 200, 500, 1000, 2000, 5000)
POWER = 0.8
LEVEL = 0.05
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Measured:
    """Hold a score of several runs, and its two variances."""

    name: str
    means: list[float]  # one per run
    between_questions: float
    between_runs: float
    upper: float
    """Upper 90 % bound of `between_runs`: a few runs say little about it."""
    interval: list[float] | None
    """95 % interval of the mean over runs; None if the cards lack single questions."""


def print_power(difference: float, files: list[Path]) -> None:
    """Print how many questions and seeds a comparison needs that shows `difference`.

    Raises ConfigError for fewer than three cards, or cards that do not belong together.
    """
    cards = [read_card(file) for file in files]
    check_cards(cards)
    for measurement in measure(cards):
        runs = ", ".join(f"{mean:.3f}" for mean in measurement.means)
        interval = ""
        if measurement.interval:
            low, high = measurement.interval
            interval = f" (95 % over runs and questions: {low:.3f} to {high:.3f})"
        say(f"{measurement.name}: mean {fmean(measurement.means):.3f}{interval}, runs {runs}")
        say(
            f"  standard deviation between runs {math.sqrt(measurement.between_runs):.3f} (at most "
            f"{math.sqrt(measurement.upper):.3f}), between questions "
            f"{math.sqrt(measurement.between_questions):.3f}"
        )
        say("  questions per run | seeds per recipe | if runs differ as much as they may")
        for questions in QUESTIONS:
            by_questions = measurement.between_questions / questions
            likely = seeds_needed(difference, measurement.between_runs + by_questions)
            careful = seeds_needed(difference, measurement.upper + by_questions)
            say(f"  {questions:17} | {_count(likely):>16} | {_count(careful)}")
    say(
        f"for a difference of {difference:g} between two recipes, other seeds and questions for "
        f"each: {POWER:.0%} power, two-sided test at {LEVEL:.0%}"
    )


def _count(seeds: int | None) -> str:
    if seeds is None:
        return f"over {MOST_SEEDS}"
    return str(seeds)


def seeds_needed(difference: float, variance_of_run: float) -> int | None:
    """Return the fewest seeds per recipe that show `difference`; None if over 1,000.

    `variance_of_run`: of the mean of one run. Student's quantiles, since the variance is estimated
    from these seeds (Snedecor and Cochran, Statistical Methods, chapter 6).
    """
    for seeds in range(2, MOST_SEEDS + 1):
        degrees = 2 * (seeds - 1)
        # Student's quantiles are the normal ones to .3 % from 200 degrees on.
        if degrees < 200:
            quantile = student_quantile(1 - LEVEL / 2, degrees) + student_quantile(POWER, degrees)
        else:
            quantile = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)
        if quantile * math.sqrt(2 * variance_of_run / seeds) <= difference:
            return seeds
    return None


# ----------------------------------------------------------------------------------- from the cards


def read_card(file: Path) -> dict[str, Any]:
    """Read an eval card. Raises AgentR1Error for another file."""
    try:
        card = bounds.read_json(file)
        values = (card["score"], card["score_ci95"], card["n"], card["score_name"])
        if None in values:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise AgentR1Error(
            f"{file} is not an eval card; name an eval.json of a run", code="bad_card"
        ) from None
    return card


def check_cards(cards: list[dict[str, Any]]) -> None:
    """Refuse cards from which the spread between runs cannot be read."""
    if len(cards) < 3:
        raise ConfigError(
            f"--power has the cards of {len(cards)} runs, and two runs say nearly nothing about "
            "the spread between runs; name three or more with --cards",
            code="too_few_runs",
        )
    # The same card twice would look like two runs that agree.
    identities = {(card.get("model_hash") or card.get("model"), card["seed"]) for card in cards}
    if len(identities) < len(cards):
        raise ConfigError(
            "--cards names one run twice; name the cards of different runs", code="one_run_twice"
        )
    for key in ("score_name", "dataset", "split"):
        values = sorted({str(card.get(key)) for card in cards})
        if len(values) > 1:
            raise ConfigError(
                f"the cards have different values of {key}: {', '.join(values)}; name runs of one "
                "recipe",
                code="cards_differ",
            )


def measure(cards: list[dict[str, Any]]) -> list[Measured]:
    """Read the greedy score, and what all cards have of their samples."""
    hashes = [card.get("rows_hash") for card in cards]
    same_questions = len(set(hashes)) == 1 and hashes[0] is not None
    means = [card["score"] for card in cards]
    of_questions = fmean(_variance_of_score(card) for card in cards)
    by_question = of_questions / fmean(card["n"] for card in cards)
    measurements = [
        _split_variance(cards[0]["score_name"], means, of_questions, by_question, same_questions)
    ]
    parts = [card["reliability"] for card in cards if card.get("reliability")]
    if len(parts) < len(cards) or len({(p["samples"], p["temperature"]) for p in parts}) > 1:
        return measurements
    k = max(k for k in KS if k <= parts[0]["samples"])
    for key in (f"mean@{k}", f"pass^{k}"):
        runs = [values_of(part, key) for part in parts]
        means = [fmean(run) for run in runs]
        of_questions = fmean(variance(run) for run in runs)
        by_question = fmean(variance(run) / len(run) for run in runs)
        interval = interval_over_runs(runs, same_questions)
        measurements.append(
            _split_variance(key, means, of_questions, by_question, same_questions, interval)
        )
    return measurements


def _variance_of_score(card: dict[str, Any]) -> float:
    """Return the variance of the greedy score between questions."""
    if card["score_name"] == "em":
        return card["score"] * (1 - card["score"])
    low, high = card["score_ci95"]
    return ((high - low) / 2 / 1.96) ** 2 * card["n"]


def _split_variance(
    name: str,
    means: list[float],
    of_questions: float,
    by_question: float,
    same_questions: bool,
    interval: list[float] | None = None,
) -> Measured:
    """Split the variance of the runs' means. `by_question`: the part of a run's questions."""
    total = variance(means)
    degrees = len(means) - 1
    # Quantile .1 of chi-square, to 7 % for 2 degrees (Wilson and Hilferty 1931).
    spread = 2 / (9 * degrees)
    chi_square = degrees * (1 - spread + NormalDist().inv_cdf(0.1) * math.sqrt(spread)) ** 3
    upper = total * degrees / chi_square
    if same_questions:
        # They move all means together, so the means' variance has no part of them.
        by_question = 0.0
    return Measured(
        name,
        means,
        of_questions,
        max(0.0, total - by_question),
        max(0.0, upper - by_question),
        interval,
    )
