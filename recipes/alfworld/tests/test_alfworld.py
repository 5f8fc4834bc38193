"""ALFWorld: drawn rooms can be solved as drawn, recorded games play through the Gymnasium door, and
the demonstrator forgets what the expert does.

The real packages play in `make long PART=alfworld`, which also compares them with the record.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from building import trust

from agent_r1 import (
    Action,
    AgentR1Error,
    Outcome,
    StopReason,
    load_config,
    make_env,
    maybe_await,
)
from agent_r1_recipes.alfworld import demonstrator, env, game
from agent_r1_recipes.alfworld.household import FITS, KINDS, OPENABLE, draw
from agent_r1_recipes.alfworld.memory import Memory, capitalise

NAME = "gym:agent_r1_recipes.alfworld.env:Household"
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))


class RecordedGame:
    """A game that the real packages played once: its answers, whatever the commands are."""

    commands: list[str] = []  # of all games of a test

    def __init__(self, quest):
        [self.record] = [one for one in RECORDED if one["problem"] == quest.problem()]
        self.turns = iter(self.record["turns"])
        self.won, self.closed = False, False
        self.actions = dict.fromkeys(self.record["turns"][0]["possible"].split(", "))
        next(self.turns)  # the impossible command, which changes nothing

    def begin(self) -> str:
        return self.record["begin"]

    def do(self, command: str) -> str:
        turn = next(self.turns)
        self.commands.append(command)
        self.won, self.actions = turn["won"], dict.fromkeys(turn["possible"].split(", "))
        return turn["answer"]

    def close(self) -> None:
        self.closed = True


def row_of(seed: int) -> dict:
    return {
        "prompt": [{"role": "user", "content": ""}],
        "agent_name": NAME,
        "reward_model": {"ground_truth": []},
        "extra_info": {"index": 0, "metadata": {"seed": seed}},
        "env_kwargs": {},
    }


@pytest.fixture
def recorded_games(monkeypatch):
    monkeypatch.setattr(env, "Game", RecordedGame)
    monkeypatch.setattr(RecordedGame, "commands", [])
    trust(NAME)


# ------------------------------------------------------------------------------------------- rooms


def test_a_seed_gives_the_same_room_again_and_seeds_give_different_ones():
    problems = [draw(seed).problem() + draw(seed).task for seed in range(400)]
    assert problems[:20] == [draw(seed).problem() + draw(seed).task for seed in range(20)]
    assert len(set(problems)) > 395
    kinds = Counter(draw(seed).kind for seed in range(600))
    assert kinds.keys() == KINDS.keys() and min(kinds.values()) > 70


def test_no_task_is_done_at_the_start_and_each_can_be_done():
    for seed in range(600):
        quest = draw(seed)
        targets = [name for name, kind in quest.things.items() if kind == quest.target]
        assert len(targets) == 1 + (quest.kind == "pick_two_obj_and_place")
        assert all(quest.places[quest.where[name]] != quest.into for name in targets)
        if quest.into:
            assert quest.into in quest.places.values() and quest.target in FITS[quest.into]
            assert quest.target.lower() in quest.task and quest.into.lower() in quest.task
        tool = KINDS[quest.kind].tool
        assert not tool or (tool in quest.places.values() and tool != quest.into)
        assert quest.where.keys() == quest.things.keys()


def test_a_problem_names_each_place_and_thing():
    quest = draw(RECORDED[0]["seed"])
    problem = quest.problem()
    assert problem.count("(") == problem.count(")")
    assert problem.count("(receptacleAtLocation ") == len(quest.places)
    assert problem.count("(inReceptacle ") == len(quest.things) + 1  # and once in the goal
    shut = [name for name, kind in quest.places.items() if kind in OPENABLE]
    assert problem.count("(openable ") == len(shut) > 0


# ----------------------------------------------------------------------------------------- the game


@pytest.mark.parametrize("record", RECORDED, ids=[draw(one["seed"]).kind for one in RECORDED])
def test_the_expert_solves_a_recorded_game_through_the_gymnasium_door(recorded_games, record):
    """The expert sees what an agent sees, and each of its commands is the recorded one."""
    row = row_of(record["seed"])
    outcome = asyncio.run(play(row))
    assert RecordedGame.commands == [turn["command"] for turn in record["turns"][1:]]
    assert outcome.reward == 1.0 and outcome.metrics["success"] == 1.0
    assert outcome.score_name == "success"


async def play(row: dict) -> Outcome:
    """Play the expert's game as a rollout does."""
    household = make_env(row, {}, load_config("alfworld-tiny").env)
    history = list((await maybe_await(household.reset(row))).messages)
    assert draw(row["extra_info"]["metadata"]["seed"]).task in history[-1]["content"].lower()
    assert "Welcome" not in history[-1]["content"]
    result = None
    while result is None or not result.done:
        command = demonstrator.expert(row, history, random.Random(0))
        result = await maybe_await(household.step(Action(command)))
        history.append({"role": "assistant", "content": command})
        if not result.done:
            history += result.observation.messages
    assert result.stop_reason is StopReason.ANSWERED
    outcome = await maybe_await(household.outcome(result.stop_reason))
    await maybe_await(household.close())
    return outcome


