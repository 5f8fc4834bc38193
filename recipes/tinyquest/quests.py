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
LEFT_OVER = {"train": (0, 1, 2), "val": (3,), "test": (4,)}
"""Split -> checksums of its room plans, modulo 5."""
SIZE, FILLED = 4, 6
"""Rooms of a house, and boxes, each with a thing in it."""
PLAN_LENGTHS = range(6, 16)
"""How long a shortest plan may be."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different quests of a split; every second one requires washing the thing."""
    asked: set[str] = set()
    while len(asked) < count:
        house = build_house(rng)
        boxes = [box for room in house["boxes"].values() for box in room]
        things = [
            thing for room in house["boxes"].values() for held in room.values() for thing in held
        ]
        quest = {
            "thing": rng.choice(things),
            "into": rng.choice(boxes),
            "wash": len(asked) % 2 == 1,
        }
        if zlib.crc32(plan_of(house).encode()) % 5 not in LEFT_OVER[split]:
            continue
        known = {"house": json.dumps(house), **quest}
        if len(solve(house, **quest)) in PLAN_LENGTHS and (mark := json.dumps(known)) not in asked:
            asked.add(mark)
            kind = "wash" if quest["wash"] else "put"
            yield {"question": TASK_TEXTS[kind].format(**quest), "kind": kind, "metadata": known}


def build_house(rng: random.Random) -> dict[str, Any]:
    """Make a house: rooms joined into a tree, with random boxes and things."""
    rooms = rng.sample(ROOMS, SIZE)
    doors: dict[str, list[str]] = {room: [] for room in rooms}
    for number, room in enumerate(rooms[1:], 1):
        other = rng.choice(rooms[:number])
        doors[room].append(other)
        doors[other].append(room)
    boxes: dict[str, dict[str, list[str]]] = {room: {} for room in rooms}
    for number, (box, thing) in enumerate(
        zip(rng.sample(BOXES, FILLED), rng.sample(THINGS, FILLED), strict=True)
    ):
        boxes[rooms[number] if number < SIZE else rng.choice(rooms)][box] = [thing]
    return {"start": rng.choice(rooms), "sink": rng.choice(rooms), "doors": doors, "boxes": boxes}


def plan_of(house: dict[str, Any]) -> str:
    """Write the room plan in words, equal for equal plans."""
    doors = sorted(
        {
            "-".join(sorted((room, other)))
            for room, others in house["doors"].items()
            for other in others
        }
    )
    return " ".join(doors)


def shortest_path(doors: dict[str, list[str]], start: str, goals: Container[str]) -> list[str]:
    """Return the shortest way from `start` into one of `goals`. Raises LookupError if there is
    none."""
    before, queue = {start: ""}, deque([start])
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
    place = {box: room for room, boxes in house["boxes"].items() for box in boxes}
    [out_of] = [
        box
        for room, box in ((r, b) for b, r in place.items())
        if thing in house["boxes"][room][box]
    ]
    if out_of == into and not wash:
        return []
    stops = [
        (place[out_of], [("open", out_of), ("take", thing)]),
        (house["sink"], [("wash", thing)] * wash),
    ]
    stops += [(place[into], [("open", into)] * (out_of != into) + [("put", into)])]
    plan, here = [], house["start"]
    for room, acts in stops:
        if acts:
            plan += [("go", step) for step in shortest_path(house["doors"], here, {room})] + acts
            here = room
    return plan
