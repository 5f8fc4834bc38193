"""The tables of README.md are those of measured.json."""

from __future__ import annotations

import json

from agent_r1_recipes.browser import measure


def test_the_readme_has_the_tables():
    text = measure.README.read_text()
    runs = json.loads(measure.FILE.read_text())
    made = measure.with_tables(text, runs, measure.list_switches())
    assert made == text, "python -m agent_r1_recipes.browser.measure --table"


def test_a_cold_start_ends_near_the_shipped_one():
    """It knows one search, and hardly solves two or three, as the shipped start."""
    runs = json.loads(measure.FILE.read_text())
    shipped = runs[measure.run_name("healthy", 1)]["before"]["hops_greedy"]
    names = [measure.run_name("healthy", seed, scratch=True) for seed in measure.HELD_BACK]
    found = [runs[name]["before"]["hops_greedy"] for name in names if name in runs]
    assert found
    for scores in found:
        assert all(abs(em - own) <= 0.05 for em, own in zip(scores, shipped, strict=True))