def test_an_answer_has_notes_and_the_commands_that_change_something(recorded_games):
    record = next(one for one in RECORDED if draw(one["seed"]).kind == "pick_two_obj_and_place")
    household = env.Household()
    text, _ = household.reset(seed=record["seed"])
    room, task = text.lower().split("\n")
    assert task == f"your task is to: {household.quest.task}."
    assert all(f" a {place}" in room for place in household.quest.places)
    for turn in record["turns"][1:]:
        text = household.step(turn["command"])[0]
        answer, notes, shown = text.split("\n")
        assert answer.lower() == turn["answer"].lower()
        listed = set(shown.lower().split(", ")) - {""}
        missing = {command.split()[0] for command in set(turn["possible"].split(", ")) - listed}
        assert listed < set(turn["possible"].split(", "))
        assert missing <= {"go", "look", "inventory", "help", "examine"}
    # Both objects are where they belong, so nothing is left to fetch.
    assert notes.startswith("Carried: nothing. Wanted: nothing. Unseen: ")
    game_before = household.game
    household.reset(seed=RECORDED[1]["seed"])
    assert game_before.closed and not household.game.closed


def test_notes_have_what_the_answers_said():
    quest = draw(next(one["seed"] for one in RECORDED if "look_at" in draw(one["seed"]).kind))
    lamp = "desklamp 1"
    thing = next(name for name, kind in quest.things.items() if kind == quest.target)
    place = next(name for name in quest.places if name != "desk 1")
    other = [name for name in quest.places if name not in ("desk 1", place)]
    memory = Memory(list(quest.places))
    memory.read(f"You arrive at desk 1. On the desk 1, you see a {lamp}.\nnotes\nuse {lamp}")
    rest = next(name for name in quest.things if name not in (thing, lamp))
    memory.read(f"You arrive at {place}. On the {place}, you see a {thing}, and a {rest}.\n\n")
    unseen = ", ".join(other)
    assert memory.notes(quest) == (
        f"Carried: nothing. Wanted: {lamp} at desk 1, {thing} at {place}. Unseen: {unseen}."
    )
    memory.read(f"You pick up the {thing} from the {place}.\n\n")
    memory.changed[thing] = "heat"
    assert memory.notes(quest).startswith(f"Carried: {thing} (heat). Wanted: {lamp} at desk 1. ")


def test_names_are_written_with_a_capital_wherever_they_stand(recorded_games):
    quest = draw(RECORDED[0]["seed"])
    place, thing = next(iter(quest.places)), next(iter(quest.things))
    text = capitalise(f"You see a {thing} in {place}, and an other{place}.", quest)
    assert text == f"You see a {thing.capitalize()} in {place.capitalize()}, and an other{place}."


def test_without_the_packages_the_command_is_named():
    with pytest.raises(AgentR1Error, match=re.escape("pip install 'agent-r1[alfworld]'")):
        game.load_rules()


# -------------------------------------------------------------------------------- the demonstrator


def answers(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_memory_follows_the_answers():
    [look] = [one for one in RECORDED if draw(one["seed"]).kind == "pick_two_obj_and_place"]
    quest = draw(look["seed"])
    memory = Memory(list(quest.places))
    for turn in look["turns"][1:]:
        memory.read(f"{turn['answer']}\n{turn['possible']}")
    assert memory.held == "" and len(memory.taken) == 2
    assert {quest.things[name] for name in memory.taken} == {quest.target}
    assert set(memory.taken) <= set(memory.contents[memory.at])
    assert quest.places[memory.at] == quest.into


def test_the_demonstrator_forgets_and_the_expert_does_not():
    [heat] = [one for one in RECORDED if draw(one["seed"]).kind == "pick_heat_then_place_in_recep"]
    quest = draw(heat["seed"])
    turns = heat["turns"][1:]
    at = next(n for n, turn in enumerate(turns) if turn["answer"].startswith("You pick up"))
    memory = Memory(list(quest.places))
    for turn in turns[: at + 1]:
        memory.read(f"{turn['answer']}\n{turn['possible']}")
    into = next(place for place, kind in quest.places.items() if kind == quest.into)
    careful = demonstrator.choose(quest, memory, demonstrator.Habits())
    forgetful = demonstrator.choose(quest, memory, demonstrator.Habits(forgets=True))
    assert careful == turns[at + 1]["command"] and "microwave 1" in careful
    assert forgetful in (f"go to {into}", f"open {into}", f"move {memory.held} to {into}")
    anywhere = demonstrator.Habits(forgets=True, any_place=True)
    put = f"move {memory.held} to {memory.at}"
    assert demonstrator.choose(quest, memory, anywhere) == put


def test_habits_belong_to_the_game():
    """Half of the games keep one habit through an episode, in whatever turn it is asked for."""
    [two] = [one for one in RECORDED if draw(one["seed"]).kind == "pick_and_place_simple"]
    begin = two["begin"].split("\n\n", 1)[1]
    row = row_of(two["seed"])
    history = answers(f"{begin}\n{two['turns'][0]['possible']}")
    commands = {demonstrator.demonstrate(row, history, random.Random(n)) for n in range(20)}
    assert len(commands) == 1
