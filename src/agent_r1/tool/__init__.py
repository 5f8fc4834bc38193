"""Room 3, tools: what an agent can call. Read in this order:

    base.py       BaseTool, ToolCall, ToolResult, and `call_tool`, through which every call goes
    arguments.py  what is wrong with a call's arguments, in one line
    function.py   @tool: a tool from a typed function
    search.py     the tool of the laptop run

In come the names in `env.tools` and the resources of a run; out go tools to the environments of room 4 (`env/`).

To add a tool: one file here, and one name in `TOOLS` (CONTRIBUTING.md has the steps). Its maker gets the resources as
keyword arguments, takes those it needs and ignores the rest. A `@tool` function needs none: `"clock": lambda **_: clock`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_r1.errors import ConfigError, nearest
from agent_r1.tool.base import (
    BaseTool,
    InvalidArgumentsError,
    ToolCall,
    ToolErrorKind,
    ToolOutput,
    ToolResult,
    call_tool,
)
from agent_r1.tool.function import tool
from agent_r1.tool.search import SearchTool

__all__ = [
    "TOOLS", "BaseTool", "InvalidArgumentsError", "SearchTool", "ToolCall", "ToolErrorKind", "ToolOutput", "ToolResult",
    "call_tool", "make_tools", "tool",
]  # fmt: skip

TOOLS: dict[str, Callable[..., BaseTool]] = {
    "search": SearchTool.make,
}


def make_tools(names: list[str], **resources: Any) -> dict[str, BaseTool]:
    """The tools of those names, by name, ready for `call_tool`.

    `resources` are what tools may need: `searcher` (a Searcher) and `top_k` for search. Raises ConfigError for an
    unknown name, with the nearest known one, and for a missing resource.
    """
    for name in names:
        if name not in TOOLS:
            raise ConfigError(f"unknown tool {name!r}{nearest(name, TOOLS)}; choose from {', '.join(sorted(TOOLS))}")
    return {name: TOOLS[name](**resources) for name in names}
