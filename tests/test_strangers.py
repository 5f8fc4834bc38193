"""The page of attacks by strangers names a test in each row, and has every case."""

from __future__ import annotations

import re

import pytest
from runs import ROOT

PAGE = ROOT / "docs/lab/strangers.md"
NAMED = re.compile(r"\[`(test_\w+)`\]\(\.\./\.\./([\w/.]+\.py)\)")
CASES = "The cases of the review", "The older faults", "The planted faults", "Attacks of our own"


def rows_of(title: str) -> list[str]:
    [section] = re.findall(rf"^## {title}.*\n([^#]*)", PAGE.read_text(), re.MULTILINE)
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("title", CASES)
def test_each_row_names_a_test(title):
    """test_docs.py finds each in its file."""
    rows = rows_of(title)
    assert len(rows) >= 10
    for row in rows:
        last = row.strip("| ").rpartition(" | ")[2]
        assert NAMED.search(last) or last == "the same" or last.startswith("none: "), row


def test_no_case_of_the_review_is_left_out():
    text = "\n".join(rows_of(CASES[0]) + rows_of(CASES[1]))
    cases = [*(f"H{n}" for n in range(1, 8)), "T1", "T2", *(f"A{n}" for n in range(1, 7)), "P1"]
    cases += ["P2", "G1", "G2", "S1", "E1", "R1", "R2", "K1", "D1", "D2", "D3"]
    cases += [f"F{n}" for n in range(1, 11)]
    for case in cases:
        assert f"| {case} " in text, case
