"""Tables of the logbooks are those that their records give (lab/experiments/logbooks.py)."""

from __future__ import annotations

import json
import re

import pytest
from lab.experiments import logbooks
from lab.rehearsals.mutation import FAULTS


@pytest.mark.parametrize("page", logbooks.TABLES)
def test_tables_are_those_of_the_records(page):
    text = (logbooks.ROOT / page).read_text()
    assert text == logbooks.page_of(page), "run `python -m lab.experiments.logbooks`"


def test_every_pair_of_marks_is_filled():
    for page, tables in logbooks.TABLES.items():
        marks = re.findall(r"<!-- (.+): begin -->", (logbooks.ROOT / page).read_text())
        assert sorted(marks) == sorted(tables), page


def test_only_the_text_between_the_marks_changes():
    page = "before\n<!-- x.json: begin -->\nold\n<!-- x.json: end -->\nafter\n"
    new = logbooks.fill(page, "x.json", "| new |")
    assert new == "before\n<!-- x.json: begin -->\n\n| new |\n\n<!-- x.json: end -->\nafter\n"
    assert logbooks.fill(new, "x.json", "| new |") == new


@pytest.mark.parametrize(
    "page",
    [
        "no marks",
        "<!-- x.json: begin -->\nno end",
        2 * "<!-- x.json: begin -->\nold\n<!-- x.json: end -->\n",
    ],
)
def test_marks_must_be_there_once(page):
    with pytest.raises(ValueError, match="once"):
        logbooks.fill(page, "x.json", "| new |")


def test_a_stale_page_is_named_and_not_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- x.json: begin -->\n| .902 |\n<!-- x.json: end -->\n")
    monkeypatch.setattr(logbooks, "ROOT", tmp_path)
    monkeypatch.setattr(logbooks, "TABLES", {"page.md": {"x.json": lambda: "| .926 |"}})
    assert logbooks.main(["--check"]) == 1
    assert capsys.readouterr().out == "page.md\n"
    assert ".902" in page.read_text()
    assert logbooks.main([]) == 0
    assert ".926" in page.read_text()
    assert logbooks.main(["--check"]) == 0


def test_a_race_of_two_records_has_one_table(tmp_path, monkeypatch):
    """Seeds of one arm stand in both; an arm that never arrives has no median."""

    def record(arm, seed, episodes, score, seconds):
        line = {"seed": seed, "episodes": episodes, "seconds": episodes and 5.0}
        line |= {"scores": [[576, 0.0], [1152, score]], "training_seconds": seconds}
        return {"stair": {"arms": {arm: [line], "ppo": []}}}

    (tmp_path / "race").mkdir()
    arm = "reinforce+++actor.lr=5e-4+actor.minibatches=4"
    for name, figures in {
        "first": record(arm, 101, 576, 0.25, 10.0),
        "later": record(arm, 102, None, 0.5, 20.0),
    }.items():
        (tmp_path / "race" / f"{name}.json").write_text(json.dumps(figures))
    monkeypatch.setattr(logbooks, "LAB", tmp_path)
    row = "| reinforce++ lr=5e-4 minibatches=4 | 2 | 1 | never | 0.375 |"
    assert logbooks.tinyhop_race_table("first", "later").splitlines()[2:] == [row]
    with_seconds = logbooks.tinyhop_race_table("first", "later", seconds="s")
    assert with_seconds.splitlines()[2:] == [f"{row} 15.0 |"]


def test_the_page_of_make_long_counts_the_faults():
    text = (logbooks.LAB / "long.md").read_text()
    assert f"The list has {len(FAULTS)} faults now." in text
