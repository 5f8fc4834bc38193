"""Replace the index in an evaluation, to measure an agent without useful search.

In: `--retriever empty` or `random`. Out: no passages, or random passages, for `searcher.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agent_r1 import Hit, Passage


class Placebo:
    """Find passages that have nothing to do with the query; none at all without `passages`.

    Equal queries find equal ones.
    """

    def __init__(self, passages: Sequence[Passage] = (), seed: int = 0):
        self.passages = passages
        self.seed = seed

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        return [self._draw(query, min(top_k, len(self.passages))) for query in queries]

    def _draw(self, query: str, count: int) -> list[Hit]:
        # Seeded with the query: an agent that searches twice for the same must not see chance.
        passages = random.Random(f"{self.seed}/{query}").sample(self.passages, count)
        return [Hit(passage.id, passage.title, passage.text, 0.0) for passage in passages]
