"""Write a task with 300 questions, their texts, and a demonstrator that errs.

AGENT_R1_HOME=/tmp/small python tests/small_task.py --seed 1    trains it with default settings
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

VENDORS = (
    "Acme", "Borel", "Cinto", "Dalby", "Ekman", "Foss", "Gerlo", "Hanso", "Ibers", "Jolit",
    "Kembo", "Lurna",
)  # fmt: skip
CITIES = ("Bonn", "Lyon", "Oslo", "Turin", "Ghent", "Porto", "Basel", "Malmo", "Cork", "Split")
DEMONSTRATOR = """
from agent_r1 import Hermes


def demonstrate(row, history, rng):
    answer = row["reward_model"]["ground_truth"][0]
    if rng.random() < 0.5:
        answer = rng.choice(row["extra_info"]["metadata"]["values"])
    return Hermes.answer(answer)
"""
"""It is right in about six of ten plays, and otherwise names another field of the invoice."""


def questions(count: int) -> list[dict]:
    """Make questions about one field of an invoice, which stands before the question."""
    rng = random.Random(0)
    records: dict[str, dict] = {}
    while len(records) < count:
        fields = {
            "vendor": rng.choice(VENDORS),
            "city": rng.choice(CITIES),
            "total": str(rng.randrange(10, 100)),
            "days": str(rng.randrange(10, 100)),
        }
        name = rng.choice(list(fields))
        invoice = ", ".join(f"{key} {value}" for key, value in fields.items())
        text = f"Invoice: {invoice}. What is the {name}?"
        metadata = {"values": list(fields.values())}
        records[text] = {"question": text, "answer": fields[name], "metadata": metadata}
    return list(records.values())


def write(folder: Path, count: int = 300) -> list[str]:
    """Write the task's two files. Return the words of `agent-r1 train` that train it."""
    lines = [json.dumps(record) + "\n" for record in questions(count)]
    (folder / "questions.jsonl").write_text("".join(lines))
    (folder / "demonstrator.py").write_text(DEMONSTRATOR)
    return [
        "grpo", "--preset=small", "--plain", "--run=small",
        "env.name=hermes", "env.tools=[]", "env.max_turns=1",
        "data.name=rows", f"data.source={folder / 'questions.jsonl'}",
        f"data.train={count * 2 // 3}", f"data.val={count // 6}", f"data.test={count // 6}",
        f"cold_start.demonstrator={folder / 'demonstrator.py'}:demonstrate",
        "trainer.threads=1",
    ]  # fmt: skip


if __name__ == "__main__":
    from agent_r1.app.cli import main
    from agent_r1.ground.files import home

    home().mkdir(parents=True, exist_ok=True)
    sys.exit(main(["train", *write(home()), *sys.argv[1:]]))
