"""Test which method reaches a stair sooner: a greedy validation of a kind of question.

In: the metrics of finished runs. Out: the episodes each needed, and exact tests over pairs. The
primary test is McNemar's: within a number of episodes, how often did only one of a pair get there?
A run that never did is censored: it counts as later than every run that did. Next: `race.py`
prints it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median_high
from typing import Any, NamedTuple

from agent_r1 import Config, ConfigError, json_records, say

PRIMARY = "within the deadline"
"""The one test that two arms are raced for. All others are corrected by Holm's method."""


@dataclass(frozen=True)
class Stair:
    """A goal of the greedy validation, written `3-hop>=.5`, or `all>=.8` of all questions."""

    kind: str
    level: float

    @classmethod
    def parse(cls, text: str) -> Stair:
        """Parse a stair. Raise ConfigError for another form."""
        match = re.fullmatch(r"([\w-]+)>=([01]?\.?\d+)", text.replace(" ", ""))
        if match is None or not 0 < float(match[2]) <= 1:
            raise ConfigError(
                f"--stair {text!r} is KIND>=SHARE, such as 3-hop>=.5, or all>=.8 of all questions",
                code="wrong_type",
            )
        return cls(match[1], float(match[2]))

    def __str__(self) -> str:
        return f"{self.kind} >= {self.level:g}"

    def score(self, line: Mapping[str, Any]) -> float | None:
        """Return the score of this kind in a line of metrics.jsonl; None without a validation."""
        name = r"val-core/[^/]+/acc/mean@1"
        if self.kind != "all":
            name = rf"val-aux/[^/]+/{re.escape(self.kind)}/acc/mean@1"
        for key, value in line.items():
            if re.fullmatch(name, key):
                return value
        return None


@dataclass(frozen=True)
class Climb:
    """What one run needed to reach the stair, and where it ended."""

    episodes: float
    """Sampled in training until the first validation at or above the stair; infinity: never."""
    seconds: float
    """Of the same training steps, without validation and start-up; infinity: never."""
    scores: list[tuple[int, float]]
    """(episodes, score) of each validation."""
    training_seconds: float
    """Of all training steps."""

    @classmethod
    def of(
        cls, points: Iterable[tuple[int, float, float]], level: float, training_seconds: float
    ) -> Climb:
        """Find what first reached the level, in points of (episodes, seconds, score)."""
        points = list(points)
        episodes = seconds = math.inf
        for count, time, score in points:
            if score >= level:
                episodes = count
                seconds = time
                break
        scores = [(count, score) for count, _, score in points]
        return cls(episodes, seconds, scores, training_seconds)

    def record(self) -> dict[str, Any]:
        """Return the fields for a JSON file, which has no infinity: None means never."""
        return {k: None if v == math.inf else v for k, v in asdict(self).items()}

    @classmethod
    def from_record(cls, line: Mapping[str, Any]) -> Climb:
        """Read what `record` returned; other keys, such as the seed, are left out."""
        values = {}
        for field in fields(cls):
            value = line[field.name]
            values[field.name] = math.inf if value is None else value
        return cls(**values)


def climb(folder: Path, stair: Stair, config: Config, per_step: int) -> Climb:
    """Read a run. Raise ConfigError if its validations lack the stair's kind."""
    greedy_episodes = config.rollout.prompts_per_step * bool(config.algorithm_has("greedy"))
    episodes = 0
    seconds = 0.0
    points: list[tuple[int, float, float]] = []
    for _, line in json_records(folder / "metrics.jsonl"):
        own_count = line.get("rollout/episodes_played")
        # Dynamic sampling records what it played; the greedy episodes of remax come on top.
        episodes += int(own_count) + greedy_episodes if own_count else per_step
        seconds += line["timing_s/step"]
        score = stair.score(line)
        if score is not None:
            points.append((episodes, seconds, score))
    if not points:
        raise ConfigError(
            f"{folder.name} has no validation of {stair.kind}; set trainer.eval_every, and name a "
            "kind of its questions",
            code="unknown_name",
        )
    return Climb.of(points, stair.level, seconds)


class Summary(NamedTuple):
    """The climbs of one arm, together."""

    arrivals: int
    median_episodes: float
    """Of two in the middle, the later one. Infinite if that run never got there."""
    last_score: float
    """The mean of the runs' last validations."""
    training_seconds: float
    """The mean over runs."""


def summarize(climbs: Sequence[Climb]) -> Summary:
    """Summarise at least one climb."""
    episodes = [climb.episodes for climb in climbs]
    return Summary(
        arrivals=sum(map(math.isfinite, episodes)),
        median_episodes=median_high(episodes),
        last_score=fmean(climb.scores[-1][1] for climb in climbs),
        training_seconds=fmean(climb.training_seconds for climb in climbs),
    )


