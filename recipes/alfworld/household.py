"""Make ALFWorld's problems: a room, objects, and one of the six published tasks.

In: a seed. Out: a problem in PDDL for ALFWorld's own domain, and the task in its words. Next:
`game.py` plays it. The released games come from ALFRED's scenes and are a download; these rooms are
smaller, and drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass


def words(text: str) -> list[str]:
    """Return the names of a text. A table of lists would fill pages."""
    return text.split()


KITCHEN = words("Apple Bowl Bread Cup Egg Fork Knife Lettuce Mug Pan Plate Pot Potato Spoon Tomato")
BEDROOM = words("Book CD CellPhone CreditCard KeyChain Laptop Pen Pencil Watch")

# The tables below are ALFWorld's (alfworld.gen.constants), for these objects and places only.
# `python -m lab.rehearsals alfworld` compares them with the package.
FITS = {
    "Bed": words("Book CellPhone Laptop"),
    "Cabinet": words("Book Bowl CD Cup Mug Pan Plate Pot"),
    "CounterTop": [*KITCHEN, *BEDROOM],
    "Desk": ["Bowl", "Cup", "Mug", "Plate", *BEDROOM],
    "DiningTable": [*KITCHEN, *BEDROOM],
    "Drawer": words("Book CD CellPhone CreditCard Fork KeyChain Knife Pen Pencil Spoon Watch"),
    "Dresser": ["Bowl", "Cup", "Mug", "Plate", *BEDROOM],
    "Fridge": words("Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato"),
    "Microwave": words("Apple Bowl Bread Cup Egg Mug Plate Potato Tomato"),
    "Safe": words("CD CellPhone CreditCard KeyChain Watch"),
    "Shelf": words("Book Bowl CD CellPhone CreditCard Cup KeyChain Mug Pen Pencil Plate Pot Watch"),
    "SideTable": [*KITCHEN, *BEDROOM],
    "SinkBasin": words(
        "Apple Bowl Cup Egg Fork Knife Lettuce Mug Pan Plate Pot Potato Spoon Tomato"
    ),
}
"""What each place can contain."""
OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
CLEANABLE = words("Apple Bowl Cup Egg Fork Knife Lettuce Mug Pan Plate Pot Potato Spoon Tomato")
HEATABLE = words("Apple Bread Cup Egg Mug Plate Potato Tomato")
COOLABLE = words("Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato")
LAMP = "DeskLamp"


@dataclass(frozen=True)
class Kind:
    """One of the published kinds of task (alfworld.gen.goal_library)."""

    texts: tuple[str, ...]
    objects: list[str]
    needs: str = ""
    """A fact that the object must have, in PDDL's words."""
    tool: str = ""
    """The place that gives the object this fact."""


KINDS = {
    "pick_and_place_simple": Kind(
        ("put a {obj} in {recep}", "put some {obj} on {recep}"), [*KITCHEN, *BEDROOM]
    ),
    "look_at_obj_in_light": Kind(
        ("look at {obj} under the {toggle}", "examine the {obj} with the {toggle}"), BEDROOM
    ),
    "pick_clean_then_place_in_recep": Kind(
        ("put a clean {obj} in {recep}", "clean some {obj} and put it in {recep}"),
        CLEANABLE,
        "isClean",
        "SinkBasin",
    ),
    "pick_heat_then_place_in_recep": Kind(
        ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
        HEATABLE,
        "isHot",
        "Microwave",
    ),
    "pick_cool_then_place_in_recep": Kind(
        ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
        COOLABLE,
        "isCool",
        "Fridge",
    ),
    "pick_two_obj_and_place": Kind(
        ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
        [*KITCHEN, *BEDROOM],
    ),
}
FIXED = {"Kitchen": ("Fridge", "Microwave", "SinkBasin"), "Bedroom": ("Desk",)}
"""Places that a room always has."""
DRAWN = {
    "Kitchen": ("Cabinet", "Cabinet", "CounterTop", "DiningTable", "Drawer", "Shelf"),
    "Bedroom": ("Bed", "Drawer", "Drawer", "Dresser", "Safe", "Shelf", "SideTable"),
}
"""Places of which a room has three."""
OTHER_OBJECTS = 4
"""Objects in a room that the task does not name."""


