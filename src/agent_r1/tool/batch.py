"""Answer many calls at once, for example with a model on a GPU.

In: concurrent calls of all running episodes. Out: a result for each. Next: `search/coalescer.py`
collects them.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any

from agent_r1.ground.errors import ConfigError
from agent_r1.search.coalescer import Coalescer
from agent_r1.tool.base import BaseTool


class BatchTool(BaseTool):
    """A tool with `execute_batch` instead of `execute`. One batch runs at a time, in a thread."""

    def __init__(self) -> None:
        super().__init__()
        if inspect.iscoroutinefunction(self.execute_batch):
            raise ConfigError(
                f"tool {self.name}: execute_batch runs in a thread; make it a plain `def`, not "
                "`async def`",
                code="wrong_signature",
            )
        self._batches: Coalescer[_Call, Any] = Coalescer(self._work)

    @abstractmethod
    def execute_batch(self, many_args: list[dict[str, Any]]) -> list[Any]:
        """Return one result per call, in order, of the types that `execute` may return.

        An exception among the results is raised for its own call, a raised one for all.
        """

    @property
    def body(self) -> Any:
        return self.execute_batch

    async def execute(self, args: dict[str, Any]) -> Any:
        return await self._batches.ask(_Call(args))

    def _work(self, calls: list[_Call]) -> dict[_Call, Any]:
        results = self.execute_batch([call.args for call in calls])
        if not isinstance(results, list | tuple) or len(results) != len(calls):
            answer = type(results).__name__
            if isinstance(results, list | tuple):
                answer = f"{len(results)} results"
            raise TypeError(
                f"execute_batch returned {answer} for {len(calls)} calls; it must return a list of "
                "one each"
            )
        return dict(zip(calls, results, strict=True))


class _Call:
    """The arguments of one call. Equal calls are not merged: a tool may count them or be random."""

    def __init__(self, args: dict[str, Any]):
        self.args = args
