"""Judge recorded episodes: what each policy earns, with an interval, against the oracle.

In: records of episodes (`episodes.py`) and facts of the run. Out: a `Verdict` for each question
that `agent-r1 env check` asks. Next: `command.py` prints them.

A share is the way from the least to the oracle's mean reward: 0 for the worst policy, 1 for the
oracle. A policy fails if the lower end of its 95 % interval is above the limit. Thirty policies
are judged, so one whose true share is just at the limit may fail by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any, Literal

LIMIT = 0.05
"""Share that play without skill may reach, if nothing is declared."""
MOST_FLOOR = 0.3
"""Declared floors above it need a reason."""
ORACLE = "oracle"
"""Policy name of the oracle's episodes."""
AFTER = "after a success: "
"""Prefix of the policies that are played again after the oracle."""
ROUNDING = 1e-6
WORST = {"fail": 0, "open": 1, "ok": 2}


@dataclass(frozen=True)
class Verdict:
    """One line of the report."""

    name: str
    state: Literal["ok", "fail", "open"]
    """`open`: the episodes do not decide it."""
    text: str
    transcript: list[str] = field(default_factory=list)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean.

    Wilson's if all values are 0 or 1, else the normal one.
    """
    n = len(values)
    mean = fmean(values)
    if not set(values) <= {0.0, 1.0}:
        half = 1.96 * stdev(values) / math.sqrt(n) if n > 1 else 0.0
        return mean - half, mean + half
    z = 1.96
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def judge(records: list[dict[str, Any]], facts: dict[str, Any]) -> list[Verdict]:
    """Return all verdicts, the failures first.

    Args:
        facts: `families` (family -> policies), `floor`, `floor_reason`, `format_penalty`, `oracle`
            (its name or None), and `differences` between plays of the same turns.
    """
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_policy.setdefault(record["policy"], []).append(record)
    verdicts = [_errors(records), _oracle(by_policy, facts)]
    least, best = reward_range(by_policy)
    if best is not None and best > least:
        limit, origin = limit_of(facts, least, best)
        verdicts.append(_floor(facts, limit, origin))
        for family, names in facts["families"].items():
            records_of_family = {name: by_policy[name] for name in names if name in by_policy}
            if records_of_family:
                verdicts.append(_family(family, records_of_family, least, best, limit))
    verdicts += [_state(by_policy), _determinism(facts), time_and_size(records)]
    return sorted(verdicts, key=lambda verdict: WORST[verdict.state])


def reward_range(by_policy: dict[str, list[dict[str, Any]]]) -> tuple[float, float | None]:
    """Return the least mean reward of a policy, and the oracle's; None without an oracle."""
    means = {}
    for name, records in by_policy.items():
        means[name] = fmean(record["reward"] for record in records)
    best = means.pop(ORACLE, None)
    return min(means.values(), default=0.0), best


def limit_of(facts: dict[str, Any], least: float, best: float) -> tuple[float, str]:
    """Return the limit of a share, and who declared it."""
    if facts["floor"] is not None:
        return max(facts["floor"], LIMIT), "env.floor"
    penalty = facts["format_penalty"]
    if penalty and least < 0:
        # A wrong answer that is well formed saves the penalty: that is what the penalty is for.
        return max(LIMIT, penalty / (best - least)), f"env.format_penalty={penalty:g}"
    return LIMIT, "the default"


def _floor(facts: dict[str, Any], limit: float, origin: str) -> Verdict:
    text = f"play without skill may reach {limit:.3f} of the way to the oracle ({origin})"
    if origin == "env.floor" and limit > MOST_FLOOR and not facts["floor_reason"]:
        remedy = f"above {MOST_FLOOR} a reason is needed: env.floor_reason='...'"
        return Verdict("floor", "fail", f"{text}; {remedy}")
    if facts["floor_reason"]:
        text += f": {facts['floor_reason']}"
    return Verdict("floor", "ok", text)


def _errors(records: list[dict[str, Any]]) -> Verdict:
    failures = [record for record in records if record["error"]]
    if not failures:
        return Verdict("errors", "ok", f"none in {len(records)} episodes")
    first = failures[0]
    text = (
        f"{len(failures)} of {len(records)} episodes, first with {first['policy']!r}: "
        f"{' '.join(first['error'].split())[:300]}. Training leaves such episodes out, so "
        "a policy that causes one loses nothing"
    )
    return Verdict("errors", "fail", text, first["transcript"])


