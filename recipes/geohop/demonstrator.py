"""Play GeoHop on the solver's path: read with searches, or answer from memory without tools."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row
from agent_r1_recipes.geohop.solver import query, read_facts, solve

HASTE = 0.5
"""Share of episodes in which `demonstrate` answers with something it has read. RL has to unlearn
that."""


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Play a turn that in half of the cases stops after the first search."""
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
    right = row["reward_model"]["ground_truth"][0]
    if row["env_kwargs"]["tools"] == []:
        return _say(right, "from memory")
    results = [message["content"] for message in history if message["role"] == "tool"]
    facts = read_facts("\n".join(results).splitlines())
    answers, missing_fact = solve(metadata["asked"], metadata["path"], facts)
    if missing_fact is None:
        if right in answers:
            return _say(right, "found")
        return _say(sorted(answers)[0], "found")
    if results and rng.random() < haste:
        values: list[str] = []
        for (relation, _), values_of_place in facts.items():
            if relation != "inhabitants":  # a number is no answer
                values += values_of_place
        return _say(rng.choice(sorted(values) or metadata["asked"]), "enough")
    earlier_turns = "\n".join(
        message["content"] for message in history if message["role"] == "assistant"
    )
    relation, place = missing_fact
    # The same search again would give the same passages. The place alone is the second try.
    for words in (query(relation, place), place):
        if f'"{words}"' not in earlier_turns:
            return Hermes.call("search", "look it up", query=words)
    return _say("unknown", "not found")
