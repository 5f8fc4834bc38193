"""Search the corpus for the agent. In: a query. Out: passages, one per line."""

from __future__ import annotations

from copy import copy
from typing import Any

from agent_r1.config.settings import SearchConfig
from agent_r1.ground.errors import ConfigError
from agent_r1.search.index import Hit
from agent_r1.search.searcher import MAX_QUERY_CHARS, Index, Searcher
from agent_r1.tool.base import BaseTool, InvalidArgumentsError, ToolOutput, valid_unicode


class SearchTool(BaseTool):
    """Find the passages nearest to a query. Concurrent calls share a batch (search/searcher.py)."""

    name = "search"
    description = "Search for passages about a query."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, searcher: Searcher, top_k: int, min_k: int | None = None):
        """Take the number of passages, or its range: see `SearchConfig`."""
        super().__init__()
        self.searcher = searcher
        self.top_k = top_k
        self.min_k = min_k or top_k
        self.episode: dict[Any, Any] | None = None
        # The index may wait for a service.
        self.timeout_s = getattr(searcher.index, "deadline_s", None)

    @classmethod
    def over(cls, index: Index, top_k: int, min_k: int | None = None) -> SearchTool:
        """Make the tool over an index."""
        return cls(Searcher(index), top_k, min_k)

    @classmethod
    def from_run(
        cls,
        searcher: Searcher | None = None,
        top_k: int = SearchConfig().top_k,
        min_k: int | None = None,
        **_: Any,
    ) -> SearchTool:
        """Make the tool from a run's resources, for `make_tools`."""
        if searcher is None:
            raise ConfigError(
                "the tool 'search' needs an index; build one with `agent-r1 index`, or remove the "
                "tool",
                code="missing_index",
            )
        return cls(searcher, top_k, min_k)

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        query = self.query_of(args)
        if not query:
            raise InvalidArgumentsError(
                "query is empty; write what to look for, for example the name of an entity"
            )
        hits = await self.find(query)
        content = "\n".join(_line(hit) for hit in hits) or "no results"
        return ToolOutput(content, {"titles": [hit.title for hit in hits]})

    async def find(self, query: str) -> list[Hit]:
        """Return the passages of a result in the order in which the agent reads them."""
        return await self.searcher.search(query, self.passages(query))

    def for_episode(self, shared: dict[Any, Any]) -> SearchTool:
        """Return the tool of one episode, which remembers the episode's first query."""
        if self.min_k == self.top_k:
            return self
        tool = copy(self)
        tool.episode = shared
        return tool

    def passages(self, query: str) -> int:
        """Return how many passages the result of a query has.

        In one episode it is always the same number. The first query decides, by the sum of its code
        points. If chance decided, samples of one question could not be compared.
        """
        if self.episode is not None:
            query = self.episode.setdefault(SearchTool, query)
        return self.min_k + sum(map(ord, query)) % (self.top_k - self.min_k + 1)

    @staticmethod
    def query_of(args: dict[str, Any]) -> str:
        """Return the query.

        Half of a surrogate pair, which a model may write, would make tokenizers raise.
        """
        return valid_unicode(args["query"][:MAX_QUERY_CHARS]).strip()


make = SearchTool.from_run


def _line(hit: Hit) -> str:
    """Format a passage on one line.

    Its title comes first, unless the text begins with it: tokens cost time.
    """
    text = hit.text
    if not text.startswith(hit.title):
        text = f"{hit.title}: {text}"
    return " ".join(text.split())
