"""The support desk: what the policy demands, what the demonstrator earns, and the agent's texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from building import demonstrated, row_of

from agent_r1 import load_config
from agent_r1_recipes.support.demonstrator import expert
from agent_r1_recipes.support.env import Support
from agent_r1_recipes.support.tasks import POLICY, RIGHT_ACTIONS, WORDS, questions

FOLDER = Path(__file__).parents[1]


def tasks(split: str = "test", count: int = 60) -> list[dict]:
    return list(questions(split, count, random.Random(0)))


def begin(task: dict) -> Support:
    world = Support()
    world.reset(**task["metadata"])
    return world


def test_no_order_number_is_in_two_splits():
    numbers = {}
    for split in ("train", "val", "test"):
        numbers[split] = set()
        for task in tasks(split, 200):
            numbers[split] |= set(json.loads(task["metadata"]["orders"]))
    assert not numbers["train"] & numbers["test"] and not numbers["train"] & numbers["val"]


def solve(world: Support, task: dict) -> tuple[str, dict]:
    """Do what the policy demands; return the action and the order's record."""
    order = task["metadata"]["order"]
    record = json.loads(task["metadata"]["orders"])[str(order)]
    assert world.look_up(order) == f"{record['item']}, {record['price']} dollars, {record['state']}"
    action = RIGHT_ACTIONS[task["kind"], record["state"]]
    if action == "refund":
        world.refund(order, record["price"])
    if action == "replace":
        world.replace(order)
    return action, record


def test_only_the_right_records_and_a_true_answer_are_paid():
    seen = set()
    for task in tasks():
        order = task["metadata"]["order"]
        other = next(int(n) for n in json.loads(task["metadata"]["orders"]) if int(n) != order)
        world = begin(task)
        action, record = solve(world, task)
        seen.add((task["kind"], record["state"]))
        told = f"{WORDS[action]} the {record['item']}"
        assert world.get_reward(f"{told.capitalize()}.") == 1.0
        wrong_words = [words for words in WORDS.values() if words != WORDS[action]]
        assert world.get_reward(f"{wrong_words[0]} the {record['item']}") == 0.0
        assert world.get_reward(f"{told} {wrong_words[0]} the {record['item']}") == 0.0
        assert world.get_reward(WORDS[action]) == world.get_reward("") == 0.0
        world.refund(order, 1)  # too much
        assert world.get_reward(told) == 0.0
        world = begin(task)
        solve(world, task)
        world.replace(other)  # an order of somebody else
        assert world.get_reward(told) == 0.0
    assert seen == set(RIGHT_ACTIONS)


def test_an_episode_has_its_own_records():
    task = tasks()[0]
    first, second = begin(task), begin(task)
    first.replace(task["metadata"]["order"])
    assert second.sent == [] and second.look_up(1) == second.refund(1, 5) == "no such order"


@pytest.fixture(scope="module")
def config():
    return load_config("support")


def played(config, function=None):
    rows = [row_of(task, config.env.name) for task in tasks("train", 300)]
    if function is not None:
        name = f"{function.__module__}:{function.__name__}"
        cold_start = config.cold_start.model_copy(update={"demonstrator": name})
        config = config.model_copy(update={"cold_start": cold_start})
    return demonstrated(config, rows, {})


def test_the_demonstrator_is_sometimes_right_and_the_expert_always(config):
    scores = [episode.score for episode in played(config)]
    assert 0.4 < sum(scores) / len(scores) < 0.65
    assert {episode.score for episode in played(config, expert)} == {1.0}


def test_the_agent_shows_the_policy_of_the_world():
    """The agent is a file of its own, without our modules, so its policy is a copy."""
    text = (FOLDER / "agent.py").read_text()
    assert POLICY in text and "agent_r1" not in text.replace("AGENT_R1", "")
