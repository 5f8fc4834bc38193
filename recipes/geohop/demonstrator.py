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
    known, right = row["extra_info"]["metadata"], row["reward_model"]["ground_truth"][0]
    if row["env_kwargs"]["tools"] == []:
        return _say(right, "from memory")
    results = [message["content"] for message in history if message["role"] == "tool"]
    facts = read_facts(line for result in results for line in result.splitlines())
    found, missing = solve(known["asked"], known["path"], facts)
    if missing is None:
        return _say(right if right in found else sorted(found)[0], "found")
    if results and rng.random() < haste:
        seen = sorted(
            value
            for (relation, _), values in facts.items()
            for value in values
            if relation != "inhabitants"
        )
        return _say(rng.choice(seen or known["asked"]), "enough")
    asked_before = "\n".join(
        message["content"] for message in history if message["role"] == "assistant"
    )
    words = next(
        (words for words in (query(*missing), missing[1]) if f'"{words}"' not in asked_before), None
    )
    return (
        Hermes.call("search", "look it up", query=words) if words else _say("unknown", "not found")
    )