@dataclass(frozen=True)
class Quest:
    """A room with a task."""

    kind: str
    target: str
    """The type of the object."""
    into: str
    """The type of the place; empty if the task is to look at the object."""
    task: str
    """The task in ALFWorld's words."""
    places: dict[str, str]
    """The type of each place, by its name: `{"drawer 1": "Drawer"}`."""
    things: dict[str, str]
    """The type of each object, by its name."""
    where: dict[str, str]
    """The place of each object at the start."""

    def problem(self) -> str:
        """Return the problem in PDDL."""
        facts = ["(atLocation agent1 loc0)", "(= (total-cost) 0)"]
        for number, (name, kind) in enumerate(self.places.items(), start=1):
            place = identifier(name)
            facts += [f"(receptacleAtLocation {place} loc{number})"]
            facts += [f"(receptacleType {place} {kind}Type)"]
            if kind in OPENABLE:
                facts += [f"(openable {place})"]
        locations = {name: f"loc{number}" for number, name in enumerate(self.places, start=1)}
        for name, kind in self.things.items():
            thing, place = identifier(name), self.where[name]
            facts += [f"(objectType {thing} {kind}Type)"]
            facts += [f"(inReceptacle {thing} {identifier(place)})"]
            facts += [f"(objectAtLocation {thing} {locations[place]})"]
            facts += [f"({word} {thing})" for word in _properties(kind)]
        kinds = sorted(set(self.things.values()))
        place_kinds = sorted(set(self.places.values()))
        for place_kind in place_kinds:
            fitting = [kind for kind in FITS[place_kind] if kind in kinds]
            facts += [f"(canContain {place_kind}Type {kind}Type)" for kind in fitting]
        objects = [
            "agent1 - agent",
            f"loc0 {' '.join(locations.values())} - location",
            f"{_join(map(identifier, self.places))} - receptacle",
            f"{_join(map(identifier, self.things))} - object",
            f"{_join(f'{kind}Type' for kind in place_kinds)} - rtype",
            f"{_join(f'{kind}Type' for kind in kinds)} - otype",
        ]
        return (
            f"(define (problem household) (:domain alfred)\n(:objects {_join(objects)})\n"
            f"(:init {_join(facts)})\n(:goal {self.goal()})\n(:metric minimize (total-cost)))"
        )

    def goal(self) -> str:
        """Return the goal in PDDL, as in ALFWorld's library of goals."""
        held = f"(objectType ?o {self.target}Type)"
        if self.kind == "look_at_obj_in_light":
            lamp = f"(objectType ?l {LAMP}Type) (isToggled ?l)"
            return (
                f"(and (exists (?l - object ?r - receptacle ?a - agent ?x - location) (and {lamp} "
                "(receptacleAtLocation ?r ?x) (atLocation ?a ?x) (inReceptacle ?l ?r))) "
                f"(exists (?o - object ?a - agent) (and {held} (holds ?a ?o))))"
            )
        needs = KINDS[self.kind].needs
        inside = f"(receptacleType ?r {self.into}Type) {held} (inReceptacle ?o ?r)"
        if needs:
            inside += f" ({needs} ?o)"
        if self.kind == "pick_two_obj_and_place":
            second = inside.replace("?o", "?p")
            inside += f" (exists (?p - object) (and (not (= ?o ?p)) {second}))"
        return f"(exists (?r - receptacle ?o - object) (and {inside}))"


def draw(seed: int) -> Quest:
    """Return the quest of a seed."""
    rng = random.Random(f"household/{seed}")
    kind = rng.choice(list(KINDS))
    spec = KINDS[kind]
    room = rng.choice(["Kitchen", "Bedroom"])
    if spec.tool:
        room = "Kitchen"
    if kind == "look_at_obj_in_light":
        room = "Bedroom"
    types = sorted([*FIXED[room], *rng.sample(DRAWN[room], 3)])
    places = _number(types)
    stock = [name for name in spec.objects if name in (KITCHEN if room == "Kitchen" else BEDROOM)]
    pairs = []
    for target in stock:
        fitting = [into for into in types if target in FITS[into]]
        if kind == "look_at_obj_in_light":
            pairs.append((target, ""))
            continue
        # Somewhere else must be a place for it to lie at the start.
        if len(set(fitting)) > 1:
            pairs += [(target, into) for into in fitting if into != spec.tool]
    target, into = rng.choice(pairs)
    count = 2 if kind == "pick_two_obj_and_place" else 1
    others = [name for name in (KITCHEN if room == "Kitchen" else BEDROOM) if name != target]
    things = _number([target] * count + rng.sample(others, OTHER_OBJECTS))
    where = {}
    for name, thing in things.items():
        rooms = [place for place, type_ in places.items() if thing in FITS[type_]]
        if thing == target:
            rooms = [place for place in rooms if places[place] != into]
        where[name] = rng.choice(rooms)
    if kind == "look_at_obj_in_light":
        lamp = f"{LAMP.lower()} 1"
        things[lamp], where[lamp] = LAMP, "desk 1"
    task = rng.choice(spec.texts).format(
        obj=target.lower(), recep=into.lower(), toggle=LAMP.lower()
    )
    return Quest(kind, target, into, task, places, things, where)


def identifier(name: str) -> str:
    """Return a name in PDDL: `drawer 1` is `drawer_bar_1`, as in ALFWorld's files."""
    return name.replace(" ", "_bar_")


def _number(types: Iterable[str]) -> dict[str, str]:
    """Name things by their types: drawer 1, drawer 2."""
    names: dict[str, str] = {}
    for type_ in types:
        count = sum(type_ == other for other in names.values()) + 1
        names[f"{type_.lower()} {count}"] = type_
    return names


def _properties(kind: str) -> list[str]:
    if kind == LAMP:
        return ["toggleable"]
    can = {"cleanable": CLEANABLE, "heatable": HEATABLE, "coolable": COOLABLE}
    return ["pickupable", *[word for word, kinds in can.items() if kind in kinds]]


def _join(parts: Iterable[str]) -> str:
    return " ".join(parts)
