"""Play TinyQuest badly, so that RL can improve it: explore until the quest ends."""

from __future__ import annotations

import json
import random

from agent_r1 import Message, Row
from agent_r1_recipes.long_context.context import ASK
from agent_r1_recipes.tinyquest.env import TinyQuest

FORGET_WASHING = 0.75
"""How often `demonstrate` forgets to wash."""
ANY_THING = 0.25
"""How often it takes something else that it sees."""
ANY_BOX = 0.25
"""How often it puts what it carries into the next best box."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the agent's next turn. Its slips are drawn once per quest."""
    # Seeded with the quest, not with `rng`: this function is called anew for each turn. An agent
    # that forgets to wash has to forget it in all turns of its episode.
    habits = random.Random(json.dumps(row["extra_info"]["metadata"]))
    forget_washing = habits.random() < FORGET_WASHING
    any_thing = habits.random() < ANY_THING
    any_box = habits.random() < ANY_BOX
    return _turn(row, history, forget_washing, any_thing, any_box)


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn without slips."""
    return _turn(row, history, forget_washing=False, any_thing=False, any_box=False)


def _turn(
    row: Row, history: list[Message], forget_washing: bool, any_thing: bool, any_box: bool
) -> str:
    """Return a call, or notes if the agent is asked for them (env.context=summary)."""
    if history and history[-1]["content"] == ASK:
        return notes(history[-2]["content"])
    world = replay_moves(row, history)
    name, noun = move(world, forget_washing, any_thing, any_box)
    return call_turn(name, noun)


def call_turn(name: str, noun: str) -> str:
    """Write a turn as a short call."""
    field = {"go": "room", "take": "thing", "wash": "thing"}.get(name, "box")
    call = json.dumps({"name": name, "arguments": {field: noun}})
    return f"<tool_call>\n{call}\n</tool_call>"


def notes(result: str) -> str:
    """Keep the last result, without the task and with the map's one door.

    The prompt repeats the task.
    """
    parts = []
    for part in result.split("; "):
        # A part begins with its kind: "no" (refused), "to Attic, Kitchen", "want Key in Bin".
        if part.split()[0] not in ("no", "to", "want"):
            parts.append(part)
    return "; ".join(parts)


def replay_moves(row: Row, history: list[Message]) -> TinyQuest:
    """Rebuild the world after all moves so far.

    A demonstrator sees only messages. The house is in the row, so the moves give the world.
    """
    world = TinyQuest()
    world.reset(**row["extra_info"]["metadata"])
    for message in history:
        if message["role"] == "assistant" and "tool_call>" in message["content"]:
            call = json.loads(message["content"].split("tool_call>")[1].removesuffix("</"))
            getattr(world, call["name"])(**call["arguments"])
    return world


def move(world: TinyQuest, forget_washing: bool, any_thing: bool, any_box: bool) -> tuple[str, str]:
    """Return the next (tool, argument), from what was seen."""
    _, into, wash = world.goal
    here = world.boxes[world.room]
    if not world.in_hand:
        return _look_for_thing(world, any_thing)
    if wash and not forget_washing and not world.clean:
        if world.room == world.sink:
            return "wash", world.in_hand
        if world.sink in world.visited_rooms:
            return "go", _way(world, world.sink)
        return "go", _way(world)
    box = into
    if any_box and here:
        box = next(iter(here))  # the first box of this room, right or wrong
    if box not in here:
        return "go", _way(world, _rooms_of_boxes(world).get(box))
    if box not in world.open_boxes:
        return "open", box
    return "put", box


def _look_for_thing(world: TinyQuest, any_thing: bool) -> tuple[str, str]:
    """Return the next (tool, argument) of an agent with free hands."""
    goal_thing, _, _ = world.goal
    for box, room in _rooms_of_boxes(world).items():
        if box not in world.open_boxes:
            continue
        contents = world.boxes[room][box]
        if goal_thing in contents:
            if room == world.room:
                return "take", goal_thing
            return "go", _way(world, room)
        if any_thing and contents and room == world.room:
            return "take", contents[0]
    for box in world.boxes[world.room]:
        if box not in world.open_boxes:
            return "open", box
    return "go", _way(world)


def _rooms_of_boxes(world: TinyQuest) -> dict[str, str]:
    """Map each box that the agent has seen to its room."""
    rooms = {}
    for room in world.visited_rooms:
        for box in world.boxes[room]:
            rooms[box] = room
    return rooms


def _way(world: TinyQuest, room: str | None = None) -> str:
    """Return the next room on the way to `room`, or to the nearest unseen room."""
    rooms = set(world.doors) - world.visited_rooms
    if room:
        rooms = {room}
    return world._door(rooms)
