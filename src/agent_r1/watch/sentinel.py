"""Detect from its metrics that a run goes wrong, and recommend a first remedy.

In: the lines of metrics.jsonl so far, of either engine. Out: `Sign`s of the causes in `causes.py`.
The dashboard shows each once, the report lists them, and
`trainer.stop_on_collapse` ends a run at the first sign of collapse.

*Why is my reward zero?* is checked once, after the first steps. Such a run continues for hours
without an error, since reward 0, loss 0 and gradient 0 are all valid numbers. *Has it collapsed?*
is checked from then on, by comparing the last steps with the first and the best ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from agent_r1.core import SAMPLER_GAP
from agent_r1.watch.causes import BY_SIGN, CAUSES, Cause
from agent_r1.watch.log import HOST_FREE, STEP_KEY

Line = Mapping[str, Any]
FIRST = 3
"""Steps until the first check."""
SPAN = 5
"""Steps per compared mean."""
AGREED_STEPS = 3
"""Steps in a row that may teach nothing."""
SOLVED = 0.95
"""Exact match from which groups agree because they are right, and nothing is wrong."""
NOISE = 3.0
"""A fall between two means of SPAN steps must exceed this many standard errors; chosen by
lab/experiments/sentinel.py."""
SPEED = "perf/agent_tokens_per_s"
SLOW = 0.4
"""Share of the first steps' sampled tokens per second below which a fall is reported."""
LEAK = 30
"""Steps over which host memory is observed."""


@dataclass(frozen=True)
class Sign:
    """A cause that a run shows."""

    cause: Cause
    evidence: str
    """The observation with its figure."""
    step: int = 0
    """The step after which it was seen; 0 if recorded episodes show it (recipes/diagnose)."""
    collapse: bool = False
    stop_reason: str = ""
    """Episodes with this stop reason are examples."""
    over: int | None = None
    """The step after which it was no longer seen."""
    is_proof: bool = False
    """Whether a rule of every correct run is contradicted."""

    @classmethod
    def of(cls, cause: str, evidence: str, is_proof: bool) -> Sign:
        """Make a sign of the cause with this name, which recorded episodes show."""
        return cls(CAUSES[cause], evidence, is_proof=is_proof)

    @property
    def name(self) -> str:
        """The sentinel's short name of the cause."""
        return self.cause.sign

    def __str__(self) -> str:
        if self.over:
            return f"{self.evidence}; over after step {self.over}"
        return f"{self.evidence}: {self.cause.meaning}. {self.cause.remedy}"


def _sign(
    name: str, evidence: str, step: int, *, collapse: bool = False, stop_reason: str = ""
) -> Sign:
    return Sign(BY_SIGN[name], evidence, step, collapse, stop_reason)


