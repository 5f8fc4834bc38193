"""TinyQuest: plans are shortest, splits share no rooms, chance does not get far, and the state has
a name."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from statistics import fmean

import pytest
from building import row_of, trust
from conftest import ScriptedPolicy, make_env_loop

from agent_r1 import Sampling, StopReason, Task, load_config, make_env, run_episodes
from agent_r1_recipes.tinyquest import demonstrator
from agent_r1_recipes.tinyquest.env import NO, TinyQuest
from agent_r1_recipes.tinyquest.quests import PLAN_LENGTHS, plan_of, questions, solve


def split(name: str, count: int, seed: int = 0) -> list[dict]:
    return list(questions(name, count, random.Random(seed)))


def world_of(quest: dict) -> TinyQuest:
    world = TinyQuest()
    world.reset(**quest["metadata"])
    return world


def plan(quest: dict) -> list[tuple[str, str]]:
    house, *goal = quest["metadata"].values()
    return solve(json.loads(house), *goal)


def test_no_room_plan_is_in_two_splits_and_a_seed_gives_the_same_quests_again():
    plans = {
        name: {plan_of(json.loads(q["metadata"]["house"])) for q in split(name, 400)}
        for name in ("train", "val", "test")
    }
    assert (
        not plans["train"] & plans["test"]
        and not plans["train"] & plans["val"]
        and not plans["val"] & plans["test"]
    )
    assert min(map(len, plans.values())) > 300  # of 400 houses
    assert split("test", 30) == split("test", 30) != split("test", 30, seed=1)
    assert {q["kind"] for q in split("test", 30)} == {"put", "wash"}


def test_every_plan_solves_its_quest():
    for quest in split("train", 200):
        world, steps = world_of(quest), plan(quest)
        assert len(steps) in PLAN_LENGTHS
        for name, noun in steps:
            assert not world.done and (name, noun) in world._legal()
            getattr(world, name)(noun)
        assert world.done and world.get_reward() == 1.0


def test_no_plan_is_shorter():
    """Against a search through everything that can be done."""
    short = [quest for quest in split("train", 60) if len(plan(quest)) <= 7]
    for quest in short[:3] + [quest for quest in short if quest["kind"] == "wash"][:1]:
        layer, met, steps = [world_of(quest)], set(), 0
        while not any(world.solved for world in layer):
            following = []
            for world in layer:
                for name, noun in () if world.done else world._legal():
                    other = copy.deepcopy(world)
                    getattr(other, name)(noun)
                    if other.solved or (not other.done and other.state not in met):
                        met.add(other.state)
                        following.append(other)
            layer, steps = following, steps + 1
        assert steps == len(plan(quest))


def test_a_random_legal_policy_solves_less_than_a_tenth():
    rng, most, solved = random.Random(0), load_config("tinyquest").env.max_turns, []
    for quest in split("test", 300):
        world = world_of(quest)
        for _ in range(most):
            name, noun = rng.choice(world._legal())
            assert not getattr(world, name)(noun).startswith(NO)
            if world.done:
                break
        solved.append(world.solved)
    assert fmean(solved) < 0.1


def test_what_cannot_be_done_changes_nothing():
    world = world_of(split("train", 1)[0])
    before = copy.deepcopy(vars(world))
    for name in ("go", "open", "take", "wash", "put"):
        assert getattr(world, name)("Nowhere") == NO + world._look()
    assert vars(world) == before


def test_what_one_sees_and_the_map_of_what_was_seen():
    doors = {
        "Attic": ["Bath"],
        "Bath": ["Attic", "Cellar"],
        "Cellar": ["Bath", "Den"],
        "Den": ["Cellar"],
    }
    boxes = {
        "Attic": {"Bin": ["Cup"], "Jar": ["Hat"]},
        "Bath": {"Case": ["Key"]},
        "Cellar": {},
        "Den": {"Safe": ["Map"]},
    }
    house = json.dumps({"start": "Bath", "sink": "Den", "doors": doors, "boxes": boxes})
    world = TinyQuest()
    assert world.reset(house, "Hat", "Case", True) == (
        "Bath; shut Case; to Attic, Cellar; want clean Hat in Case; here Case; new by Attic"
    )
    assert world.go("Attic") == "Attic; shut Bin, Jar; to Bath; want clean Hat in Case; new by Bath"
    assert (
        world.open("Jar")
        == "Attic; shut Bin; open Jar with Hat; to Bath; want clean Hat in Case; here Hat"
    )
    world.go("Bath")
    assert (
        world.go("Cellar") == "Cellar; to Bath, Den; want clean Hat in Case; Hat by Bath"
    )  # it went on without the hat
    world.go("Bath")
    world.go("Attic")
    # With the hat in hand, its box and the sink are what one may want next. The sink was not seen
    # yet, so it is new.
    assert world.take("Hat") == (
        "Attic; shut Bin; open Jar with nothing; to Bath; carry Hat; want clean Hat in Case; Case "
        "by Bath; new by Bath"
    )
    world.go("Bath")
    world.go("Cellar")
    assert (
        world.go("Den")
        == "Den, Sink; shut Safe; to Cellar; carry Hat; want clean Hat in Case; Case by Cellar"
    )
    assert world.go("Cellar").endswith("; Case by Bath; Sink by Den")
    world.go("Den")
    assert world.wash("Hat").endswith("; carry clean Hat; want clean Hat in Case; Case by Cellar")


def test_where_all_rooms_were_seen_the_boxes_that_are_shut_are_new():
    doors = {"Attic": ["Bath"], "Bath": ["Attic"]}
    boxes = {"Attic": {"Bin": ["Cup"], "Jar": ["Hat"]}, "Bath": {}}
    world = TinyQuest()
    world.reset(
        json.dumps({"start": "Attic", "sink": "Bath", "doors": doors, "boxes": boxes}),
        "Hat",
        "Bin",
        False,
    )
    assert world.go("Bath") == "Bath, Sink; to Attic; want Hat in Bin; new by Attic"


@pytest.fixture(scope="module")
def played(chat):
    """A quest by the expert, and many by the one who forgets, in the preset's environment."""
    config = load_config("tinyquest")
    trust(config.env.name)

    def play(player, quests: list[dict]):
        rows = [row_of(quest, config.env.name) for quest in quests]
        histories: dict[str, list] = {}

        def script(session, turn, ids):
            history = histories.setdefault(session, [])
            history.append(
                {
                    "role": "assistant",
                    "content": player(rows[int(session)], history, random.Random(0)),
                }
            )
            return history[-1]["content"]

        loop = make_env_loop(
            ScriptedPolicy(chat, script),
            lambda row: make_env(row, {}, config.env),
            max_context=10**6,
        )
        tasks = [Task(row, str(i), str(i)) for i, row in enumerate(rows)]
        return asyncio.run(run_episodes(loop, tasks, Sampling(400)))

    return play


def test_the_patient_solve_all_in_time_and_the_demonstrator_some(played):
    quests = split("train", 30)
    flawless = played(demonstrator.expert, quests)
    assert [t.score for t in flawless] == [1.0] * 30 and {t.stop_reason for t in flawless} == {
        StopReason.ANSWERED
    }
    assert flawless[0].score_name == "solved"
    assert 0.2 < fmean(t.score for t in played(demonstrator.demonstrate, quests)) < 0.6


def test_two_ways_into_one_state_meet_there(played):
    quest = split("train", 1)[0]
    (first, *_), steps = (
        json.loads(quest["metadata"]["house"])["doors"][world_of(quest).room],
        plan(quest),
    )

    def detour(row, history, rng):
        """One step aside and back, then the plan."""
        start, done = world_of(quest).room, len(history)
        return demonstrator.call_turn(*([("go", first), ("go", start)] + steps)[done])

    straight = played(
        lambda row, history, rng: demonstrator.call_turn(*steps[len(history)]), [quest]
    )[0]
    around = played(detour, [quest])[0]
    assert [s.extra["state"] for s in around.steps[2:]] == [
        s.extra["state"] for s in straight.steps
    ]
    assert around.steps[0].extra == straight.steps[0].extra != around.steps[1].extra