def _oracle(by_policy: dict[str, list[dict[str, Any]]], facts: dict[str, Any]) -> Verdict:
    least, best = reward_range(by_policy)
    if best is None:
        text = (
            "none, so rewards cannot be judged; name a function that plays well: "
            "--oracle FILE.py:FUNCTION"
        )
        return Verdict("oracle", "open", text)
    rewards = [record["reward"] for record in by_policy[ORACLE]]
    low, high = interval(rewards)
    weak = sum(reward <= least + ROUNDING for reward in rewards)
    text = (
        f"{facts['oracle']}: reward {best:.3f} ({low:.3f} to {high:.3f}, n={len(rewards)}); the "
        f"least mean reward of a policy is {least:.3f}"
    )
    if best <= least + ROUNDING:
        record = by_policy[ORACLE][0]
        return Verdict(
            "oracle", "fail", f"{text}: nothing can be learned from it", record["transcript"]
        )
    if weak:
        text += f"; no more than that in {weak} of {len(rewards)} questions"
    return Verdict("oracle", "ok", text)


def _family(
    family: str,
    played: dict[str, list[dict[str, Any]]],
    least: float,
    best: float,
    limit: float,
) -> Verdict:
    """Judge the policies of a family by its best-paid one."""
    findings = []
    for name, records in played.items():
        shares = [(record["reward"] - least) / (best - least) for record in records]
        # A reward that is 0 but for rounding is 0.
        shares = [round(share, 9) for share in shares]
        low, high = interval(shares)
        findings.append((low, fmean(shares), high, name, records))
    low, mean, high, name, records = max(findings, key=lambda finding: finding[:3])
    text = f"{name}: {mean:.3f} ({low:.3f} to {high:.3f}, n={len(records)})"
    most = max(records, key=lambda record: record["reward"])
    if low > limit + ROUNDING:
        others = [one for one in findings if one[0] > limit + ROUNDING and one[3] != name]
        if others:
            text += f"; also {', '.join(one[3] for one in others)}"
        text += f", above {limit:.3f}"
        if family == "random":
            # What guessing reaches may be the task's nature, as with yes and no.
            floor = math.ceil(100 * max(finding[0] for finding in findings)) / 100
            text += f"; if the task may pay as much for guesses, declare env.floor={floor:g}"
        return Verdict(family, "fail", text, most["transcript"] + [_ending(most)])
    widest = max(finding[2] for finding in findings)
    if widest > limit + ROUNDING:
        text += f"; n is too small to show that it stays below {limit:.3f} (up to {widest:.3f})"
        return Verdict(family, "open", text)
    return Verdict(family, "ok", text)


def _ending(record: dict[str, Any]) -> str:
    return f"reward {record['reward']:g} ({record['stop']}), question {record['question']}"


def _state(by_policy: dict[str, list[dict[str, Any]]]) -> Verdict:
    """Compare empty play before and after a success on the same question."""
    pairs = 0
    for name, records in by_policy.items():
        if not name.startswith(AFTER):
            continue
        before = {record["question"]: record for record in by_policy[name.removeprefix(AFTER)]}
        for record in records:
            first = before.get(record["question"])
            if first is None:
                continue
            pairs += 1
            if abs(first["reward"] - record["reward"]) > ROUNDING:
                text = (
                    f"the same turns earned {first['reward']:g} at first and "
                    f"{record['reward']:g} after a success: an episode changes the next one"
                )
                return Verdict(
                    "fresh state", "fail", text, record["transcript"] + [_ending(record)]
                )
    if not pairs:
        return Verdict("fresh state", "open", "no success to play after")
    return Verdict("fresh state", "ok", f"empty play earns the same after a success, {pairs} times")


def _determinism(facts: dict[str, Any]) -> Verdict:
    comparisons, differences = facts.get("compared", 0), facts.get("differences", [])
    if differences:
        text = (
            f"{len(differences)} of {comparisons} plays of the same turns differ; draw everything "
            f"random from the question's seed. First: {differences[0]['text']}"
        )
        return Verdict("determinism", "fail", text, differences[0]["transcript"])
    if not comparisons:
        return Verdict("determinism", "open", "not compared")
    return Verdict("determinism", "ok", f"{comparisons} plays of the same turns agree")


def time_and_size(records: list[dict[str, Any]]) -> Verdict:
    """Summarise wall time and size of steps."""
    seconds = sorted(second for record in records for second in record["seconds"])
    sizes = sorted(size for record in records for size in record["sizes"])
    if not seconds or not sizes:
        return Verdict("time and size", "open", "no step")
    late = seconds[int(0.95 * (len(seconds) - 1))]
    text = (
        f"a step takes {1000 * median(seconds):.1f} ms (median), {1000 * late:.1f} (95 %), "
        f"{1000 * seconds[-1]:.1f} (longest), n={len(seconds)}; an observation has "
        f"{median(sizes):.0f} characters (median), {sizes[-1]} (longest)"
    )
    return Verdict("time and size", "ok", text)
