"""Look up a customer's order, act by a policy, and say what was done.

In: the orders of a task. Out: a copy of them for each episode, which the methods of a plain class
read and change (env/class_env.py). The reward compares all orders with what the policy demands.
"""

from __future__ import annotations

import json
from typing import Any

from agent_r1_recipes.support.tasks import POLICY, WORDS, decide


class Support:
    """The desk of a shop. The database belongs to the episode."""

    score_name = "solved"

    def reset(self, orders: str, order: int, complaint: str, **row: Any) -> str:
        self.orders: dict[str, dict[str, Any]] = json.loads(orders)
        self.order = order
        self.complaint = complaint
        self.paid: dict[int, int] = {}
        self.sent: list[int] = []
        self.score = False
        return POLICY

    def look_up(self, order: int) -> str:
        """Look up an order: its item, price and state.

        Args:
            order: Number of the order.
        """
        record = self.orders.get(str(order))
        if record is None:
            return "no such order"
        return f"{record['item']}, {record['price']} dollars, {record['state']}"

    def refund(self, order: int, amount: int) -> str:
        """Pay an order back.

        Args:
            order: Number of the order.
            amount: Dollars to pay back.
        """
        if str(order) not in self.orders:
            return "no such order"
        self.paid[order] = self.paid.get(order, 0) + amount
        return f"paid {amount} dollars"

    def replace(self, order: int) -> str:
        """Send the item of an order again.

        Args:
            order: Number of the order.
        """
        if str(order) not in self.orders:
            return "no such order"
        self.sent.append(order)
        return "sent again"

    def get_reward(self, answer: str) -> float:
        """Return 1 if all records are as the policy demands, and the answer is true."""
        record = self.orders[str(self.order)]
        action = decide(self.complaint, record["state"])
        payments = {self.order: record["price"]} if action == "refund" else {}
        shipments = [self.order] if action == "replace" else []
        answer_words = " ".join(answer.lower().strip(" .!").split())
        right = f"{WORDS[action]} the {record['item']}"
        self.score = self.paid == payments and self.sent == shipments and answer_words == right
        return float(self.score)
