"""Results in another order: the right passage is at each place equally often."""

from __future__ import annotations

import asyncio
import random
import string
from collections import Counter

import pytest

from agent_r1 import Hit, SearchTool, load_config, make_tools
from agent_r1_recipes.robustness.conditions import Shuffled
from agent_r1_recipes.robustness.shuffled_search import ShuffledSearch

NAMES = [f"{first}{second}" for first in string.ascii_uppercase for second in range(100)]


class Ranked:
    """An index whose passages tell their place."""

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        hits = [Hit(str(n), str(n), f"{n} is a place", 0.0) for n in range(top_k)]
        return [list(hits) for _ in queries]


def places(tool: SearchTool, query: str) -> list[str]:
    result = asyncio.run(tool.execute({"query": query}))
    return [line.split()[0] for line in result.content.split("\n")]


@pytest.mark.parametrize("top_k", [2, 3, 6])
def test_the_best_passage_is_at_each_place_equally_often(top_k):
    tool = ShuffledSearch.over(Ranked(), top_k)
    queries = random.Random(0).sample(NAMES, 1200)
    counts = Counter(places(tool, query).index("0") for query in queries)
    expected = len(queries) / top_k
    assert set(counts) == set(range(top_k))
    # Chi-squared below its .999 quantile for 5 degrees of freedom.
    assert sum((count - expected) ** 2 for count in counts.values()) / expected < 20.5
    plain = SearchTool.over(Ranked(), top_k)
    assert all(places(plain, query)[0] == "0" for query in queries[:50])


def test_an_order_follows_from_the_query_and_loses_no_passage():
    tool = ShuffledSearch.over(Ranked(), 6, 2)
    for query in NAMES[:40]:
        count = tool.passages(query)
        assert places(tool, query) == places(tool, query)
        # Cut to its number first: the passages are the best ones.
        assert sorted(places(tool, query)) == [str(n) for n in range(count)]


def test_both_ways_to_it_lead_to_this_tool(micro):
    tools = make_tools(["shuffled_search"], searcher=micro.tools["search"].searcher, top_k=4)
    assert list(tools) == ["search"] and isinstance(tools["search"], ShuffledSearch)
    config = load_config("shuffled")
    assert config.searches and config.search.min_k == 2
    rows, under = Shuffled().apply(micro.config, micro.rows("test"), lambda: dict(micro.tools))
    assert rows == micro.rows("test") and isinstance(under["search"], ShuffledSearch)
    assert under["search"].top_k == micro.tools["search"].top_k
    assert under["search"].searcher is micro.tools["search"].searcher
