"""Detect from its metrics that a run goes wrong, and recommend a first remedy.

In: the lines of metrics.jsonl so far, of either engine. Out: `Sign`s. The dashboard shows each
once, the report lists them, and `trainer.stop_on_collapse` ends a run at the first sign of
collapse.

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

from agent_r1.training.log import HOST_FREE, STEP_KEY
from agent_r1.training.metrics import SAMPLER_GAP

Line = Mapping[str, Any]
FIRST = 3
"""Steps until the first check."""
SPAN = 5
"""Steps per compared mean."""
AGREED = 3
"""Steps in a row that may teach nothing."""
NOISE = 3.0
"""A fall between two means of SPAN steps must exceed this many standard errors; chosen by
lab/experiments/sentinel.py."""


LEAK = 30
"""Steps over which host memory is observed."""


@dataclass(frozen=True)
class Sign:
    """A detected problem."""

    name: str
    seen: str  # the observation with its figure
    means: str
    first: str  # what to try first
    step: int  # the step after which it was seen
    collapse: bool = False
    stop_reason: str = ""  # episodes with this stop reason are examples
    over: int | None = None  # the step after which it was no longer seen

    def __str__(self) -> str:
        return (
            f"{self.seen}; over after step {self.over}"
            if self.over
            else f"{self.seen}: {self.means}. {self.first}"
        )


SPEED = "perf/agent_tokens_per_s"
SLOW = 0.4
"""Share of the first steps' sampled tokens per second below which a fall is reported."""


