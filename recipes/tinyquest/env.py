"""A house of rooms, with boxes in them and things in these. Its methods are the agent's tools
(env/class_env.py).

    Put the Key into the Bin.                              what is to be done; where things are must be found out
    Hall; shut Crate; to Attic, Kitchen; want Key in Bin; new by Attic       a room, a shut box, doors, the task, the map
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
    """Play one episode. Each box and each thing occurs once in a house, so that a name is a
    place."""

    score_name = "solved"

    def reset(self, house: str, thing: str, into: str, wash: bool, **row: Any) -> str:
        known = json.loads(house)
        self.doors: dict[str, list[str]] = known["doors"]
        self.boxes: dict[str, dict[str, list[str]]] = known["boxes"]
        """Room -> its boxes -> the things in each."""
        self.room, self.sink = known["start"], known["sink"]
        self.goal = (thing, into, wash)
        self.held, self.clean, self.done, self.solved = "", False, False, False
        self.opened: set[str] = set()
        self.seen = {self.room}
        return self._look()

    def go(self, room: str) -> str:
        """Walk through a door.

        Args:
            room: The room behind it.
        """
        if room not in self.doors[self.room]:
            return self._no()
        self.room = room
        self.seen.add(room)
        return self._look()

    def open(self, box: str) -> str:
        """Open a box.

        Args:
            box: One that stands in this room.
        """
        if box not in self.boxes[self.room] or box in self.opened:
            return self._no()
        self.opened.add(box)
        return self._look()

    def take(self, thing: str) -> str:
        """Take something out of an open box, with free hands.

        Args:
            thing: What to take.
        """
        found = [
            things
            for box, things in self.boxes[self.room].items()
            if box in self.opened and thing in things
        ]
        if self.held or not found:
            return self._no()
        found[0].remove(thing)
        self.held = thing
        return self._look()

    def wash(self, thing: str) -> str:
        """Wash what one carries, where the sink is.

        Args:
            thing: What one carries.
        """
        if thing != self.held or self.room != self.sink:
            return self._no()
        self.clean = True
        return self._look()

    def put(self, box: str) -> str:
        """Put what one carries into an open box. This ends the quest.

        Args:
            box: One that stands in this room.
        """
        if not self.held or box not in self.opened or box not in self.boxes[self.room]:
            return self._no()
        thing, into, wash = self.goal
        self.done, self.solved = True, (self.held, box) == (thing, into) and self.clean >= wash
        return "over"

    @property
    def score(self) -> bool:
        return self.solved

    @property
    def state(self) -> str:
        """Where the agent stands: with the house, this is all that the future depends on."""
        return " ".join([self.room, self.held, "clean" * self.clean, *sorted(self.opened)])

    def get_reward(self) -> float:
        return float(self.solved)

    def _legal(self) -> list[tuple[str, str]]:
        """List all (tool, argument) that change something now."""
        boxes = self.boxes[self.room]
        moves = [("go", room) for room in self.doors[self.room]]
        moves += [("open", box) for box in boxes if box not in self.opened]
        if not self.held:
            return moves + [
                ("take", thing) for box in boxes if box in self.opened for thing in boxes[box]
            ]
        moves += [("wash", self.held)] * (self.room == self.sink and not self.clean)
        return moves + [("put", box) for box in boxes if box in self.opened]

    def _no(self) -> str:
        return NO + self._look()

    def _look(self) -> str:
        boxes = self.boxes[self.room]
        shut = [box for box in boxes if box not in self.opened]
        parts = [self.room + ", Sink" * (self.room == self.sink)] + [
            f"shut {', '.join(shut)}"
        ] * bool(shut)
        parts += [
            f"open {b} with {', '.join(boxes[b]) or 'nothing'}" for b in boxes if b in self.opened
        ]
        parts += [f"to {', '.join(self.doors[self.room])}"] * bool(self.doors[self.room])
        parts += [f"carry {'clean ' * self.clean}{self.held}"] * bool(self.held)
        thing, into, wash = self.goal
        seen = any(thing in boxes[box] for box in boxes if box in self.opened)
        here = ", ".join([thing] * seen + [into] * (into in boxes))
        parts += [f"want {'clean ' * wash}{thing} in {into}"] + [f"here {here}"] * bool(here)
        return "; ".join(parts + [f"{what} by {door}" for what, door in self._map().items()])

    def _map(self) -> dict[str, str]:
        """Name the doors towards places that may be wanted next, or to new rooms."""
        thing, into, wash = self.goal
        if self.held:
            wanted = {into: [room for room in self.seen if into in self.boxes[room]]}
            if wash and not self.clean:
                wanted["Sink"] = [self.sink] if self.sink in self.seen else []
        else:
            opened = {
                room: [things for box, things in self.boxes[room].items() if box in self.opened]
                for room in self.seen
            }
            wanted = {
                thing: [
                    room
                    for room, found in opened.items()
                    if any(thing in things for things in found)
                ]
            }
        if not all(wanted.values()):
            shut = [room for room in self.seen if set(self.boxes[room]) - self.opened]
            wanted["new"] = [room for room in self.doors if room not in self.seen] or shut
        return {
            what: self._door(rooms)
            for what, rooms in wanted.items()
            if rooms and self.room not in rooms
        }

    def _door(self, rooms: Container[str]) -> str:
        """Return the next room on the shortest known way into one of `rooms`."""
        return shortest_path({room: self.doors[room] for room in self.seen}, self.room, rooms)[0]