# ------------------------------------------------------------------------------------------- tests


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p of McNemar's test.

    The arguments count the pairs in which one run alone succeeded. Without a difference, each of
    them is as likely as the other: a fair coin.
    """
    n = only_first + only_second
    tail = sum(math.comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n
    return min(1.0, 2 * tail)


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """Return the p of several tests, corrected by Holm's method: multiplied by the tests left."""
    results = {}
    largest = 0.0
    for place, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[name]))
        results[name] = largest
    return results


def compare_climbs(
    first: Sequence[Climb], other: Sequence[Climb], deadline: float
) -> dict[str, dict[str, Any]]:
    """Compare two arms whose runs are paired. Each test counts the pairs that one of them wins.

    within the deadline: only one run of the pair reached the stair by then
    ever:                only one reached it at all
    sooner:              one reached it after fewer episodes (equal pairs do not count)
    """
    pairs = list(zip(first, other, strict=True))
    counts = {
        PRIMARY: _count((a.episodes <= deadline, b.episodes <= deadline) for a, b in pairs),
        "ever": _count((math.isfinite(a.episodes), math.isfinite(b.episodes)) for a, b in pairs),
        "sooner": _count((a.episodes < b.episodes, b.episodes < a.episodes) for a, b in pairs),
    }
    return {
        name: {"only first": a, "only other": b, "p": mcnemar(a, b)}
        for name, (a, b) in counts.items()
    }


def _count(pairs: Iterable[tuple[bool, bool]]) -> tuple[int, int]:
    only_first = only_other = 0
    for first, other in pairs:
        only_first += first and not other
        only_other += other and not first
    return only_first, only_other


def half_of_median(climbs: Sequence[Climb], budget: int) -> float:
    """Return half of the median episodes. If the median run never arrived, half of the budget."""
    middle = median_high([climb.episodes for climb in climbs])
    return min(middle, budget) / 2


# ------------------------------------------------------------------------------------------ report


def compare_stair(
    stair: Stair, climbs: Mapping[str, Mapping[int, Climb]], budget: int
) -> dict[str, Any]:
    """Compare all arms with the first one. `climbs`: of each arm, by seed; `budget`: episodes."""
    first, *others = climbs
    if not climbs[first]:
        return {"stair": str(stair), "arms": {}, "tests": {}}
    deadline = half_of_median(list(climbs[first].values()), budget)
    tests: dict[str, dict[str, Any]] = {}
    for name in others:
        seeds = sorted(climbs[first].keys() & climbs[name].keys())
        mine = [climbs[first][seed] for seed in seeds]
        theirs = [climbs[name][seed] for seed in seeds]
        for test, result in compare_climbs(mine, theirs, deadline).items():
            tests[f"{name}, {test}"] = result | {"pairs": len(seeds)}
    # With two arms there is one primary test; with more, none of them was chosen before.
    others = {
        name: test["p"]
        for name, test in tests.items()
        if len(others) > 1 or not name.endswith(PRIMARY)
    }
    for name, chance in holm(others).items():
        tests[name]["p (Holm)"] = chance
    arms = {}
    for name, mine in climbs.items():
        arms[name] = [{"seed": seed} | mine[seed].record() for seed in sorted(mine)]
    return {"stair": str(stair), "deadline": deadline, "arms": arms, "tests": tests}


def print_stair(figures: Mapping[str, Any]) -> None:
    """Print what each arm needed, and the tests."""
    say(f"\nthe stair: validation of {figures['stair']}")
    for name, mine in figures["arms"].items():
        if not mine:
            say(f"  {name:32s} no finished run")
            continue
        arm = summarize([Climb.from_record(one) for one in mine])
        never = math.isinf(arm.median_episodes)
        median = "never" if never else f"{arm.median_episodes:,.0f} episodes"
        say(
            f"  {name:32s} reached by {arm.arrivals} of {len(mine)}, median {median}; last "
            f"validation {arm.last_score:.2f}; {arm.training_seconds:.0f} s of training a run"
        )
    for name, test in figures["tests"].items():
        chance = test.get("p (Holm)", test["p"])
        say(
            f"  {name}: {test['only other']} pairs for it, {test['only first']} against, of "
            f"{test['pairs']}; p {chance:.4f}{' (Holm)' if 'p (Holm)' in test else ''}"
        )
    if figures["tests"]:
        say(f"  the deadline: {figures['deadline']:,.0f} episodes, half of the first arm's median")
