"""Make the microscopes of the lessons, on the numbers that the lessons compute by hand.

In: the recorded group and the numbers below, which a test compares with the lessons' tables. Out: a step for each name.
Next: docs/site/hooks.py replaces each `<!-- microscope: NAME -->` by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent_r1_recipes.page.microscope import POLICY, TOOL, read_step

Step = dict[str, Any]


def row(
    name: str,
    tokens: Sequence[str],
    rewards: Sequence[float],
    mask: Sequence[int] | None = None,
    ratios: Sequence[float] | None = None,
    logprobs: Sequence[float] | None = None,
    values: Sequence[float] | None = None,
    states: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Step:
    """Describe one attempt; `ratios` are the trainer's probabilities over the sampler's after one step."""
    n = len(tokens)
    mask, logprobs = mask or [1] * n, logprobs or [0.0] * n
    later = [[old + math.log(ratio) for old, ratio in zip(logprobs, ratios, strict=True)]] if ratios else []
    return {
        "name": name, "tokens": tokens, "rewards": rewards, "mask": mask, "logprobs": logprobs, "later": later,
        "authors": [POLICY if acted else TOOL for acted in mask], "values": values, "states": states or [0] * n,
        "steps": steps or [0 if acted else -1 for acted in mask], "baseline": None, "group": "q",
    }  # fmt: skip


def step(layer: str, rows: Sequence[Step], **settings: Any) -> Step:
    """Describe a group; each row is a trajectory."""
    rows = [row | {"trajectory": number} for number, row in enumerate(rows)]
    return {"settings": {"layer": layer, **settings}, "rows": rows}


def recorded(group: Path, layer: str, only: int | None = None, **settings: Any) -> Step:
    """Show the group of lessons 1 to 3, or one of its attempts."""
    found = read_step(group)
    rows = found["rows"] if only is None else [found["rows"][only]]
    return found | {"rows": rows, "settings": {"layer": layer, **settings}}


def answers() -> Step:
    paid = {"The Landir.": 1, "Landir or Bumvel": 0, "Bumvel": 0, "Landir (malformed)": 0.8, "(none)": -0.2}
    return step("reward", [row(said, [said], [reward]) for said, reward in paid.items()])


def calls() -> Step:
    said = ['search "Sosnum"', "result", 'search "Sosnum"', "result", 'search "Bumvel"', "result", "not JSON", "error"]
    paid, mask = [0.1, 0, 0, 0, 0.1, 0, -0.1, 0], [1, 0] * 4
    turns = [turn // 2 if acted else -1 for turn, acted in enumerate(mask)]
    return step("reward", [row("four calls", said, paid, mask, steps=turns)], estimator="ppo", normalizeStd=False)


def gae() -> Step:
    said = ["call"] * 3 + ["result"] * 4 + ["answer"] * 3
    mask, values = [1] * 3 + [0] * 4 + [1] * 3, [0.2, 0.3, 0.4, 0, 0, 0, 0, 0.5, 0.6, 0.8]
    steps = [0] * 3 + [-1] * 4 + [1] * 3
    only = row("one episode", said, [0] * 9 + [1], mask, values=values, steps=steps)
    return step("advantage", [only], estimator="ppo", lam=0.5, normalizeStd=False)


def four() -> Step:
    return step("advantage", [row(f"rollout {i}", ["answer"], [s]) for i, s in enumerate([1, 1, 0, -0.2], 1)])


def clip() -> Step:
    cases = [(1, 0.7), (1, 1), (1, 1.2), (1, 1.5), (-1, 0.7), (-1, 1), (-1, 1.5), (-1, 4)]
    rows = [row(f"ratio {ratio:g}", ["token"], [A], ratios=[ratio]) for A, ratio in cases]
    return step("gradient", rows, estimator="reinforce++", normalizeStd=False, age=1)


def collapsed() -> Step:
    said, mask = ['search "Pir"', "result", "Mirvel"], [1, 0, 1]
    rows = [row(f"attempt {i}", said, [0] * 3, mask, steps=[0, -1, 1]) for i in range(1, 5)]
    return step("advantage", rows)


def spans() -> Step:
    said, mask, ratios = ["call"] * 3 + ["result"] + ["answer"] * 2, [1, 1, 1, 0, 1, 1], [1.1, 1.2, 1.4, 1, 0.9, 0.8]
    only = row("one row", said, [0] * 5 + [1], mask, ratios, steps=[0, 0, 0, -1, 1, 1])
    return step("gradient", [only], estimator="reinforce++", normalizeStd=False, age=1)


def house() -> Step:
    hall, kitchen = ("hall", 0, 0.25), ("kitchen", 1, 0.5)
    attempts = [([hall, kitchen], [0, 1]), ([hall, kitchen], [0, 0]), ([hall], [0]), ([hall], [0])]
    rows = []
    for number, (rooms, rewards) in enumerate(attempts, 1):
        said, states, values = (list(column) for column in zip(*rooms, strict=True))
        rows.append(
            row(f"attempt {number}", said, rewards, values=values, states=states, steps=list(range(len(rooms))))
        )
    return step("advantage", rows, estimator="steppo", lam=0, normalizeStd=False)


def drift() -> Step:
    trainer, stale = [0.5, 0.3, 0.15, 0.05], [0.6, 0.3, 0.08, 0.02]
    rows = [
        row(f"token {letter}", [letter], [1], ratios=[now / then], logprobs=[math.log(then)])
        for letter, now, then in zip("abcd", trainer, stale, strict=True)
    ]
    return step("gradient", rows, estimator="reinforce++", normalizeStd=False, age=1, loss="truncated weights")


def lesson_steps(group: Path) -> dict[str, Callable[[], Step]]:
    """Map each name of a lesson's microscope to what makes its step."""
    return {
        "rollout": lambda: recorded(group, "author", only=1), "masks": lambda: recorded(group, "mask"),
        "answers": answers, "calls": calls, "gae": gae, "four": four, "clip": clip, "collapsed": collapsed,
        "spans": spans, "house": house, "drift": drift,
    }  # fmt: skip
