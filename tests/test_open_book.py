"""lab/experiments/open_book.py: what its examples hold back, and the rows of the page."""

from __future__ import annotations

from lab.experiments import open_book
from runs import ROOT

from agent_r1_recipes.geohop.solver import read_facts, solve


def test_the_kept_looks_give_the_table_of_the_page(capsys):
    open_book.print_table()
    rows = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/lab/worlds.md").read_text()
    assert len(rows) == len(open_book.ARMS)
    assert [row for row in rows if row not in page] == []


def test_an_example_in_words_is_answered_by_its_own_passages():
    for example in open_book.ARMS["words"]("val", 40):
        lines = example.question.context.splitlines()
        facts = read_facts(lines)
        places = [place for relation, place in facts if relation == "inhabitants"]
        assert solve(places, ["more"], facts) == ({example.question.answer[0]}, None)
        number = example.thought.rpartition("more: ")[2]
        assert facts["inhabitants", example.question.answer[0]] == {number}


def test_held_out_neighbours_are_other_pairs():
    pairs = {}
    for split, count in (("train", 200), ("val", open_book.HELD_OUT_PAIRS)):
        pairs[split] = set()
        for example in open_book.neighbours(split, count):
            facts = read_facts(example.question.context.splitlines())
            places = frozenset(place for _, place in facts)
            assert solve(sorted(places), ["both"], facts) == ({example.question.answer[0]}, None)
            pairs[split].add(places)
    assert len(pairs["val"]) == open_book.HELD_OUT_PAIRS
    assert not pairs["train"] & pairs["val"]
