"""Play TinyQuest badly, so that RL can improve it: explore until the quest ends."""

from __future__ import annotations

import json
import random

from agent_r1 import Message, Row
from agent_r1_recipes.long_context.context import ASK
from agent_r1_recipes.tinyquest.env import TinyQuest

UNWASHED, ANY_THING, ANY_BOX = 0.75, 0.25, 0.25
"""How often `demonstrate` forgets to wash, takes something else that it sees, and puts what it
carries into the next best box."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the agent's next turn. Its slips are drawn once per quest."""
    habits = random.Random(json.dumps(row["extra_info"]["metadata"]))
    return _turn(
        row, history, *(habits.random() < share for share in (UNWASHED, ANY_THING, ANY_BOX))
    )


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn without slips."""
    return _turn(row, history, False, False, False)


def _turn(row: Row, history: list[Message], *slips: bool) -> str:
    """Return a call, or notes if the agent is asked for them (env.context=summary)."""
    if history and history[-1]["content"] == ASK:
        return notes(history[-2]["content"])
    return call_turn(*move(replayed(row, history), *slips))


def call_turn(name: str, noun: str) -> str:
    """Write a turn as a short call."""
    field = {"go": "room", "take": "thing", "wash": "thing"}.get(name, "box")
    return (
        "<tool_call>\n" + json.dumps({"name": name, "arguments": {field: noun}}) + "\n</tool_call>"
    )


def notes(seen: str) -> str:
    """Keep the last result, without the task and with the map's one door.

    The prompt repeats the task.
    """
    return "; ".join(
        part for part in seen.split("; ") if part.split()[0] not in ("no", "to", "want")
    )


def replayed(row: Row, history: list[Message]) -> TinyQuest:
    """Rebuild the world after all moves so far."""
    world = TinyQuest()
    world.reset(**row["extra_info"]["metadata"])
    for message in history:
        if message["role"] == "assistant" and "tool_call>" in message["content"]:
            call = json.loads(message["content"].split("tool_call>")[1].removesuffix("</"))
            getattr(world, call["name"])(**call["arguments"])
    return world


def move(world: TinyQuest, unwashed: bool, any_thing: bool, any_box: bool) -> tuple[str, str]:
    """Return the next (tool, argument), from what was seen."""
    thing, into, wash = world.goal
    here = world.boxes[world.room]
    seen = {box: room for room in world.seen for box in world.boxes[room]}
    if not world.held:
        for room, box in ((room, box) for box, room in seen.items() if box in world.opened):
            found = world.boxes[room][box]
            if thing in found:
                return ("take", thing) if room == world.room else ("go", _way(world, room))
            if any_thing and found and room == world.room:
                return "take", found[0]
        closed = [box for box in here if box not in world.opened]
        return ("open", closed[0]) if closed else ("go", _way(world))
    if wash and not unwashed and not world.clean:
        if world.room == world.sink:
            return "wash", world.held
        return "go", _way(world, world.sink if world.sink in world.seen else None)
    box = next(iter(here), into) if any_box else into
    if box not in here:
        return "go", _way(world, seen.get(box))
    return ("put" if box in world.opened else "open"), box


def _way(world: TinyQuest, room: str | None = None) -> str:
    """Return the next room on the way to `room`, or to the nearest unseen room."""
    return world._door({room} if room else set(world.doors) - world.seen)
