"""The shop: what its demonstrator does and earns, and the size that its README states."""

from __future__ import annotations

import random
import re
from pathlib import Path

from building import demonstrated, row_of, tools_of, trust

from agent_r1 import load_config
from agent_r1_recipes.restock.demonstrator import questions

FOLDER = Path(__file__).parents[1]


def test_an_order_of_the_difference_is_paid_and_the_demonstrator_is_sometimes_right():
    config = load_config("restock")
    trust(*config.env.tools)
    rows = [
        row_of(question, config.env.name) for question in questions("train", 200, random.Random(0))
    ]
    played = demonstrated(config, rows, tools_of(*config.env.tools))
    called = [
        [turn["content"].split('"')[3] for turn in p.messages if turn["role"] == "assistant"]
        for p in played
    ]
    assert {
        p.score
        for p, names in zip(played, called, strict=True)
        if names == ["count", "missing", "order"]
    } == {1.0}
    assert 0.2 < sum(p.score for p in played) / len(played) < 0.5


def test_the_python_is_as_short_as_the_readme_says():
    texts = [
        re.sub(r'\A""".*?"""', "", path.read_text(), flags=re.DOTALL)
        for path in sorted(FOLDER.glob("*.py"))
    ]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    assert f"in {len(lines)} lines of Python" in (FOLDER / "README.md").read_text()
