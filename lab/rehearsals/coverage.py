"""Simulate questions of differing difficulty: 95 % intervals of pass@k and pass^k hold the truth.

Each trial draws the difficulty of n questions and eight samples of each, and makes the intervals of
an evaluation card. The truth is the mean over all questions of that kind. A coverage outside .93 to
.97 raises, if it is outside by more than two standard errors. One near these bounds is measured
again with ten times the trials, because one of 42 may leave them by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from agent_r1.evaluation.reliability import KS, MEASURES, resampled_interval

SAMPLES = 8
TRIALS = 2000
LOWEST = 0.93
HIGHEST = 0.97
KEYS = tuple(f"{measure}{k}" for measure in MEASURES for k in KS)

Generator = np.random.Generator


def before_rl(generator: Generator, n: int) -> np.ndarray:
    """Chances of an agent that knows easy questions, and guesses at most others."""
    is_sure = generator.random(n) < 0.3
    return np.where(is_sure, generator.beta(20, 1, n), generator.beta(0.6, 2, n))


def after_rl(generator: Generator, n: int) -> np.ndarray:
    """Chances of an agent that knows most questions, and never answers a few."""
    place = generator.random(n)
    sure = 1 - generator.beta(0.5, 60, n)
    unsure = generator.beta(4, 1.5, n)
    hopeless = generator.beta(0.5, 10, n)
    return np.where(place < 0.72, sure, np.where(place < 0.97, unsure, hopeless))


def even(generator: Generator, n: int) -> np.ndarray:
    """Chances around one half."""
    return generator.beta(2, 2, n)


DIFFICULTIES: dict[str, Callable[[Generator, int], np.ndarray]] = {
    "before RL": before_rl,
    "after RL": after_rl,
    "around one half": even,
}


def truth(key: str, chances: np.ndarray) -> float:
    """Return the expected value of a measure over questions with these chances."""
    measure, k = key[:5], int(key[5:])
    if measure == "mean@":
        return float(chances.mean())
    if measure == "pass@":
        return float((1 - (1 - chances) ** k).mean())
    return float((chances**k).mean())


def covered(
    difficulty: str, questions: int, trials: int, keys: Sequence[str] = KEYS
) -> dict[str, float]:
    """Return the share of the trials whose interval holds the truth, by measure.

    Raises AssertionError for an interval of width 0.
    """
    draw = DIFFICULTIES[difficulty]
    generator = np.random.default_rng(0)
    many = draw(generator, 1_000_000)
    truths = {key: truth(key, many) for key in keys}
    hits = dict.fromkeys(keys, 0)
    for _ in range(trials):
        counts = generator.binomial(SAMPLES, draw(generator, questions)).tolist()
        for key in keys:
            estimator = MEASURES[key[:5]]
            values = [estimator(int(key[5:]), right, SAMPLES) for right in counts]
            low, high = resampled_interval(values)
            assert low < high, (key, counts)
            hits[key] += low <= truths[key] <= high
    return {key: count / trials for key, count in hits.items()}


def run() -> dict[str, Any]:
    """Simulate all difficulties with 100 and 500 questions. Raises if a coverage is off."""
    figures: dict[str, Any] = {"trials": TRIALS, "measured_again": {}}
    everything = []
    noise = math.sqrt(0.95 * 0.05 / TRIALS)
    for questions in (100, 500):
        for difficulty in DIFFICULTIES:
            # mean@k is the same for every k, and pass@1 and pass^1 are the mean.
            keys = [key for key in KEYS if not key.endswith("@1") and not key.endswith("^1")]
            keys = [key for key in keys if not key.startswith("mean") or key == "mean@8"]
            shares = covered(difficulty, questions, TRIALS, keys)
            near = [key for key in keys if not LOWEST + noise < shares[key] < HIGHEST - noise]
            if near:
                again = covered(difficulty, questions, 10 * TRIALS, near)
                figures["measured_again"][f"{difficulty}, {questions} questions"] = again
                shares |= again
            figures[f"{difficulty}, {questions} questions"] = shares
            everything += shares.values()
            print(f"{difficulty}, {questions} questions: {shares}", flush=True)
    figures["least"] = min(everything)
    figures["mean"] = round(fmean(everything), 3)
    figures["greatest"] = max(everything)
    figures["standard_error"] = round(noise, 4)
    # All coverages near a bound have ten times the trials.
    margin = 2 * noise / math.sqrt(10)
    assert figures["least"] >= LOWEST - margin, figures
    assert figures["greatest"] <= HIGHEST + margin, figures
    return figures
