"""Make TinyQuest's quests: houses, tasks, and the shortest plans.

A *room plan* says which rooms a house has, and which doors join them. A plan belongs to one split,
by its checksum: no test house has its rooms joined as in a training house.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import deque
from collections.abc import Container, Iterator
from typing import Any

ROOMS = [
    "Attic",
    "Bath",
    "Cellar",
    "Den",
    "Garage",
    "Hall",
    "Kitchen",
    "Loft",
    "Nursery",
    "Pantry",
    "Study",
    "Vault",
]
BOXES = [
    "Barrel",
    "Basket",
    "Bin",
    "Cabinet",
    "Case",
    "Chest",
    "Crate",
    "Drawer",
    "Jar",
    "Locker",
    "Safe",
    "Trunk",
]
THINGS = [
    "Apple",
    "Bell",
    "Book",
    "Clock",
    "Coin",
    "Cup",
    "Fork",
    "Hat",
    "Key",
    "Lamp",
    "Map",
    "Ring",
    "Rope",
    "Shoe",
]
TASK_TEXTS = {
    "put": "Put the {thing} into the {into}.",
    "wash": "Wash the {thing} and put it into the {into}.",
}
CHECKSUMS = {"train": (0, 1, 2), "val": (3,), "test": (4,)}
"""Split -> checksums of its room plans, modulo 5."""
SIZE = 4
"""Rooms of a house."""
BOX_COUNT = 6
"""Boxes of a house, each with a thing in it."""
PLAN_LENGTHS = range(6, 16)
"""How long a shortest plan may be."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different quests of a split; every second one requires washing the thing."""
    marks: set[str] = set()
    while len(marks) < count:
        house = build_house(rng)
        boxes: list[str] = []
        things: list[str] = []
        for boxes_of_room in house["boxes"].values():
            for box, contents in boxes_of_room.items():
                boxes.append(box)
                things += contents
        goal_thing = rng.choice(things)
        into = rng.choice(boxes)
        wash = len(marks) % 2 == 1
        # Only now: a check before these draws would give other quests for the same seed.
        if zlib.crc32(plan_of(house).encode()) % 5 not in CHECKSUMS[split]:
            continue
        metadata = {"house": json.dumps(house), "thing": goal_thing, "into": into, "wash": wash}
        mark = json.dumps(metadata)
        if mark in marks or len(solve(house, goal_thing, into, wash)) not in PLAN_LENGTHS:
            continue
        marks.add(mark)
        kind = "put"
        if wash:
            kind = "wash"
        text = TASK_TEXTS[kind].format(thing=goal_thing, into=into)
        yield {"question": text, "kind": kind, "metadata": metadata}


def build_house(rng: random.Random) -> dict[str, Any]:
    """Make a house: rooms joined into a tree, with random boxes and things."""
    rooms = rng.sample(ROOMS, SIZE)
    doors: dict[str, list[str]] = {room: [] for room in rooms}
    for number, room in enumerate(rooms[1:], 1):
        other = rng.choice(rooms[:number])
        doors[room].append(other)
        doors[other].append(room)
    boxes: dict[str, dict[str, list[str]]] = {room: {} for room in rooms}
    box_names = rng.sample(BOXES, BOX_COUNT)
    things = rng.sample(THINGS, BOX_COUNT)
    for number, (box, content) in enumerate(zip(box_names, things, strict=True)):
        # The first boxes go one into each room, so that no room is empty.
        room = rooms[number] if number < SIZE else rng.choice(rooms)
        boxes[room][box] = [content]
    return {"start": rng.choice(rooms), "sink": rng.choice(rooms), "doors": doors, "boxes": boxes}


def plan_of(house: dict[str, Any]) -> str:
    """Write the room plan in words, equal for equal plans."""
    doors = set()
    for room, others in house["doors"].items():
        for other in others:
            doors.add("-".join(sorted((room, other))))  # a door is listed in both of its rooms
    return " ".join(sorted(doors))


def shortest_path(doors: dict[str, list[str]], start: str, goals: Container[str]) -> list[str]:
    """Return the shortest way from `start` into one of `goals`, by a breadth-first search.

    Raises LookupError if there is none.
    """
    before = {start: ""}
    queue = deque([start])
    while queue:
        room = queue.popleft()
        if room in goals:
            way = [room]
            while before[way[0]]:
                way.insert(0, before[way[0]])
            return way[1:]
        for other in doors.get(room, ()):
            if other not in before:
                before[other] = room
                queue.append(other)
    raise LookupError(start)


def solve(house: dict[str, Any], thing: str, into: str, wash: bool) -> list[tuple[str, str]]:
    """Return the shortest plan with full knowledge, as (tool, argument); empty if already done."""
    room_of: dict[str, str] = {}
    source = ""
    for room, boxes in house["boxes"].items():
        for box, contents in boxes.items():
            room_of[box] = room
            if thing in contents:
                source = box
    if source == into and not wash:
        return []
    stops = [(room_of[source], [("open", source), ("take", thing)])]
    if wash:
        stops.append((house["sink"], [("wash", thing)]))
    last_acts = [("put", into)]
    if source != into:
        last_acts.insert(0, ("open", into))
    stops.append((room_of[into], last_acts))
    # A house is a tree of rooms: the shortest plan is the shortest way between its stops in turn.
    plan: list[tuple[str, str]] = []
    here = house["start"]
    for room, acts in stops:
        plan += [("go", step) for step in shortest_path(house["doors"], here, {room})]
        plan += acts
        here = room
    return plan
