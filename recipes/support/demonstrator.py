"""Answer complaints badly, so that RL can improve it."""

from __future__ import annotations

import random

from agent_r1 import Hermes, Message, Row
from agent_r1_recipes.support.tasks import RIGHT_ACTIONS, WORDS, decide

RIGHT = 0.3
"""How often `demonstrate` follows the policy."""
GENEROUS = 0.5
"""How often it refunds, whatever the policy says. It is above `RIGHT`: a model that always takes
the likeliest action refunds everything before RL."""
ACTIONS = sorted(set(RIGHT_ACTIONS.values()))


def demonstrate(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn."""
    dice = rng.random()
    action = None
    if RIGHT <= dice < RIGHT + GENEROUS:
        action = "refund"
    elif dice >= RIGHT + GENEROUS:
        action = rng.choice(ACTIONS)
    return _turn(row, history, action)


def expert(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn without mistakes."""
    return _turn(row, history, None)


def _turn(row: Row, history: list[Message], action: str | None) -> str:
    """Return the next turn; `action` is the policy's if it is None."""
    task = row["extra_info"]["metadata"]
    order = task["order"]
    results = [message["content"] for message in history if message["role"] == "tool"]
    if not results:
        return Hermes.call("look_up", "look first", order=order)
    item, price, state = results[0].split(", ")
    if len(results) > 1:  # it has acted
        action = "refund" if results[1].startswith("paid") else "replace"
        return Hermes.answer(f"{WORDS[action]} the {item}", "tell")
    action = action or decide(task["complaint"], state)
    thought = f"{task['complaint']}, {state}: {action}"
    if action == "refund":
        return Hermes.call("refund", thought, order=order, amount=int(price.split()[0]))
    if action == "replace":
        return Hermes.call("replace", thought, order=order)
    return Hermes.answer(f"{WORDS['nothing']} the {item}", thought)
