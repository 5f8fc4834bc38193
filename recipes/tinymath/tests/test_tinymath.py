"""TinyMath: the steps come to the answer, stopping early does not, and no number of the test was
seen in training."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from building import demonstrated, row_of
from conftest import fails_with

from agent_r1 import Workspace, load_config
from agent_r1_recipes.tinymath import demonstrator
from agent_r1_recipes.tinymath.draw import distinct
from agent_r1_recipes.tinymath.questions import KINDS, questions

CONFIG = load_config("tinymath")
TOOLS = Workspace(CONFIG).load_tools()


def split(name: str, count: int, seed: int = 0) -> list[dict]:
    return list(questions(name, count, random.Random(seed)))


def test_no_number_of_the_test_occurs_in_training_and_its_digits_stand_everywhere_there():
    numbers = {
        name: {n for q in split(name, 1000) for n in re.findall(r"\d+", q["question"])}
        for name in ("train", "val", "test")
    }
    assert sum(map(len, numbers.values())) == len(set().union(*numbers.values())) > 800
    for place in range(3):  # else copying a test number would take what was never practised
        assert {n[place] for n in numbers["test"]} <= {n[place] for n in numbers["train"]}


@pytest.mark.parametrize("count", [7, 10])
def test_all_questions_of_a_task_are_found_and_no_more_are_waited_for(count):
    rng = random.Random(0)

    def draw() -> dict:
        return {"question": str(rng.randrange(10))}

    assert len({one["question"] for one in distinct(count, draw)}) == count
    with fails_with("too_few_questions", match="only 10 different"):
        list(distinct(11, draw))


def test_a_seed_gives_the_same_questions_again_and_another_seed_gives_others():
    assert split("test", 50) == split("test", 50) != split("test", 50, seed=1)
    asked = split("train", 500)
    assert len({q["question"] for q in asked}) == 500 and {q["kind"] for q in asked} == set(KINDS)


def test_the_last_step_comes_to_the_answer_and_the_first_never_does():
    for question in split("test", 100):
        found = ["#"]
        for step in question["metadata"]["steps"]:
            asked = {"expression": step.replace("#", found[-1])}
            found.append(asyncio.run(TOOLS["calculator"].execute(asked)))
        assert found[-1] == question["answer"] != found[1]


def test_a_demonstrator_that_goes_on_is_right_and_one_that_stops_is_not(monkeypatch):
    asked = split("train", 20)
    for go_on, score in ((1.0, 1.0), (0.0, 0.0)):
        monkeypatch.setattr(demonstrator, "GO_ON", go_on)
        played = demonstrated(CONFIG, [row_of(q) for q in asked], TOOLS)
        calls = [
            sum(message["role"] == "tool" for message in episode.messages) for episode in played
        ]
        assert [episode.score for episode in played] == [score] * 20
        assert calls == [len(q["metadata"]["steps"]) if go_on else 1 for q in asked]


def test_without_a_calculator_it_is_shown_the_answers():
    played = demonstrated(CONFIG, [row_of(q) for q in split("train", 5)])
    assert [episode.score for episode in played] == [1.0] * 5