def signs(lines: Sequence[Line]) -> list[Sign]:
    """List all signs of a run: where each began, and whether it ended."""
    signs_by_name: dict[str, Sign] = {}
    # Of a long run only 200 steps are checked, because each check reads all lines before it.
    stride = max(1, len(lines) // 200)
    for n in sorted({FIRST, *range(1, len(lines), stride), len(lines)}):
        now = {sign.name: sign for sign in new_signs(lines[:n])}
        for name, sign in signs_by_name.items():
            if name in now:
                signs_by_name[name] = replace(sign, over=None)
                continue
            # A reason for zero is checked once, so it holds until an episode is paid. Collapse is
            # checked from 2 SPAN on.
            lasts = name.startswith("zero") and not _any_reward(lines[n - 1])
            if not sign.over and n >= 2 * SPAN and not lasts:
                signs_by_name[name] = replace(sign, over=lines[n - 1][STEP_KEY])
        signs_by_name = now | signs_by_name
    return list(signs_by_name.values())


def new_signs(lines: Sequence[Line]) -> list[Sign]:
    """List the signs at the last of `lines`, also those seen before."""
    all_signs = []
    if len(lines) == FIRST:
        all_signs += _why_zero(lines)
    all_signs += _agreement(lines)
    all_signs += _dear_endings(lines)
    all_signs += _leak(lines)
    all_signs += _slow_sampling(lines)
    if len(lines) >= 2 * SPAN:
        all_signs += _collapse(lines)
    return all_signs


# --------------------------------------------------------------------------- why is my reward zero?

OBSERVATIONS = {
    "max_tokens": "were cut off in the middle of a turn",
    "context_overflow": "ran out of context",
    "no_answer": "ended without a readable answer",
    "invalid_calls": "ended because their calls could not be parsed",
    "max_turns": "used up their turns without an answer",
}
"""Stop reason -> what the episodes did."""


def _why_zero(lines: Sequence[Line]) -> list[Sign]:
    """List reasons why no episode of the first steps was paid."""
    if any(_any_reward(line) for line in lines):
        return []
    step = lines[-1][STEP_KEY]
    reasons = []
    for reason, observation in OBSERVATIONS.items():
        share = _mean(lines, f"stop/{reason}")
        if share >= 0.5:
            evidence = f"{share:.0%} of the episodes {observation}"
            reasons.append(_sign(f"zero: {reason}", evidence, step, stop_reason=reason))
    share_invalid = _mean(lines, "tool_calls/invalid_rate")
    if _mean(lines, "tool_calls/mean") == 0:
        evidence = "no tool was called in 100% of the episodes"
        reasons.append(_sign("zero: no call", evidence, step))
    elif share_invalid >= 0.5:
        evidence = f"{share_invalid:.0%} of the calls could not be run"
        reasons.append(_sign("zero: invalid calls", evidence, step))
    gap = _mean(lines, SAMPLER_GAP)
    if gap > 0.2:
        reasons.append(_gap(gap, step))
    if not reasons:
        reasons.append(_sign("zero: wrong", "no episode was paid", step))
    return reasons


# -------------------------------------------------------------------------------- has it collapsed?


def is_solved(lines: Sequence[Line]) -> bool:
    """Return whether nothing is left to learn: all groups agree, and nearly all are right.

    Only for exact match. What the most is that another reward can pay is not known here.
    """
    last = lines[-AGREED_STEPS:]
    return _all_agree(last) and _mean(last, "reward/em") >= SOLVED


def solved_step(lines: Sequence[Line]) -> int | None:
    """Return the first step at which a run `is_solved`; None if there is none."""
    for n in range(AGREED_STEPS, len(lines) + 1):
        if is_solved(lines[n - AGREED_STEPS : n]):
            return lines[n - 1][STEP_KEY]
    return None


def _all_agree(last: Sequence[Line]) -> bool:
    agree = all(line.get("groups/zero_advantage") == 1 for line in last)
    return agree and len(last) == AGREED_STEPS


def _dear_endings(lines: Sequence[Line]) -> list[Sign]:
    """Detect that malformed endings cost more than right answers earn, though some are right.

    The cheapest way to a better reward is then an early answer, so searching is unlearned.
    """
    last = lines[-SPAN:]
    if len(last) < SPAN:
        return []
    earned = _mean(last, "reward/em")
    cost = -_mean(last, "reward/format")
    if not 0 < earned < cost:
        return []
    evidence = f"right answers earned {earned:.3f} per episode, malformed endings cost {cost:.3f}"
    return [_sign("penalty", evidence, lines[-1][STEP_KEY])]


def _agreement(lines: Sequence[Line]) -> list[Sign]:
    last = lines[-AGREED_STEPS:]
    if not _all_agree(last) or is_solved(lines):
        return []
    score = _mean(last, "critic/score/mean")
    evidence = f"in {AGREED_STEPS} consecutive steps, all samples of each group had equal scores"
    # With the best reward that it has had, the run has not collapsed.
    collapse = score <= 0 or score < _best(lines) - 0.05
    return [_sign("groups agree", evidence, lines[-1][STEP_KEY], collapse=collapse)]


def _collapse(lines: Sequence[Line]) -> list[Sign]:
    start = lines[:SPAN]
    now = lines[-SPAN:]
    step = lines[-1][STEP_KEY]
    collapses = []
    score = _mean(now, "critic/score/mean")
    best = _best(lines)
    fall = max(0.1, 0.5 * (best - _mean(start, "critic/score/mean")))
    if best - score > max(fall, NOISE * _deviation(lines) * (2 / SPAN) ** 0.5):
        evidence = f"the reward fell from {best:.2f} to {score:.2f} (means of {SPAN} steps)"
        collapses.append(_sign("reward falls", evidence, step, collapse=True))
    has_entropy = all("actor/entropy" in line for line in now)
    if has_entropy and _mean(now, "actor/entropy") < 1e-3 and score < best - 0.05:
        collapses.append(_sign("entropy", "the entropy fell to zero", step, collapse=True))
    for key, name, least in (
        ("tool_calls/mean", "calls per episode", 1.0),
        ("response_length/mean", "tokens per episode", 16.0),
    ):
        before = _mean(start, key)
        after = _mean(now, key)
        if after > 2 * before + least and score <= best - 0.05:
            evidence = f"{after:.1f} {name}, {before:.1f} at first"
            collapses.append(_sign(name, evidence, step, collapse=True))
    gap = _mean(now, SAMPLER_GAP)
    if gap > max(0.1, 5 * (lines[0].get(SAMPLER_GAP) or 0.0)):
        collapses.append(_gap(gap, step))
    return collapses


def _leak(lines: Sequence[Line]) -> list[Sign]:
    """Detect host memory that falls steadily over the last LEAK steps.

    The run will end when none is left.
    """
    free = [line.get(HOST_FREE) for line in lines[-LEAK:]]
    if len(free) < LEAK or None in free:
        return []
    means = [fmean(free[start : start + SPAN]) for start in range(0, LEAK, SPAN)]
    drops = [before - after for before, after in pairwise(means)]
    a_step = fmean(drops) / SPAN
    now = means[-1]
    # A process that starts and stays causes one fall, warming up ever smaller falls, and freed
    # memory a rise.
    if a_step < 0.02 or now > 0.9 * means[0] or min(drops) < 0.6 * fmean(drops):
        return []
    evidence = (
        f"the machine's free memory falls by {1024 * a_step:.0f} MiB per step, and {now:.1f} GiB "
        f"are left, enough for {now / a_step:.0f} more steps"
    )
    return [_sign("host memory", evidence, lines[-1][STEP_KEY])]


def _slow_sampling(lines: Sequence[Line]) -> list[Sign]:
    """Detect a sampler that became much slower for turns of the same length."""
    if len(lines) < 2 * SPAN + 1:
        return []
    # Without step 1, which compiles kernels.
    before = lines[1 : SPAN + 1]
    now = lines[-SPAN:]
    speeds = [[line.get(SPEED) or 0.0 for line in part] for part in (before, now)]
    lengths = [[line.get("response_length/mean") or 0.0 for line in part] for part in (before, now)]
    first_speed, last_speed = (fmean(part) for part in speeds)
    first_length, last_length = (fmean(part) for part in lengths)
    # Shorter episodes give fewer tokens for the same overhead, so they explain a slower sampler.
    if not first_speed:  # an old run, whose lines do not say
        return []
    if last_speed > SLOW * first_speed or last_length < 0.7 * first_length:
        return []
    evidence = f"{last_speed:.0f} sampled tokens per second, {first_speed:.0f} at the start"
    return [_sign("slow sampling", evidence, lines[-1][STEP_KEY])]


def _gap(gap: float, step: int) -> Sign:
    evidence = f"sampler and trainer differed by {gap:.2f} nats per token"
    return _sign("sampler", evidence, step, collapse=True)


def _any_reward(line: Line) -> bool:
    return line.get("reward/em", _score(line)) > 0


def _score(line: Line) -> float:
    return line.get("critic/score/mean") or 0.0


def _mean(lines: Sequence[Line], key: str) -> float:
    return fmean(line.get(key) or 0.0 for line in lines)


def _deviation(lines: Sequence[Line]) -> float:
    """Estimate the standard deviation of one step's score around its trend.

    Differences of consecutive steps remove the trend, and their median ignores a sudden fall. For a
    normal distribution the median is 0.95 standard deviations.
    """
    return median(abs(_score(b) - _score(a)) for a, b in pairwise(lines)) / 0.95


def _best(lines: Sequence[Line]) -> float:
    """Return the best mean of SPAN consecutive steps."""
    ends = range(min(SPAN, len(lines)), len(lines) + 1)
    return max(_mean(lines[max(0, end - SPAN) : end], "critic/score/mean") for end in ends)
