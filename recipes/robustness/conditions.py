"""Evaluate without tools, or with a useless or hostile search.

In: a condition such as `poison 0.5`, rows. Out: the rows and tools to evaluate with, and additional
facts for the card. Next: `agent-r1 eval --closed-book`, `--retriever empty` and `--poison RATE`
write such a card next to the run's card.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agent_r1 import (
    BaseTool,
    Config,
    ConfigError,
    Row,
    SearchTool,
    Trajectory,
    Workspace,
    make_env,
)
from agent_r1_recipes.robustness.ablated_search import Placebo
from agent_r1_recipes.robustness.injected_search import PoisonedIndex, draw_document
from agent_r1_recipes.robustness.shuffled_search import ShuffledSearch

LoadTools = Callable[[], dict[str, BaseTool]]
"""An index can take minutes to load, and some conditions need no tools."""


@dataclass(frozen=True)
class Condition(ABC):
    """Change an evaluation; `argument` is the text after the condition's name."""

    argument: str = ""

    @abstractmethod
    def apply(
        self, config: Config, rows: list[Row], load_tools: LoadTools
    ) -> tuple[list[Row], dict[str, BaseTool]]:
        """Return the rows and tools of the evaluation. `load_tools` returns the agent's own.

        Raises ConfigError where the task does not know the condition.
        """

    def report(self, trajectories: list[Trajectory], seed: int) -> dict[str, Any]:
        """Return further keys for the eval card."""
        return {}


class ClosedBook(Condition):
    """No tools."""

    def apply(
        self, config: Config, rows: list[Row], load_tools: LoadTools
    ) -> tuple[list[Row], dict[str, BaseTool]]:
        rows_without_tools = []
        for row in rows:
            env_kwargs = row.get("env_kwargs") or {}
            rows_without_tools.append(row | {"env_kwargs": env_kwargs | {"tools": []}})
        if getattr(make_env(rows_without_tools[0], {}, config.env), "stateful", False):
            raise ConfigError(
                f"--closed-book removes the tools, but the tools of env.name={config.env.name} are "
                "its world; use it for questions",
                code="unfit_condition",
            )
        return rows_without_tools, {}


def search_tools(config: Config, load_tools: LoadTools, condition: str) -> dict[str, BaseTool]:
    """Load the agent's tools. Raise ConfigError if search is not one of them."""
    if not config.searches:
        raise ConfigError(
            f"{condition}: this agent does not search; env.tools is {', '.join(config.env.tools)}",
            code="unfit_condition",
        )
    return load_tools()


def count_of(condition: str, argument: str) -> int:
    """Read a condition's number. Raise ConfigError unless it is from 1 to 99."""
    if not (argument.isascii() and argument.isdigit() and len(argument) < 3 and int(argument)):
        raise ConfigError(
            f"the condition {condition!r} needs a number from 1 to 99, such as '{condition} 4'; "
            f"{argument!r} is none",
            code="unfit_condition",
        )
    return int(argument)


class Passages(Condition):
    """A fixed number of passages in each result."""

    def apply(
        self, config: Config, rows: list[Row], load_tools: LoadTools
    ) -> tuple[list[Row], dict[str, BaseTool]]:
        tools = search_tools(config, load_tools, "passages")
        count = count_of("passages", self.argument)
        tools["search"] = SearchTool(tools["search"].searcher, count)
        return rows, tools


class Shuffled(Condition):
    """The passages of each result in another order."""

    def apply(
        self, config: Config, rows: list[Row], load_tools: LoadTools
    ) -> tuple[list[Row], dict[str, BaseTool]]:
        tools = search_tools(config, load_tools, "shuffled")
        search = tools["search"]
        tools["search"] = ShuffledSearch(search.searcher, search.top_k, search.min_k)
        return rows, tools


class OtherSearch(Condition):
    """The agent's own tools, over another index than it was trained with."""

    more = 0
    """Results in addition to `search.top_k`."""

    def apply(
        self, config: Config, rows: list[Row], load_tools: LoadTools
    ) -> tuple[list[Row], dict[str, BaseTool]]:
        tools = search_tools(config, load_tools, type(self).__name__.lower())
        search = tools["search"]
        tools["search"] = SearchTool.over(
            self.index(config, search.searcher.index),
            search.top_k + self.more,
            search.min_k + self.more,
        )
        return rows, tools

    @abstractmethod
    def index(self, config: Config, index: Any) -> Any:
        """Make what the search tool asks instead of `index`."""


class Empty(OtherSearch):
    """A search that finds nothing."""

    def index(self, config: Config, index: Any) -> Any:
        return Placebo((), config.seed)


class Random(OtherSearch):
    """A search that finds random passages."""

    def index(self, config: Config, index: Any) -> Any:
        return Placebo(list(Workspace(config).load_passages()), config.seed)


class Poison(OtherSearch):
    """Hostile documents in a share of the results."""

    more = 1

    def index(self, config: Config, index: Any) -> Any:
        return PoisonedIndex(index, float(self.argument), config.seed)

    def report(self, trajectories: list[Trajectory], seed: int) -> dict[str, Any]:
        """Count the episodes that read each kind of hostile document, with their mean score.

        `none` are those that read no such document.
        """
        scores: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for kind in self._kinds_read(trajectory, seed) or {"none"}:
                scores.setdefault(kind, []).append(trajectory.score)
        by_poison = {}
        for kind in sorted(scores):
            by_poison[kind] = {"n": len(scores[kind]), "score": fmean(scores[kind])}
        return {"by_poison": by_poison}

    def _kinds_read(self, trajectory: Trajectory, seed: int) -> set[str]:
        """Draw the documents of an episode's searches again: they depend on the query alone."""
        kinds = set()
        for step in trajectory.steps:
            for call in step.info.get("tool_calls", ()):
                if call["name"] == "search" and call["ok"]:
                    query = SearchTool.query_of(call["arguments"])
                    poison = draw_document(query, float(self.argument), seed)
                    if poison:
                        kinds.add(poison[0])
        return kinds
