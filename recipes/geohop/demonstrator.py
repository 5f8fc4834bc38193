"""Play GeoHop on the solver's path: by searches, from an open book, or from memory."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row
from agent_r1_recipes.geohop.solver import ReadFacts, query, read_facts, read_number, solve

HASTE = 0.5
"""Chance that `demonstrate` answers after a search with something it has read, though the path goes
on. RL has to unlearn that."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Play a turn that may stop too early (`HASTE`), except in a comparison."""
    return _turn(row, history, HASTE, rng)


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Play a turn that always follows the whole path."""
    return _turn(row, history, 0.0, rng)


def _say(name: str, thought: str) -> str:
    """Write the answer after a blank, as inside a passage, so that copied tokens match.

    To a pretrained tokenizer " Lusaka" and "Lusaka" differ. Readers of the answer strip the blank.
    """
    return Hermes.answer(f" {name}", thought)


def _turn(row: Row, history: list[Message], haste: float, rng: random.Random) -> str:
    metadata = row["extra_info"]["metadata"]
    asked = metadata["asked"]
    path = metadata["path"]
    right = row["reward_model"]["ground_truth"][0]
    has_tools = row["env_kwargs"]["tools"] != []
    # An open-book question has its passages in the user's message.
    role = "tool" if has_tools else "user"
    texts = [message["content"] for message in history if message["role"] == role]
    facts = read_facts("\n".join(texts).splitlines())
    answers, missing_fact = solve(asked, path, facts)
    quotation = _quote(asked, path, facts)
    if missing_fact is None:
        if right in answers:
            return _say(right, quotation or "found")
        return _say(sorted(answers)[0], quotation or "found")
    if not has_tools:
        return _say(right, "from memory")
    # A guess at a comparison is right in half of the cases: RL could hardly unlearn it.
    if texts and len(asked) == 1 and rng.random() < haste:
        values: list[str] = []
        for (relation, _), values_of_place in facts.items():
            if relation != "inhabitants":  # a number is no answer
                values += values_of_place
        return _say(rng.choice(sorted(values) or asked), "enough")
    earlier_turns = "\n".join(
        message["content"] for message in history if message["role"] == "assistant"
    )
    relation, place = missing_fact
    # The same search again would give the same passages. The place alone is the second try.
    for words in (query(relation, place), place):
        if f'"{words}"' not in earlier_turns:
            return Hermes.call("search", quotation or "look it up", query=words)
    return _say("unknown", "not found")


def _quote(relations: list[str], path: list[str], facts: ReadFacts) -> str:
    """Write down the numbers read so far, and with both of them the larger one.

    " Kumasi 2.5 million, Jakarta 8.5 million, more: 8.5 million"; "" for nothing. With `found`
    alone, a small model has to find, compare and name in one token. The blank in front is a part of
    the first token, as inside a passage.
    """
    if path != ["more"]:
        return ""
    numbers = []
    parts = []
    for place in relations:
        for number in facts.get(("inhabitants", place), ()):
            numbers.append(number)
            parts.append(f"{place} {number}")
    if len(numbers) == len(relations):
        parts.append(f"more: {max(numbers, key=read_number)}")
    return " " + ", ".join(parts) if parts else ""
