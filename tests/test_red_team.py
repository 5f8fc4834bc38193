"""What policies without an answer get out of each reward (lab/experiments/red_team.py,
docs/safety.md)."""

from __future__ import annotations

import asyncio

import pytest
from building import trust
from judging import stand_in
from lab.experiments import red_team
from runs import ROOT
from serving import serving


@pytest.fixture(scope="module")
def table():
    with serving(stand_in([])) as url:
        trust(f"{url}/v1")
        return asyncio.run(red_team.table(f"{url}/v1"))


@pytest.mark.slow
def test_no_policy_is_paid_for_nothing(table):
    """None beats an honest wrong answer, and so none reaches half of a right one. Sub-EM and a
    judge have no bound."""
    assert len(red_team.POLICIES) >= 15
    known = {
        "em + calls": {"new calls in a turn": 0.3},
        "em + evidence": {"all titles in a query": 0.3},
    }  # docs/safety.md
    columns = {"em": 0, "math": 0, "em + calls": 0.05, "em + evidence": 0.15}
    for reward, call in columns.items():  # the honest make one call, which finds one of two titles
        assert (
            table["an honest right answer"][reward] == 1 + call
            and table["an honest wrong answer"][reward] == call
        )
        paid = {
            policy: row[reward]
            for policy, row in table.items()
            if reward in row and policy != "an honest right answer"
        }
        more = {policy: reward for policy, reward in paid.items() if reward > call}
        assert more == known.get(reward, {}), paid


@pytest.mark.slow
def test_sub_em_fails_and_the_table_says_by_how_much(table):
    paid = {policy for policy in red_team.POLICIES if table[policy]["sub_em"] >= 0.5}
    assert paid == {
        "a list of guesses",
        "this or that",
        "the document",
        "1,000 words in the answer",
    }
    assert (
        table["an order to the judge"]["judge"] == 1
    )  # a judge that reads badly does what it is told


@pytest.mark.slow
def test_the_table_of_the_docs_is_this_one(table):
    assert red_team.as_markdown(table) in (ROOT / "docs/lab/red-team.md").read_text()
