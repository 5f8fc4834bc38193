"""Do ALFWorld's tasks badly, so that RL can improve it; `expert` does them well.

Both see only what the agent sees: they look into places one after another, in the order of the
alphabet, and remember what they saw. `expert` is no planner: it does not know where things are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from agent_r1 import Message, Row
from agent_r1_recipes.alfworld.household import KINDS, LAMP, Quest, draw
from agent_r1_recipes.alfworld.memory import Memory, capitalise

FORGET = 0.4
"""How often `demonstrate` forgets the second half of a task: to wash, to heat, the lamp."""
ANY_THING = 0.1
"""How often its first object is the first that it sees."""
ANY_PLACE = 0.1
"""How often it puts what it carries into the first place that takes it."""


@dataclass
class Habits:
    """The slips of one episode. An expert has none."""

    forgets: bool = False
    any_thing: bool = False
    any_place: bool = False


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next command. Slips are drawn once per game: a habit lasts for an episode."""
    seed = row["extra_info"]["metadata"]["seed"]
    slips = random.Random(f"habits/{seed}")
    habits = Habits(
        forgets=slips.random() < FORGET,
        any_thing=slips.random() < ANY_THING,
        any_place=slips.random() < ANY_PLACE,
    )
    return _command(row, history, habits)


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next command without slips."""
    return _command(row, history, Habits())


def _command(row: Row, history: list[Message], habits: Habits) -> str:
    quest = draw(row["extra_info"]["metadata"]["seed"])
    return capitalise(choose(quest, remember(quest, history), habits), quest)


def remember(quest: Quest, history: list[Message]) -> Memory:
    """Read all answers so far."""
    memory = Memory(list(quest.places))
    for answer in _answers(history):
        memory.read(answer)
    return memory


def _answers(history: list[Message]) -> Iterator[str]:
    """Return the game's texts, the first one included."""
    for message in history:
        if message["role"] not in ("assistant", "system"):
            yield message["content"]


def choose(quest: Quest, memory: Memory, habits: Habits) -> str:
    """Return the next command, from what was seen."""
    if memory.held:
        return _use(quest, memory, habits)
    here = memory.contents.get(memory.at, [])
    if habits.any_thing and not memory.taken and here:
        return f"take {here[0]} from {memory.at}"
    for thing, place in memory.wanted(quest):
        if quest.things[thing] == quest.target:
            return _at(memory, place, f"take {thing} from {place}")
    return _explore(memory)


def _use(quest: Quest, memory: Memory, habits: Habits) -> str:
    """Return the next command of an agent that carries something."""
    if quest.kind == "look_at_obj_in_light":
        lamp = f"{LAMP.lower()} 1"
        lit = [place for thing, place in memory.wanted(quest) if thing == lamp]
        if lit and not habits.forgets:
            return _at(memory, lit[0], f"use {lamp}")
        return _explore(memory)
    tool = KINDS[quest.kind].tool
    if tool and not habits.forgets and memory.held not in memory.changed:
        verb = quest.kind.split("_")[1]
        place = f"{tool.lower()} 1"
        return _at(memory, place, f"{verb} {memory.held} with {place}")
    put = f"move {memory.held} to {memory.at}"
    if habits.any_place and put in memory.possible and len(memory.taken) == 1:
        return put
    into = next(place for place, kind in quest.places.items() if kind == quest.into)
    return _at(memory, into, f"move {memory.held} to {into}", inside=True)


def _at(memory: Memory, place: str, command: str, inside: bool = False) -> str:
    """Return `command` at a place, and before that the way there."""
    if memory.at != place:
        return f"go to {place}"
    if inside and place in memory.shut:
        return f"open {place}"
    return command


def _explore(memory: Memory) -> str:
    """Look into the next place; if all were seen, walk on."""
    if memory.at in memory.shut:
        return f"open {memory.at}"
    unseen = memory.unseen()
    if unseen:
        return f"go to {unseen[0]}"
    following = memory.places.index(memory.at) + 1
    return f"go to {memory.places[following % len(memory.places)]}"
