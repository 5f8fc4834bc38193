"""The shop's questions, and a demonstrator that often makes a mistake."""

import random
from collections.abc import Iterator
from typing import Any

from agent_r1 import Hermes, Message, Row

WARES = [
    "lamp",
    "chair",
    "table",
    "clock",
    "vase",
    "spoon",
    "plate",
    "towel",
    "candle",
    "basket",
    "mirror",
    "pillow",
]


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        metadata = {
            "item": rng.choice(WARES),
            "want": rng.randrange(20, 100),
            "stock": rng.randrange(2, 20),
        }
        yield {
            "question": f"We need {metadata['want']} of the {metadata['item']}.",
            "metadata": metadata,
        }


def play(row: Row, history: list[Message], rng: random.Random) -> str:
    """Return the next turn. It often omits the count or the subtraction."""
    metadata = row["extra_info"]["metadata"]
    results = [message["content"] for message in history if message["role"] == "tool"]
    if not results and rng.random() < 0.7:
        return Hermes.call("count", "look first", item=metadata["item"])
    if len(results) == 1 and rng.random() < 0.5:
        return Hermes.call("missing", "the rest", want=metadata["want"], have=int(results[0]))
    # .35 of the episodes are right: both calls were made, and the last result is the difference.
    number = metadata["want"]
    if results:
        number = int(results[-1])
    return Hermes.call("order", "enough", item=metadata["item"], number=number)
