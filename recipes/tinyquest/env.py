"""A house of rooms, with boxes in them and things in these.

Its methods are the agent's tools (env/class_env.py).

    Put the Key into the Bin.                         the task; where things are must be found out
    Hall; shut Crate; to Attic, Kitchen; want Key in Bin; new by Attic
                                                      a room, a shut box, doors, the task, the map
    open Crate -> Hall; open Crate with Key; to Attic, Kitchen; want Key in Bin; here Key

The first `put` ends the quest, right or wrong. Each answer ends with the task, its visible parts
(`here`), and a map. The map names the door to what may be wanted next (`Bin by Kitchen`, `new by
Attic`). Three layers did not learn from demonstrations to compare names, nor to remember where they
had been (recipes/tinyquest/README.md). Next: `demonstrator.py`.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from agent_r1_recipes.tinyquest.quests import shortest_path

NO = "no; "
"""Stands before what one sees, where something cannot be done here and now."""


class TinyQuest:
    """Play one episode.

    Each box and each thing occurs once in a house, so that a name is a place.
    """

    score_name = "solved"

    def reset(self, house: str, thing: str, into: str, wash: bool, **row: Any) -> str:
        layout = json.loads(house)
        self.doors: dict[str, list[str]] = layout["doors"]
        self.boxes: dict[str, dict[str, list[str]]] = layout["boxes"]
        """Room -> its boxes -> the things in each."""
        self.room = layout["start"]
        self.sink = layout["sink"]
        self.goal = (thing, into, wash)
        self.in_hand = ""
        self.clean = False
        self.done = False
        self.solved = False
        self.open_boxes: set[str] = set()
        self.visited_rooms = {self.room}
        return self._look()

    def go(self, room: str) -> str:
        """Walk through a door.

        Args:
            room: The room behind it.
        """
        if room not in self.doors[self.room]:
            return self._no()
        self.room = room
        self.visited_rooms.add(room)
        return self._look()

    def open(self, box: str) -> str:
        """Open a box.

        Args:
            box: One that stands in this room.
        """
        if box not in self.boxes[self.room] or box in self.open_boxes:
            return self._no()
        self.open_boxes.add(box)
        return self._look()

    def take(self, thing: str) -> str:
        """Take something out of an open box, with free hands.

        Args:
            thing: What to take.
        """
        if self.in_hand:
            return self._no()
        for box, things in self.boxes[self.room].items():
            if box in self.open_boxes and thing in things:
                things.remove(thing)
                self.in_hand = thing
                return self._look()
        return self._no()

    def wash(self, thing: str) -> str:
        """Wash what one carries, where the sink is.

        Args:
            thing: What one carries.
        """
        if thing != self.in_hand or self.room != self.sink:
            return self._no()
        self.clean = True
        return self._look()

    def put(self, box: str) -> str:
        """Put what one carries into an open box. This ends the quest.

        Args:
            box: One that stands in this room.
        """
        if not self.in_hand or box not in self.open_boxes or box not in self.boxes[self.room]:
            return self._no()
        goal_thing, into, wash = self.goal
        self.done = True
        right_place = self.in_hand == goal_thing and box == into
        # Washing what need not be washed does no harm.
        self.solved = right_place and self.clean >= wash
        return "over"

    @property
    def score(self) -> bool:
        return self.solved

    @property
    def state(self) -> str:
        """Where the agent stands: with the house, this is all that the future depends on."""
        return " ".join([self.room, self.in_hand, "clean" * self.clean, *sorted(self.open_boxes)])

    def get_reward(self) -> float:
        return float(self.solved)

    def _legal(self) -> list[tuple[str, str]]:
        """List all (tool, argument) that change something now."""
        boxes = self.boxes[self.room]
        moves = [("go", room) for room in self.doors[self.room]]
        moves += [("open", box) for box in boxes if box not in self.open_boxes]
        open_boxes = [box for box in boxes if box in self.open_boxes]
        if not self.in_hand:
            for box in open_boxes:
                moves += [("take", content) for content in boxes[box]]
            return moves
        if self.room == self.sink and not self.clean:
            moves.append(("wash", self.in_hand))
        return moves + [("put", box) for box in open_boxes]

    def _no(self) -> str:
        return NO + self._look()

    def _look(self) -> str:
        """Describe the room, the task and the map, in parts that `; ` separates."""
        boxes = self.boxes[self.room]
        shut_boxes = [box for box in boxes if box not in self.open_boxes]
        name = self.room
        if self.room == self.sink:
            name += ", Sink"
        parts = [name]
        if shut_boxes:
            parts.append(f"shut {', '.join(shut_boxes)}")
        for box in boxes:
            if box in self.open_boxes:
                parts.append(f"open {box} with {', '.join(boxes[box]) or 'nothing'}")
        if self.doors[self.room]:
            parts.append(f"to {', '.join(self.doors[self.room])}")
        # A bool multiplies a text: "clean " for True, nothing for False.
        if self.in_hand:
            parts.append(f"carry {'clean ' * self.clean}{self.in_hand}")
        goal_thing, into, wash = self.goal
        parts.append(f"want {'clean ' * wash}{goal_thing} in {into}")
        here = []
        if self._lies_open(self.room, goal_thing):
            here.append(goal_thing)
        if into in boxes:
            here.append(into)
        if here:
            parts.append(f"here {', '.join(here)}")
        for place, door in self._map().items():
            parts.append(f"{place} by {door}")
        return "; ".join(parts)

    def _lies_open(self, room: str, thing: str) -> bool:
        """Say whether an open box of the room has the thing in it."""
        boxes = self.boxes[room]
        return any(thing in boxes[box] for box in boxes if box in self.open_boxes)

    def _map(self) -> dict[str, str]:
        """Name the doors towards places that may be wanted next, or to new rooms."""
        goal_thing, into, wash = self.goal
        # What may be wanted next -> the rooms that are known to have it.
        rooms_of: dict[str, list[str]] = {}
        if self.in_hand:
            rooms_of[into] = [room for room in self.visited_rooms if into in self.boxes[room]]
            if wash and not self.clean:
                rooms_of["Sink"] = [room for room in self.visited_rooms if room == self.sink]
        else:
            rooms_of[goal_thing] = [
                room for room in self.visited_rooms if self._lies_open(room, goal_thing)
            ]
        if not all(rooms_of.values()):
            # Something is not known yet: look into new rooms, and then into shut boxes.
            rooms_of["new"] = [room for room in self.doors if room not in self.visited_rooms]
            if not rooms_of["new"]:
                rooms_of["new"] = [
                    room for room in self.visited_rooms if set(self.boxes[room]) - self.open_boxes
                ]
        doors = {}
        for place, rooms in rooms_of.items():
            if rooms and self.room not in rooms:
                doors[place] = self._door(rooms)
        return doors

    def _door(self, rooms: Container[str]) -> str:
        """Return the next room on the shortest known way into one of `rooms`."""
        # Only doors of rooms that the agent has been in: the map may not tell what is not known.
        known_doors = {room: self.doors[room] for room in self.visited_rooms}
        return shortest_path(known_doors, self.room, rooms)[0]
