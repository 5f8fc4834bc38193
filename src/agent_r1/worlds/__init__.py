"""Room worlds: whole tasks, in the shape that `agent-r1 new` writes.

geohop/      questions about real countries and cities (docs/geohop.md)
tinymath/    sums in words, and a calculator (docs/tinymath.md)
tinycode/    small problems, and the tool that runs Python (docs/tinycode.md)
tinyquest/   a house to search, in the manner of ALFWorld (docs/tinyquest.md)
template/    what `agent-r1 new` copies: arithmetic with a calculator, which a model from nothing learns in two minutes
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from agent_r1.errors import AgentR1Error
from agent_r1.files import whole
from agent_r1.ui import say

FILES = ("tool.py", "env.py", "demonstrator.py", "preset.yaml", "test_task.py")


FIFTHS = {"train": (0, 3), "val": (3, 4), "test": (4, 5)}
"""Whose numbers are whose, once they have been shuffled."""


def dealt(numbers: range, split: str) -> list[int]:
    """The numbers of a split, so that no number of a test problem occurs in a training problem. Dealt out at random: a digit
    that never stood last in training would not be copied from there in the test."""
    first, last = (len(numbers) * fifths // 5 for fifths in FIFTHS[split])
    return random.Random(0).sample(numbers, len(numbers))[first:last]


def distinct(count: int, draw: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`count` questions that `draw` makes, no two alike."""
    asked: set[str] = set()
    while len(asked) < count:
        drawn = draw()
        if drawn["question"] not in asked:
            asked.add(drawn["question"])
            yield drawn


def write_task(folder: Path) -> None:
    """A new folder with the template and its questions. Raises AgentR1Error where something is there already."""
    if folder.exists():
        raise AgentR1Error(f"{folder} exists already; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole(folder) as part:
        part.mkdir()
        for name in FILES:
            (part / name).write_text((resources.files(__name__) / "template" / name).read_text(encoding="utf-8"))
        lines = (json.dumps({"question": q, "answer": a}) + "\n" for q, a in arithmetic(random.Random(0), 1800))
        (part / "questions.jsonl").write_text("".join(lines))
    preset, quoted = shlex.quote(str(folder / "preset.yaml")), shlex.quote(str(folder))
    say(f"{folder}: {', '.join(FILES)}, questions.jsonl. Now, in this order:")
    for words in ("data", "cold-start", "eval --before grpo", "train grpo", "eval grpo", "report grpo", "chat"):
        command, *rest = words.split()
        say(f"  agent-r1 {' '.join([command, *rest])} --preset {preset}")
    say(f"and at any time: agent-r1 tools --preset {preset}; agent-r1 try --preset {preset}; python -m pytest {quoted}")


def arithmetic(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """(question, answer): one calculation in four takes one step, the others two."""
    found: dict[str, str] = {}
    while len(found) < count:
        a, b, c = (rng.randrange(2, 100) for _ in range(3))
        first, second = rng.choice("+-*"), rng.choice("+-")
        left = {"+": a + b, "-": a - b, "*": a * b}[first]
        if rng.random() < 0.25:
            found[f"What is {a} {first} {b}?"] = str(left)
        else:
            found[f"What is ({a} {first} {b}) {second} {c}?"] = str(left + c if second == "+" else left - c)
    return list(found.items())
