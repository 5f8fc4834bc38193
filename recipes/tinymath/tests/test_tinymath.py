"""TinyMath: the steps come to the answer, stopping early does not, and no number of the test was seen in training."""

from __future__ import annotations

import asyncio
import random
import re

from agent_r1.config import load_config
from agent_r1.core import Action
from agent_r1.env import make_env
from agent_r1.tool import make_tools
from agent_r1.tool.calculator import value_of
from agent_r1_recipes.tinymath import demonstrator
from agent_r1_recipes.tinymath.questions import KINDS, questions


def split(name: str, count: int, seed: int = 0) -> list[dict]:
    return list(questions(name, count, random.Random(seed)))


def results(question: dict) -> list[int]:
    """What each step comes to."""
    found: list[int] = []
    for step in question["metadata"]["steps"]:
        found.append(value_of(step.replace("#", str(found[-1]) if found else "#")))
    return found


def test_no_number_of_the_test_occurs_in_training_and_its_digits_stand_everywhere_there():
    numbers = {
        name: {n for q in split(name, 1000) for n in re.findall(r"\d+", q["question"])}
        for name in ("train", "val", "test")
    }
    assert sum(map(len, numbers.values())) == len(set().union(*numbers.values())) > 800
    for place in range(3):  # else copying a test number would take what was never practised
        assert {n[place] for n in numbers["test"]} <= {n[place] for n in numbers["train"]}


def test_a_world_is_the_same_again_and_another_for_another_seed():
    assert split("test", 50) == split("test", 50) != split("test", 50, seed=1)
    asked = split("train", 500)
    assert len({q["question"] for q in asked}) == 500 and {q["kind"] for q in asked} == set(KINDS)


def test_the_last_step_comes_to_the_answer_and_the_first_never_does():
    for question in split("test", 100):
        first, *_, last = results(question)
        assert str(last) == question["answer"] != str(first)


def played(question: dict, tools: list[str]) -> tuple[float, int]:
    """(reward, calls) of the demonstrator."""
    row = {
        "prompt": [{"role": "user", "content": question["question"]}],
        "agent_name": "hermes",
        "env_kwargs": {"tools": None},
        "extra_info": {"metadata": question["metadata"]},
        "reward_model": {"ground_truth": [question["answer"]]},
    }
    env, history = make_env(row, make_tools(tools), load_config("tinymath").env), []
    env.reset(row)
    for calls in range(5):
        turn = demonstrator.demonstrate(row, history, random.Random(0))
        result = asyncio.run(env.step(Action(turn)))
        if result.done:
            return env.outcome(result.stop_reason).reward, calls
        history += [{"role": "assistant", "content": turn}, *result.observation.messages]
    raise AssertionError("the demonstrator came to no end")


def test_a_demonstrator_that_goes_on_is_right_and_one_that_stops_is_not(monkeypatch):
    asked = split("train", 20)
    monkeypatch.setattr(demonstrator, "GO_ON", 1.0)
    assert [played(q, ["calculator"]) for q in asked] == [(1.0, len(q["metadata"]["steps"])) for q in asked]
    monkeypatch.setattr(demonstrator, "GO_ON", 0.0)
    assert [played(q, ["calculator"]) for q in asked] == [(0.0, 1)] * 20


def test_without_a_calculator_it_is_shown_the_answers():
    assert [played(q, []) for q in split("train", 5)] == [(1.0, 1)] * 5
