"""Tell what a play shows of a solution, and count it over many plays.

In: the text of an explorer's play, and the row of its question. Out: whether the play shows how its
question is solved, and counts. Next: `demonstrator.py` drops the plays that show a solution, and
`cloned.py` counts what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from agent_r1 import Row
from agent_r1_recipes.laptop.explorer import BEGIN, DONE

THOUGHT = re.compile(r"<think>([^<]*)</think>")
ITEM = re.compile(r"/(\w+)")
QUERY = re.compile(r'"query": "([^"]*)"')
ANSWER = re.compile(r"<answer>([^<]*)</answer>")
QUESTION = re.compile(r"<\|im_start\|>user\n([^<]*)<\|im_end\|>")


@dataclass(frozen=True)
class Play:
    """Hold an explorer's play."""

    question: str
    plan: list[str]
    """Items in the order of the first thought; the last one is `answer`."""
    chosen_items: list[str]
    """The item that each thought ends with: what comes next."""
    quoted_relations: list[str]
    """What each later thought quotes: the relation before its last item."""
    queries: list[str]
    answer: str


def read_play(text: str) -> Play:
    """Read a play from the text of its conversation."""
    thoughts = THOUGHT.findall(text)
    plan, _, _ = thoughts[0].partition(": ")
    [question] = QUESTION.findall(text)
    [answer] = ANSWER.findall(text)
    choices = [ITEM.findall(thought)[-1] for thought in thoughts]
    quotes = [ITEM.findall(thought)[-2] for thought in thoughts[1:]]
    return Play(question, ITEM.findall(plan), choices, quotes, QUERY.findall(text), answer)


def is_right(play: Play, row: Row) -> bool:
    """Return whether the play earns the reward."""
    return play.answer in row["reward_model"]["ground_truth"]


def has_whole_chain(play: Play, row: Row) -> bool:
    """Return whether the play begins with the whole chain, whatever it does then.

    The chain is the solution's relations as items, or its entities as queries.
    """
    lookups = row["extra_info"]["lookups"]
    relations = [lookup["relation"] for lookup in lookups]
    entities = [lookup["entity"] for lookup in lookups]
    hops = len(lookups)
    return play.chosen_items[:hops] == relations or play.queries[:hops] == entities


def shows_solution(play: Play, row: Row) -> bool:
    """Return whether a play of several hops is right, or has the whole chain."""
    if row["extra_info"]["hops"] == 1:
        return False
    return is_right(play, row) or has_whole_chain(play, row)


def margins_of_next_item(play: Play) -> list[float]:
    """Compare the plan's next item with each other one, at each choice of a play.

    Next is the item that stands in the plan after what was quoted. A margin is 1 for a choice of
    the next item. Otherwise it is -1 / (others), so its mean is 0 if all items are equally likely.
    Left out are choices with one option, or without the next item among the options. A plan with
    one relation twice has no margins, since *next* is ambiguous.
    """
    if len(set(play.plan)) < len(play.plan):
        return []
    margins = []
    options = {*play.plan} - {DONE}  # before the first search, nothing is read to answer with
    for done, item in zip([BEGIN, *play.quoted_relations], play.chosen_items, strict=True):
        options.discard(done)
        next_item = dict(zip([BEGIN, *play.plan], play.plan, strict=False)).get(done)
        if next_item in options and len(options) > 1:
            margins.append(1.0 if item == next_item else -1 / (len(options) - 1))
        options.discard(item)
        if done == BEGIN:
            options.add(DONE)
    return margins


def count(plays: Iterable[tuple[Play, Row]]) -> dict[str, Any]:
    """Count plays by kind, and choices of the plan's next item.

    Choices are those of questions of several hops. `margin` is the mean of `margins_of_next_item`,
    with its 95 % interval: at most 0 if the next item is chosen no more often than any other.
    """
    kinds: dict[str, dict[str, int]] = {}
    margins: list[float] = []
    for play, row in plays:
        counts = kinds.setdefault(
            row["extra_info"]["kind"], {"plays": 0, "right": 0, "whole_chain": 0}
        )
        counts["plays"] += 1
        counts["right"] += is_right(play, row)
        counts["whole_chain"] += has_whole_chain(play, row)
        if row["extra_info"]["hops"] > 1:
            margins += margins_of_next_item(play)
    next_item: dict[str, Any] = {"choices": len(margins)}
    if len(margins) > 1:
        mean = fmean(margins)
        half = 1.96 * stdev(margins) / len(margins) ** 0.5
        next_item |= {
            "chosen": margins.count(1.0),
            "margin": mean,
            "ci95": [mean - half, mean + half],
        }
    return {"by_kind": dict(sorted(kinds.items())), "next_item": next_item}
