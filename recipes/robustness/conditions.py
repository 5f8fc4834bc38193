"""Evaluate without tools, or with a useless or hostile search.

In: a condition such as `poison 0.5`, rows. Out: the rows and tools to evaluate with, and additional
facts for the card. Next: `agent-r1 eval --closed-book`, `--retriever empty` and `--poison RATE`
write such a card next to the run's card.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from agent_r1_recipes.robustness.injected_search import PoisonedIndex, drawn


@dataclass(frozen=True)
class Condition(ABC):
    """Change an evaluation; `argument` is the text after the condition's name."""

    argument: str = ""

    @abstractmethod
    def apply(self, config: Config, rows: list[Row]) -> tuple[list[Row], dict[str, BaseTool]]:
        """Return the rows and tools of the evaluation. Raises ConfigError where the task does not
        know the condition."""

    def report(self, trajectories: list[Trajectory], seed: int) -> dict[str, Any]:
        """Return further keys for the eval card."""
        return {}


class ClosedBook(Condition):
    """No tools."""

    def apply(self, config: Config, rows: list[Row]) -> tuple[list[Row], dict[str, BaseTool]]:
        closed = [
            row | {"env_kwargs": (row.get("env_kwargs") or {}) | {"tools": []}} for row in rows
        ]
        if getattr(make_env(closed[0], {}, config.env), "stateful", False):
            raise ConfigError(
                f"--closed-book removes the tools, but the tools of env.name={config.env.name} are "
                "its world; use it for questions",
                code="unfit_condition",
            )
        return closed, {}


class OtherSearch(Condition):
    """The agent's own tools, over another index than it was trained with."""

    more = 0
    """Results in addition to `search.top_k`."""

    def apply(self, config: Config, rows: list[Row]) -> tuple[list[Row], dict[str, BaseTool]]:
        if not config.searches:
            tools = ", ".join(config.env.tools)
            raise ConfigError(
                f"{type(self).__name__.lower()}: this agent does not search; env.tools is {tools}",
                code="unfit_condition",
            )
        tools = Workspace(config).load_tools()
        search = tools["search"]
        tools["search"] = SearchTool.over(
            self.index(config, search.searcher.index), search.top_k + self.more
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
        for t in trajectories:
            calls = [call for step in t.steps for call in step.info.get("tool_calls", ())]
            searches = [
                SearchTool.query_of(call["arguments"])
                for call in calls
                if call["name"] == "search" and call["ok"]
            ]
            read = {
                poison[0]
                for query in searches
                if (poison := drawn(query, float(self.argument), seed))
            }
            for kind in read or {"none"}:
                scores.setdefault(kind, []).append(t.score)
        return {
            "by_poison": {
                kind: {"n": len(some), "score": fmean(some)}
                for kind, some in sorted(scores.items())
            }
        }
