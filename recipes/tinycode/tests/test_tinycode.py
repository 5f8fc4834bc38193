"""TinyCode: the programs are right, the misses are misses, and no number of the test was seen in
training."""

from __future__ import annotations

import random
import re
from itertools import combinations

import pytest
from building import demonstrated, row_of

from agent_r1 import Workspace, load_config
from agent_r1_recipes.tinycode import demonstrator
from agent_r1_recipes.tinycode.questions import KINDS, questions


@pytest.fixture(scope="module")
def tools():
    return Workspace(load_config("tinycode")).load_tools()


def split(name: str, count: int, seed: int = 0) -> list[dict]:
    return list(questions(name, count, random.Random(seed)))


def test_no_number_and_no_program_of_the_test_occurs_in_training():
    numbers = {
        name: {int(n) for q in split(name, 400) for n in re.findall(r"\d{2,}", q["question"])}
        for name in ("train", "val", "test")
    }
    assert not any(numbers[a] & numbers[b] for a, b in combinations(numbers, 2))
    programs = {
        name: {q["metadata"]["program"] for q in split(name, 400)} for name in ("train", "test")
    }
    assert not programs["train"] & programs["test"]
    # A digit that never stood last in training would not be copied from there in the test.
    assert {n % 10 for n in numbers["train"]} == {n % 10 for n in numbers["test"]} == set(range(10))


def test_a_seed_gives_the_same_questions_again_and_another_seed_gives_others():
    assert split("test", 50) == split("test", 50) != split("test", 50, seed=1)
    asked = split("train", 500)
    assert len({q["question"] for q in asked}) == 500 and {q["kind"] for q in asked} == set(KINDS)


def test_each_program_prints_the_answer_and_a_miss_hardly_ever_does(tools):
    asked = split("test", 15)
    programs = [
        [f"print({text})" for text in (q["metadata"]["program"], *q["metadata"]["misses"])]
        for q in asked
    ]
    printed = [[tools["python"].execute({"code": code}) for code in four] for four in programs]
    assert [first for first, *_ in printed] == [q["answer"] for q in asked]
    misses = [
        miss == q["answer"] for (_, *rest), q in zip(printed, asked, strict=True) for miss in rest
    ]
    assert sum(misses) <= 1 and len(misses) >= 45


@pytest.mark.parametrize("offered", [True, False], ids=["with Python", "without"])
def test_a_demonstrator_that_misses_nothing_is_always_right(tools, monkeypatch, offered):
    """Without the tool it is told the answers."""
    monkeypatch.setattr(demonstrator, "RIGHT", float(offered))
    rows = [row_of(question) for question in split("train", 12)]
    played = demonstrated(load_config("tinycode"), rows, tools if offered else {})
    assert [episode.score for episode in played] == [1.0] * 12