def signs(lines: Sequence[Line]) -> list[Sign]:
    """List all signs of a run: where each began, and whether it ended."""
    signs_by_name: dict[str, Sign] = {}
    for n in sorted(
        {FIRST, *range(1, len(lines), max(1, len(lines) // 200)), len(lines)}
    ):  # a sample of a long run's steps
        now = {sign.name: sign for sign in new_signs(lines[:n])}
        for name, sign in signs_by_name.items():
            if name in now:
                signs_by_name[name] = replace(sign, over=None)
            # A reason for zero is checked once, so it holds until an episode is paid. Collapse is
            # checked from 2 SPAN on.
            elif (
                not sign.over
                and n >= 2 * SPAN
                and (not name.startswith("zero") or _any_reward(lines[n - 1]))
            ):
                signs_by_name[name] = replace(sign, over=lines[n - 1][STEP_KEY])
        signs_by_name = now | signs_by_name
    return list(signs_by_name.values())


def new_signs(lines: Sequence[Line]) -> list[Sign]:
    """List the signs at the last of `lines`, also those seen before."""
    zero = _why_zero(lines) if len(lines) == FIRST else []
    return (
        zero
        + _agreement(lines)
        + _leak(lines)
        + _slow_sampling(lines)
        + (_collapse(lines) if len(lines) >= 2 * SPAN else [])
    )


# --------------------------------------------------------------------------- why is my reward zero?

CAUSES = {
    "max_tokens": (
        "were cut off in the middle of a turn",
        "nothing in a cut-off turn is executed or rewarded",
        "Raise rollout.max_tokens_per_turn, or teach the format in a longer cold start",
    ),
    "context_overflow": (
        "ran out of context",
        "prompts and results do not fit",
        "Raise rollout.max_context, or lower search.top_k and env.tool_max_chars",
    ),
    "no_answer": (
        "ended without a readable answer",
        "the model does not write the tags that the environment reads",
        "Start from an instruct model, or train a cold start that shows the format",
    ),
    "invalid_calls": (
        "ended because their calls could not be parsed",
        "the model does not write calls as the environment reads them",
        "Start from an instruct model, or train a cold start that shows the format",
    ),
    "max_turns": (
        "used up their turns without an answer",
        "the agent calls tools until its turns end, and never answers",
        "Raise env.max_turns, or show answers in the cold start",
    ),
}
"""Stop reason -> observation, meaning, remedy."""


def _why_zero(lines: Sequence[Line]) -> list[Sign]:
    """List reasons why no episode of the first steps was paid."""
    if any(map(_any_reward, lines)):
        return []
    step = lines[-1][STEP_KEY]
    reasons = []
    for reason, (observation, meaning, remedy) in CAUSES.items():
        share = _mean(lines, f"stop/{reason}")
        if share >= 0.5:
            reasons.append(
                Sign(
                    f"zero: {reason}",
                    f"{share:.0%} of the episodes {observation}",
                    meaning,
                    remedy,
                    step,
                    stop_reason=reason,
                )
            )
    share_invalid = _mean(lines, "tool_calls/invalid_rate")
    if _mean(lines, "tool_calls/mean") == 0:
        reasons.append(
            Sign(
                "zero: no call",
                "no tool was called in 100% of the episodes",
                "the agent answers from memory, or its calls are not recognised",
                "Look at a turn in rollouts/; check env.tools",
                step,
            )
        )
    elif share_invalid >= 0.5:
        reasons.append(
            Sign(
                "zero: invalid calls",
                f"{share_invalid:.0%} of the calls could not be run",
                "the model writes the tags, but wrong names or arguments",
                "Look at a call in rollouts/; check names and arguments",
                step,
            )
        )
    if (gap := _mean(lines, SAMPLER_GAP)) > 0.2:
        reasons.append(_gap(gap, step))
    if not reasons:
        reasons.append(
            Sign(
                "zero: wrong",
                "no episode was paid",
                "the answers are well formed, and all are wrong",
                "Make the questions easier, or reward partial success (env.evidence_reward)",
                step,
            )
        )
    return reasons


# -------------------------------------------------------------------------------- has it collapsed?


def _agreement(lines: Sequence[Line]) -> list[Sign]:
    last = lines[-AGREED:]
    if len(last) < AGREED or any(line.get("groups/zero_advantage") != 1 for line in last):
        return []
    return [
        Sign(
            "groups agree",
            f"in {AGREED} consecutive steps, all samples of each group had equal scores",
            "nothing was learnt",
            "Look at rollouts/; other questions, a higher rollout.temperature or more "
            "samples_per_prompt may help",
            lines[-1][STEP_KEY],
            collapse=(score := _mean(last, "critic/score/mean")) <= 0
            or score < _best(lines) - 0.05,  # else it is solved
        )
    ]


def _collapse(lines: Sequence[Line]) -> list[Sign]:
    start = lines[:SPAN]
    now = lines[-SPAN:]
    signs = []

    def add(name: str, seen: str, means: str, first: str) -> None:
        signs.append(Sign(name, seen, means, first, lines[-1][STEP_KEY], collapse=True))

    score = _mean(now, "critic/score/mean")
    best = _best(lines)
    fall = max(0.1, 0.5 * (best - _mean(start, "critic/score/mean")))
    if best - score > max(fall, NOISE * _deviation(lines) * (2 / SPAN) ** 0.5):
        means = "updates were too large, or the policy exploits a part of the reward"
        first = "Lower actor.lr, or keep the policy near the start model with actor.kl_coef"
        add(
            "reward falls",
            f"the reward fell from {best:.2f} to {score:.2f} (means of {SPAN} steps)",
            means,
            first,
        )
    if (
        all("actor/entropy" in line for line in now)
        and _mean(now, "actor/entropy") < 1e-3
        and score < best - 0.05
    ):
        means = "the policy tries nothing new, so it cannot improve"
        first = "Lower actor.lr, or set actor.entropy_coef=0.001"
        add("entropy", "the entropy fell to zero", means, first)
    for key, name, least, first in (
        (
            "tool_calls/mean",
            "calls per episode",
            1.0,
            "Set env.call_reward to 0, and look at the results of the calls",
        ),
        (
            "response_length/mean",
            "tokens per episode",
            16.0,
            "Lower rollout.max_tokens_per_turn; try seq-mean-token-mean",
        ),
    ):
        before = _mean(start, key)
        after = _mean(now, key)
        if after > 2 * before + least and score <= best - 0.05:
            add(
                name,
                f"{after:.1f} {name}, {before:.1f} at first",
                "they grow without more reward",
                first,
            )
    if (gap := _mean(now, SAMPLER_GAP)) > max(0.1, 5 * (lines[0].get(SAMPLER_GAP) or 0.0)):
        signs.append(_gap(gap, lines[-1][STEP_KEY]))
    return signs


def _leak(lines: Sequence[Line]) -> list[Sign]:
    """Detect host memory that falls steadily over the last LEAK steps. The run will end when none
    is left."""
    free = [line.get(HOST_FREE) for line in lines[-LEAK:]]
    if len(free) < LEAK or None in free:
        return []
    means = [fmean(free[start : start + SPAN]) for start in range(0, LEAK, SPAN)]
    drops = [before - after for before, after in zip(means, means[1:], strict=False)]
    a_step = fmean(drops) / SPAN
    now = means[-1]
    # A process that starts and stays causes one fall, warming up ever smaller falls, and freed
    # memory a rise.
    if a_step < 0.02 or now > 0.9 * means[0] or min(drops) < 0.6 * fmean(drops):
        return []
    observation = (
        f"the machine's free memory falls by {1024 * a_step:.0f} MiB per step, and {now:.1f} GiB "
        "are left"
    )
    meaning = (
        f"a process leaks memory; after {now / a_step:.0f} more steps none is left (verl#6468 is "
        "such a leak)"
    )
    first = "Find the growing process; trainer.max_hours and --resume restart all processes"
    return [Sign("host memory", observation, meaning, first, lines[-1][STEP_KEY])]


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
    observation = f"{last_speed:.0f} sampled tokens per second, {first_speed:.0f} at the start"
    means = "the sampler or the machine became slower (verl#7029 is such a case), or others use it"
    remedy = "Look for other programs; --resume starts vLLM anew"
    return [Sign("slow sampling", observation, means, remedy, lines[-1][STEP_KEY])]


def _gap(gap: float, step: int) -> Sign:
    means = (
        "the sampler lacks the trainer's weights or rounds very differently, and the ratios "
        "measure that"
    )
    first = (
        "Check trainer.dtype and how weights reach the sampler; verl.tis_cap=2 bounds the effect"
    )
    return Sign(
        "sampler",
        f"sampler and trainer differed by {gap:.2f} nats per token",
        means,
        first,
        step,
        True,
    )


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
