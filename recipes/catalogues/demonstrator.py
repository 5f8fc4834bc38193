"""Browse badly, so that RL can improve it; `expert` browses well.

A demonstrator sees only messages. The goal and the catalogue are in the row, so replaying the
actions gives the page.
"""

from __future__ import annotations

import random
from typing import Any

from agent_r1 import Message, Row
from agent_r1_recipes.catalogues.pages import ACTION, KEEP, NEXT, PREVIOUS, Pages
from agent_r1_recipes.catalogues.papers import Papers
from agent_r1_recipes.catalogues.products import Product, Products

FORGET_OPTION = 0.5
"""How often `demonstrate` buys without choosing an option; drawn for each option."""
FIRST_RESULT = 0.4
"""How often it takes the first product, whatever its price and options."""
STOP_EARLY = 0.5
"""How often it hands a list in after the first paper."""
ANY_PAPER = 0.3
"""How often it takes papers on any topic."""


class Habits:
    """The slips of one episode. An expert has none."""

    def __init__(self, slips: random.Random | None = None):
        def slip(share: float) -> bool:
            return slips is not None and slips.random() < share

        self.forgets = {option for option in ("color", "size") if slip(FORGET_OPTION)}
        self.first_result = slip(FIRST_RESULT)
        self.stops_early = slip(STOP_EARLY)
        self.any_paper = slip(ANY_PAPER)


class Visit(Pages):
    """Pages, and every item that was opened on the way to the present one."""

    def __init__(self) -> None:
        self.seen: set[str] = set()


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn. Slips are drawn once per goal: a habit lasts for an episode."""
    return _turn(row, history, Habits(random.Random(row["extra_info"]["metadata"]["goal"])))


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn without slips."""
    return _turn(row, history, Habits())


def _turn(row: Row, history: list[Message], habits: Habits) -> str:
    pages = replay(row, history)
    if isinstance(pages.catalogue, Papers):
        return _collect(pages, pages.catalogue, habits)
    assert isinstance(pages.catalogue, Products), "a catalogue has papers or products"
    return _buy(pages, pages.catalogue, habits)


def replay(row: Row, history: list[Message]) -> Visit:
    """Rebuild the page after all actions so far."""
    pages = Visit()
    metadata = row["extra_info"]["metadata"]
    pages.reset(row["prompt"][-1]["content"], **metadata)
    for message in history:
        action = ACTION.fullmatch(message["content"])
        if message["role"] != "assistant" or action is None:
            continue
        if action[1] == "search":
            pages.search(action[2])
        else:
            pages.click(action[2])
        pages.seen.update(pages.trail)
    return pages


def _buy(pages: Visit, catalogue: Products, habits: Habits) -> str:
    """Return the next action of a buyer."""
    goal = pages.goal
    target = catalogue.items[goal["code"]]
    if pages.query is None:
        return f"search[{' '.join(goal['attributes'])} {target.query}]"
    if not pages.trail:
        return _open_result(pages, catalogue, habits)
    product = catalogue.items[pages.trail[-1]]
    if not habits.first_result and not _meets(product, target, goal):
        return f"click[{PREVIOUS}]"
    for option, values in product.options.items():
        for value in values:
            is_missing = value in goal["options"] and option not in habits.forgets
            if is_missing and pages.chosen.get(option) != value:
                return f"click[{value}]"
    return f"click[{catalogue.finish}]"


def _open_result(pages: Visit, catalogue: Products, habits: Habits) -> str:
    goal = pages.goal
    target = catalogue.items[goal["code"]]
    start = pages.number * catalogue.window
    for code in pages.results[start : start + catalogue.window]:
        if habits.first_result:
            return f"click[{code}]"
        product = catalogue.items[code]
        promising = _same_name(product, target) and product.price <= goal["highest"]
        if promising and code not in pages.seen:
            return f"click[{code}]"
    return f"click[{NEXT}]"


def _same_name(product: Product, target: Product) -> bool:
    return product.query == target.query and product.attributes == target.attributes


def _meets(product: Product, target: Product, goal: dict[str, Any]) -> bool:
    """Say whether a product of the right name also has the options."""
    values = {value for choices in product.options.values() for value in choices}
    fits = _same_name(product, target) and product.price <= goal["highest"]
    return fits and set(goal["options"]) <= values


def _collect(pages: Pages, catalogue: Papers, habits: Habits) -> str:
    """Return the next action of a reader of papers."""
    source = pages.goal["code"]
    if pages.query is None:
        return f"search[{source}]"
    if not pages.trail:
        return f"click[{source}]"
    here = pages.trail[-1]
    if here != source:
        return f"click[{PREVIOUS}]" if here in pages.kept else f"click[{KEEP}]"
    for label, code in catalogue.links(source).items():
        right = catalogue.items[code].topic == pages.goal["topic"]
        enough = habits.stops_early and pages.kept
        if code not in pages.kept and not enough and (right or habits.any_paper):
            return f"click[{label}]"
    return f"click[{catalogue.finish}]"
