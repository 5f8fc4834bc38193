"""Conditions of an evaluation that TinyHop adds."""

from __future__ import annotations

import pytest
from conftest import fails_with
from runs import TINY

from agent_r1 import Workspace, load_config
from agent_r1_recipes.laptop.conditions import Hops


@pytest.fixture
def config(produced, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(produced))
    return load_config("small", TINY[1:])


def test_longer_chains_are_asked_about_the_world_of_the_test(config):
    rows = Workspace(config).load_rows("test")
    longer, _ = Hops("4").apply(config, rows, dict)
    passages = {passage.title for passage in Workspace(config).load_passages()}
    questions = {row["prompt"][-1]["content"] for row in longer}
    assert len(questions) == len(rows)
    for row, old in zip(longer, rows, strict=True):
        entities = [lookup["entity"] for lookup in row["extra_info"]["lookups"]]
        assert row["extra_info"]["hops"] == len(entities) == 4 and passages.issuperset(entities)
        assert row["prompt"][:-1] == old["prompt"][:-1]
        assert row["reward_model"]["style"] == old["reward_model"]["style"]


@pytest.mark.parametrize("argument", ["", "0", "x"])
def test_a_number_of_hops_is_needed(config, argument):
    with fails_with("unfit_condition"):
        Hops(argument).apply(config, Workspace(config).load_rows("test"), dict)


def test_other_data_have_no_hops():
    config = load_config("tinymath", [])
    with fails_with("unfit_condition"):
        Hops("4").apply(config, [], dict)
