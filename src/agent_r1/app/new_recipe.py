"""Write a recipe to start from: `agent-r1 new FOLDER`.

In: a folder's name. Out: the folder, filled from `template/`, and the next commands. Its task is
arithmetic with a calculator, which a new model learns in two minutes.
"""

from __future__ import annotations

import json
import random
import shlex
from importlib import resources
from pathlib import Path

from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import whole
from agent_r1.ground.ui import say

TEMPLATE_FILES = (
    "README.md",
    "tool.py",
    "env.py",
    "demonstrator.py",
    "preset.yaml",
    "test_task.py",
)


def write_recipe(folder: Path) -> None:
    """Write the template and its questions to a new folder. Raises AgentR1Error if it exists."""
    if folder.exists():
        raise AgentR1Error(f"{folder} already exists; choose another name", code="already_exists")
    if not folder.name.isprintable():  # a line break would end a comment in preset.yaml
        raise AgentR1Error(
            f"{str(folder)!r} has a line break or a control character; choose another name",
            code="bad_name",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    shell_name = shlex.quote(str(folder))
    with whole(folder) as part:
        part.mkdir()
        for name in TEMPLATE_FILES:
            text = (resources.files("agent_r1.app") / "template" / name).read_text(encoding="utf-8")
            (part / name).write_text(
                text.replace("NAME", folder.name).replace("FOLDER", shell_name)
            )
        lines = (
            json.dumps({"question": q, "answer": a}) + "\n"
            for q, a in arithmetic(random.Random(0), 1800)
        )
        (part / "questions.jsonl").write_text("".join(lines))
    say(f"{folder}: {', '.join(TEMPLATE_FILES)}, questions.jsonl. Now, in this order:")
    for words in (
        "data",
        "cold-start",
        "eval --before grpo",
        "train grpo",
        "eval grpo",
        "report grpo",
        "chat",
    ):
        command, *rest = words.split()
        say(f"  agent-r1 {' '.join([command, *rest])} --recipe {shell_name}")
    say(
        f"and at any time: agent-r1 tools --recipe {shell_name}; "
        f"agent-r1 try --recipe {shell_name}; "
        f"python -m pytest {shell_name}"
    )


def arithmetic(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Return (question, answer) pairs: a quarter have one operation, the others two."""
    answers: dict[str, str] = {}
    while len(answers) < count:
        a, b, c = (rng.randrange(2, 100) for _ in range(3))
        first = rng.choice("+-*")
        second = rng.choice("+-")
        value = {"+": a + b, "-": a - b, "*": a * b}[first]
        if rng.random() < 0.25:
            answers[f"What is {a} {first} {b}?"] = str(value)
            continue
        question = f"What is ({a} {first} {b}) {second} {c}?"
        value += c if second == "+" else -c
        answers[question] = str(value)
    return list(answers.items())
