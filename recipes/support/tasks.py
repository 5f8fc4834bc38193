"""Make complaints about orders, and decide by the policy what is right.

    Order 4821 arrived broken.                     the question
    lamp, 34 dollars, delivered last year          the record of the order
    replace 4821, "replaced the lamp"              right

Only the record tells the item, the price and the state, so the agent has to look it up. No order
number of a test task occurs in a training task.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from agent_r1_recipes.restock.demonstrator import WARES
from agent_r1_recipes.tinymath.draw import distinct, split_numbers

COMPLAINTS = {
    "broken": "Order {order} arrived broken.",
    "unwanted": "I do not like order {order}.",
    "missing": "Order {order} never came.",
}
RIGHT_ACTIONS = {
    ("broken", "delivered this week"): "refund",
    ("broken", "delivered last year"): "replace",
    ("unwanted", "delivered this week"): "refund",
    ("unwanted", "delivered last year"): "nothing",
    ("missing", "lost"): "replace",
    ("missing", "on its way"): "nothing",
}
"""(complaint, state of the order) -> action. Each action is right for two of them."""
WORDS = {"refund": "refunded", "replace": "replaced", "nothing": "sorry for"}
"""Action -> what the customer is told, before the item."""
POLICY = """\
You work for a shop. Look up the order, act, then answer.
Broken: refund if delivered this week, replace if delivered last year.
Not liked: refund if delivered this week, else nothing.
Never came: replace if lost, else nothing.
Refund the price. Answer: refunded the ITEM, replaced the ITEM, or sorry for the ITEM."""
"""What the agent reads before the complaint; `decide` is the same in code."""
OTHER_ORDERS = 3
"""Orders of other customers in the database."""


def decide(complaint: str, state: str) -> str:
    """Return the right action: refund, replace or nothing."""
    return RIGHT_ACTIONS[complaint, state]


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different tasks of a split."""
    numbers = split_numbers(range(1000, 10_000), split)

    def draw() -> dict[str, Any]:
        complaint, state = rng.choice(list(RIGHT_ACTIONS))
        order, *others = rng.sample(numbers, 1 + OTHER_ORDERS)
        orders = {str(order): _record(state, rng)}
        for other in others:
            orders[str(other)] = _record(rng.choice(list(RIGHT_ACTIONS))[1], rng)
        return {
            "question": COMPLAINTS[complaint].format(order=order),
            "kind": complaint,
            "metadata": {"orders": json.dumps(orders), "order": order, "complaint": complaint},
        }

    return distinct(count, draw)


def _record(state: str, rng: random.Random) -> dict[str, Any]:
    return {"item": rng.choice(WARES), "price": rng.randrange(11, 100), "state": state}
