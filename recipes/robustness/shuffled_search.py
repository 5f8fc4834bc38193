"""Put each result into another order, so that no passage is read by its place.

In: a query. Out: the usual passages, in an order that follows from the query. Next: `env.tools=
[shuffled_search]` trains with it, and the condition `shuffled` evaluates with it.
"""

from __future__ import annotations

import random

from agent_r1 import Hit, SearchTool


class ShuffledSearch(SearchTool):
    """The search tool, with results in another order than that of their scores.

    The order follows from the query. If chance decided, samples of one question could not be
    compared.
    """

    async def find(self, query: str) -> list[Hit]:
        hits = await super().find(query)
        random.Random(query).shuffle(hits)
        return hits


make = ShuffledSearch.from_run
