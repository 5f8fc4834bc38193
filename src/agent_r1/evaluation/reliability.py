"""Measure how reliable a policy is, from several samples of each question.

In: trajectories of `evaluate` with `samples` per question. Out: `reliability` of the evaluation
card. Next: `evaluation/power.py` plans a comparison from the cards of several runs.

For a question with c right of n samples, averaged over questions:

    mean@k   c / n                       one attempt
    pass@k   1 - C(n-c, k) / C(n, k)     at least one of k attempts is right: what it can do
    pass^k   C(c, k) / C(n, k)           all k attempts are right: what one can rely on

pass@k is of Chen et al. 2021 (arXiv 2107.03374), pass^k of Yao et al. 2024 (arXiv 2406.12045).
Both are the averages over all subsets of k samples, so they have no bias, for any k up to n.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Any

import numpy as np

from agent_r1.core import Trajectory
from agent_r1.evaluation.evaluate import score_of
from agent_r1.ground.errors import ConfigError

KS = (1, 2, 4, 8)
"""Values of k on a card, as far as there are samples."""
DRAWS = 10_000
"""Resamples of an interval: its ends then vary by about 2 % of its width."""


# --------------------------------------------------------------------------------------- estimators


def pass_at(k: int, right: int, samples: int) -> float:
    """Return the chance that at least one of `k` of the `samples` is right."""
    _check_k(k, samples)
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def pass_all(k: int, right: int, samples: int) -> float:
    """Return the chance that all `k` of the `samples` are right."""
    _check_k(k, samples)
    return math.comb(right, k) / math.comb(samples, k)


def mean_at(k: int, right: int, samples: int) -> float:
    """Return the share of right samples, the same for every k."""
    _check_k(k, samples)
    return right / samples


MEASURES = {"mean@": mean_at, "pass@": pass_at, "pass^": pass_all}


def _check_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ConfigError(
            f"k = {k} needs at least {max(k, 1)} samples of each question, and there are "
            f"{samples}; draw more with --samples, or choose k from 1 to {samples}",
            code="k_above_samples",
        )


# ----------------------------------------------------------------------------------- right or wrong


def is_right(trajectory: Trajectory, name: str, threshold: float | None) -> bool:
    """Return whether a sample is right; one that failed is wrong.

    Raises ConfigError for a score that is neither 0 nor 1, unless a `threshold` is named.
    """
    if trajectory.stop_reason.failed:
        return False
    score = score_of(trajectory, name)
    if threshold is not None:
        return score >= threshold
    if score not in (0, 1):
        raise ConfigError(
            f"a sample has the {name} {score:g}, which is neither right (1) nor wrong (0); name "
            "the least score of a right sample (--threshold 0.5, or trainer.eval_threshold=0.5), "
            "or draw one sample (--samples 1)",
            code="score_without_threshold",
        )
    return score == 1


def check_scores(trajectories: Iterable[Trajectory], threshold: float | None) -> None:
    """Refuse scores that `is_right` would refuse, before more samples are drawn."""
    for trajectory in trajectories:
        default = "em" if "em" in trajectory.metrics else "reward"
        is_right(trajectory, trajectory.score_name or default, threshold)


def count_right(
    trajectories: Sequence[Trajectory], name: str, threshold: float | None
) -> list[int]:
    """Count the right samples of each question, in the order of the questions."""
    counts: dict[str, int] = {}
    for trajectory in trajectories:
        right = is_right(trajectory, name, threshold)
        counts[trajectory.group_id] = counts.get(trajectory.group_id, 0) + right
    return list(counts.values())


def reliability(
    trajectories: Sequence[Trajectory], name: str, temperature: float, threshold: float | None
) -> dict[str, Any]:
    """Make the `reliability` of a card: mean@k, pass@k and pass^k with 95 % intervals.

    `name`: the score that says what is right, as in `score_of`. Every question needs equally many
    samples.
    """
    counts = count_right(trajectories, name, threshold)
    samples = len(trajectories) // len(counts)
    part: dict[str, Any] = {
        "temperature": temperature,
        "samples": samples,
        "questions": len(counts),
        "score_name": name,
        "threshold": threshold,
    }
    for k in KS:
        if k > samples:
            break
        for measure, estimator in MEASURES.items():
            values = [estimator(k, right, samples) for right in counts]
            part[f"{measure}{k}"] = fmean(values)
            part[f"{measure}{k}_ci95"] = resampled_interval(values)
    part["right"] = counts
    return part


def values_of(part: dict[str, Any], key: str) -> list[float]:
    """Return a measure such as `pass^8` of each question, from the `reliability` of a card."""
    estimator = MEASURES[key[:5]]
    return [estimator(int(key[5:]), right, part["samples"]) for right in part["right"]]


def reliability_line(part: dict[str, Any]) -> str:
    """Format `8 samples at temperature 1: mean 0.931 (95 % 0.913 to 0.946), pass@8 ...`."""
    k = max(k for k in KS if k <= part["samples"])
    figures = []
    for key, word in ((f"mean@{k}", "mean"), (f"pass@{k}", None), (f"pass^{k}", None)):
        low, high = part[f"{key}_ci95"]
        figures.append(f"{word or key} {part[key]:.3f} (95 % {low:.3f} to {high:.3f})")
    rule = ""
    if part["threshold"] is not None:
        rule = f", right from {part['score_name']} {part['threshold']:g} on"
    return f"{part['samples']} samples at temperature {part['temperature']:g}{rule}: " + ", ".join(
        figures
    )


# ---------------------------------------------------------------------------------------- intervals


def resampled_interval(
    values: Sequence[float], lowest: float = 0.0, highest: float = 1.0
) -> list[float]:
    """Return the 95 % interval of a mean over questions; values lie in [lowest, highest].

    The questions are resampled with random weights (Rubin 1981, "The Bayesian Bootstrap"), together
    with half a question at each end of the scale (Jeffreys). For values of 0 and 1 that is
    Jeffreys' interval. Without these halves, 100 right questions would have an interval of width
    0. Near 1 it would be too short: pass@8 of 100 questions was covered in .90 of the trials.
    """
    # The weights of equal values add up to one weight, so nine values stand for 500 questions.
    weights: dict[float, float] = defaultdict(int, Counter(values))
    weights[lowest] += 0.5
    weights[highest] += 0.5
    atoms = sorted(weights)
    draws = np.random.default_rng(0).dirichlet([weights[atom] for atom in atoms], DRAWS)
    low, high = np.quantile(draws @ np.array(atoms), [0.025, 0.975]).tolist()
    # Nothing says that the truth is not at the end (Brown, Cai and DasGupta 2001).
    if min(values) == highest:
        high = highest
    if max(values) == lowest:
        low = lowest
    return [low, high]


def interval_over_runs(runs: Sequence[Sequence[float]], same_questions: bool) -> list[float]:
    """Return the 95 % interval of the mean over runs: other seeds, and other questions.

    Args:
        runs: Of each run the value of each question, in [0, 1].
        same_questions: Whether all runs answered the same questions, in the same order.

    Runs are the units: Student's interval of their means. Resampling three runs with replacement
    would cover the truth in 75 of 100 cases only. Means of runs with their own questions differ
    by these questions, too. With the same questions, their part is resampled and added. The
    interval is never shorter than that of one run with all these questions.
    """
    if same_questions:
        values = [fmean(of_question) for of_question in zip(*runs, strict=True)]
    else:
        values = [value for run in runs for value in run]
    centre = fmean(values)
    low, high = resampled_interval(values)
    if len(runs) < 2:
        return [low, high]
    half = student_quantile(0.975, len(runs) - 1) * spread(runs) / math.sqrt(len(runs))
    below = centre - low
    above = high - centre
    if same_questions:
        below = math.hypot(below, half)
        above = math.hypot(above, half)
    else:
        below = max(below, half)
        above = max(above, half)
    return [max(0.0, centre - below), min(1.0, centre + above)]


def spread(runs: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of the runs' means."""
    return stdev(fmean(run) for run in runs)


@cache  # 7 ms each; `eval --power` asks for the same hundred for each number of questions
def student_quantile(share: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to four digits; `share` is at least .5."""
    # The density over t = tan(angle) is proportional to cos(angle) ** (degrees - 1), and bounded.
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    # Trapezoids: half of the distribution lies above 0.
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(2 * share - 1, area / area[-1], angles)
    return math.sqrt(degrees) * math.tan(angle)
