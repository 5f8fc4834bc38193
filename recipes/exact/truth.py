"""Add up the plays of a tree: bounds and estimates of what is true.

In: trees of `tree.py`. Out: `Truth` of a question, or of several. Each quantity has two forms. The
*strict interval* needs no sample: the plays outside the tree have the probability `rest`, and each
is paid something within the range of rewards. The *estimate* replaces the rest by its sampled
plays; it has no bias, and a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from agent_r1 import BaseTool, BaseToolEnv, Config, HermesToolEnv, Trajectory, make_env
from agent_r1_recipes.exact.tree import Play, Tree

KS = (2, 8, 64)
Measure = Callable[[Trajectory], float]


@dataclass(frozen=True)
class Truth:
    """An expectation over all plays: exact bounds, and an unbiased estimate."""

    low: float
    high: float
    estimate: float
    error: float
    """Standard error of the estimate; nan without two samples of a rest."""

    def __str__(self) -> str:
        digits = 4
        text = f"{self.estimate:.{digits}f}"
        if self.error > 0 or math.isnan(self.error):
            text += f" ± {self.error:.{digits}f}"
        return f"{text} (strictly {self.low:.{digits}f} to {self.high:.{digits}f})"


def expectation(tree: Tree, measure: Measure, least: float, most: float) -> Truth:
    """Compute the mean of `measure`, in [least, most], over a question's plays."""
    inside = math.fsum(math.exp(p.logprob) * measure(p.trajectory) for p in tree.plays)
    rest = tree.rest
    # Without a rest the range does not matter; it may be unknown, that is infinite.
    low = inside + rest * least if rest else inside
    high = inside + rest * most if rest else inside
    values = [measure(play.trajectory) for play in tree.rest_plays]
    if not values:
        return Truth(low, high, inside, math.nan if rest else 0.0)
    error = math.nan
    if len(values) > 1:
        error = rest * math.sqrt(variance(values) / len(values))
    return Truth(low, high, inside + rest * fmean(values), error)


def average(truths: Sequence[Truth]) -> Truth:
    """Average over questions. Their samples are independent, so variances add up."""
    n = len(truths)
    error = math.sqrt(math.fsum(truth.error**2 for truth in truths)) / n
    return Truth(
        fmean(truth.low for truth in truths),
        fmean(truth.high for truth in truths),
        fmean(truth.estimate for truth in truths),
        error,
    )


# ------------------------------------------------------------------------------------ success and k


def is_success(threshold: float | None) -> Callable[[Trajectory], float]:
    """Return the measure 1 for a play whose score reaches the threshold, else 0.

    Without a threshold, a play succeeds with a score of 1.
    """
    bar = 1.0 if threshold is None else threshold

    def measure(trajectory: Trajectory) -> float:
        return float(trajectory.score >= bar)

    return measure


def pass_at(k: int, chance: float) -> float:
    """Return the chance that at least one of `k` plays succeeds."""
    return -math.expm1(k * math.log1p(-chance)) if chance < 1 else 1.0


def pass_all(k: int, chance: float) -> float:
    """Return the chance that all `k` plays succeed."""
    return chance**k


def of_k(chances: Sequence[Truth], measure: Callable[[int, float], float], k: int) -> Truth:
    """Compute pass@k or pass^k, averaged over questions.

    Both rise with the chance of success, so strict intervals go through. The estimate puts the
    estimated chance into the formula: its bias is of the order of the squared error.
    """
    truths = []
    for chance in chances:
        middle = min(1.0, max(0.0, chance.estimate))
        # The derivative by differences: the formula has no kink inside (0, 1).
        up = measure(k, min(1.0, middle + 1e-6))
        down = measure(k, max(0.0, middle - 1e-6))
        slope = (up - down) / 2e-6
        truths.append(
            Truth(
                measure(k, max(0.0, chance.low)),
                measure(k, min(1.0, chance.high)),
                measure(k, middle),
                abs(slope) * chance.error,
            )
        )
    return average(truths)


def entropy(tree: Tree) -> Truth:
    """Compute the entropy over plays, in nats.

    A play outside is no likelier than all of them together, which bounds the rest from below. From
    above, nothing bounds it: there could be any number of them.
    """
    inside = math.fsum(-math.exp(p.logprob) * p.logprob for p in tree.plays)
    rest = tree.rest
    if not rest:
        return Truth(inside, inside, inside, 0.0)
    low = inside - rest * math.log(rest)
    values = [-play.logprob for play in tree.rest_plays]
    if len(values) < 2:
        return Truth(low, math.inf, inside, math.nan)
    error = rest * math.sqrt(variance(values) / len(values))
    return Truth(low, math.inf, inside + rest * fmean(values), error)


# ----------------------------------------------------------------------------- the range of rewards


def reward_range(
    config: Config, tree: Tree, tools: dict[str, BaseTool]
) -> tuple[float, float] | None:
    """Return the least and the largest reward of any play, or None if unknown.

    The penalty of a malformed ending counts, and so do rewards of calls.
    """
    env = make_env(tree.row, tools, config.env)
    # Questions are paid in one function, in every dialect of ours.
    is_known = type(env).outcome is HermesToolEnv.outcome and config.env.reward is None
    if not is_known or type(env).process_reward is not BaseToolEnv.process_reward:
        return None
    calls = abs(config.env.call_reward) * config.env.max_tool_calls
    least = -config.env.format_penalty - calls
    return least, 1.0 + config.env.evidence_reward + calls


# ------------------------------------------------------------------------------ values of each turn


@dataclass
class TurnValue:
    """What is known of the plays below a state, or below one choice in it."""

    chance: float = 0.0
    """Probability of the plays of the tree through here."""
    reward: float = 0.0
    """Their reward from here on, times their probability."""

    @property
    def value(self) -> float:
        """The mean reward from here on, over the plays of the tree."""
        return self.reward / self.chance if self.chance else math.nan


Turns = tuple[tuple[int, ...], ...]


def turn_values(plays: Iterable[Play]) -> tuple[dict[Turns, TurnValue], dict[Turns, TurnValue]]:
    """Compute V of each state and Q of each turn, by the turns so far.

    V counts the rewards after the turns of the key, Q also the last turn's own reward. So the
    advantage of the last turn of a key is Q(key) - V(key without its last turn).
    """
    values: dict[Turns, TurnValue] = {}
    choices: dict[Turns, TurnValue] = {}
    for play in plays:
        chance = math.exp(play.logprob)
        steps = play.trajectory.steps
        turns = tuple(tuple(step.action_ids) for step in steps)
        to_go = 0.0
        for number in range(len(steps), -1, -1):
            if number < len(steps):
                to_go += steps[number].reward
                choice = choices.setdefault(turns[: number + 1], TurnValue())
                choice.chance += chance
                choice.reward += chance * to_go
            state = values.setdefault(turns[:number], TurnValue())
            state.chance += chance
            state.reward += chance * to_go
    return values, choices
