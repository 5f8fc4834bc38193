"""Other names: the same questions in a world where everything is called something else.

In: rows, passages and the search tool of a published data set. Out: the same with all names dealt out anew: the river may
be called Mozart there, and the composer Lisbon. Next: `cold_start.py` has its demonstrator play in such worlds.

Why? A model of half a million parameters would learn a few hundred names and facts by heart, and answer from memory. In
hundreds of worlds that contradict one another there is nothing to remember. What stays the same is how the questions are
put and how passages are read, and a name has to be copied from where it stands. It also keeps RL honest: nobody has shown
the answers to its questions.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import replace
from typing import Any

from agent_r1.data.prompts import INSTRUCTIONS
from agent_r1.tool import BaseTool, ToolOutput
from agent_r1.types import Row

NAME = re.compile(r"[A-Z]\w*(?:[ '-][A-Z]\w*)*")
"""What a name looks like: words with capitals, side by side."""


def names_in(passages: list[str]) -> list[str]:
    """All names of a corpus: what looks like one, and is never written without its capital ("It" is)."""
    ordinary = set(re.findall(r"\b[a-z]\w*", " ".join([*passages, INSTRUCTIONS])))
    found = {name for passage in passages for name in NAME.findall(passage)}
    return sorted(name for name in found if name.lower() not in ordinary)


def renamed(text: str, table: dict[str, str]) -> str:
    """`text` with all names that are in `table` replaced."""

    def swap(match: re.Match) -> str:
        name = match[0]
        first, _, rest = name.partition(
            " "
        )  # the word that a question begins with also has a capital: Were Oscar Wilde
        return f"{first} {table[rest]}" if name not in table and rest in table else table.get(name, name)

    return NAME.sub(swap, text)


class OtherNames:
    """One world: all names, dealt out anew."""

    def __init__(self, names: list[str], rng: random.Random):
        self._there = dict(zip(names, rng.sample(names, len(names)), strict=True))
        self._back = {there: here for here, there in self._there.items()}

    def rename(self, text: str) -> str:
        return renamed(text, self._there)

    def restore(self, text: str) -> str:
        return renamed(text, self._back)

    def row(self, row: Row) -> Row:
        """The row as it is there: question, answers, and the titles that its demonstrator looks up."""
        row = copy.deepcopy(row)
        row["prompt"][-1]["content"] = self.rename(row["prompt"][-1]["content"])
        row["reward_model"]["ground_truth"] = [self.rename(answer) for answer in row["reward_model"]["ground_truth"]]
        row["extra_info"]["supporting"] = [self.rename(title) for title in row["extra_info"]["supporting"]]
        return row


class RenamedSearch(BaseTool):
    """The search tool in the world of `names`: the real index behind it never hears a made-up name."""

    def __init__(self, search: BaseTool, names: OtherNames | None = None):
        self.name, self.description, self.parameters = search.name, search.description, search.parameters
        super().__init__()
        self._search, self.names = search, names

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        found = await self._search.execute({"query": self.names.restore(args["query"])})
        return replace(found, content=self.names.rename(found.content))
