"""Room 3, tool: what an agent can call. Read in this order:

    base.py       BaseTool, ToolCall, ToolResult, and `call_tool`, through which every call goes
    arguments.py  what is wrong with a call's arguments, in one line
    function.py   @tool: a tool from a typed function
    search.py     the tool of the laptop run
    calculator.py arithmetic
    batch.py      tools that answer many calls at once

Recipes add others: recipes/code runs model-written programs, recipes/mcp offers the tools of MCP
servers.

In: the names in `env.tools` and the resources of a run. Out: tools for the environments of room 4
(`env/`).

To add a tool, write one file, and add its name to the table `[tool]` of names.toml or of a
recipe.toml (steps in CONTRIBUTING.md). The name stands for a tool or for a maker, which takes the
resources that it needs as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_r1.config import plugins, tables
from agent_r1.config.settings import EnvConfig
from agent_r1.ground.errors import ConfigError, nearest
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

__all__ = [
    "BaseTool",
    "InvalidArgumentsError",
    "ToolCall",
    "ToolErrorKind",
    "ToolOutput",
    "ToolResult",
    "call_tool",
    "make_tools",
    "own_tool",
    "tool",
]


def make_tools(
    names: list[str], *, env: EnvConfig | None = None, **resources: Any
) -> dict[str, BaseTool]:
    """Make the tools of those names, by the names that the agent uses.

    A setting of `env` may add servers of tools, as `env.mcp` does: `NAME` stands for all tools of a
    server, `NAME.TOOL` for one. `resources` are other inputs of tools: `searcher` (a Searcher) and
    `top_k` for search. Raises ConfigError for an unknown name, with the nearest known one, for two
    tools of one name, and for a missing resource.
    """
    servers: dict[str, Callable[[str], list[BaseTool]]] = {}
    for servers_of in tables.for_changed_settings("tool_server", env=env):
        servers |= servers_of(env)
    tools: dict[str, BaseTool] = {}
    sources: dict[str, str] = {}  # tool's name -> the name in `names` that it came from
    for name in names:
        server, _, tool_of_server = name.partition(".")
        if plugins.is_user_code(name):
            new_tools = [own_tool(name)]
        elif server in servers:
            new_tools = servers[server](tool_of_server)
        elif name in tables.names("tool"):
            make = tables.resolve("tool", name, "env.tools")
            if not isinstance(make, BaseTool):
                make = make(env=env, **resources)
            if not isinstance(make, BaseTool):
                raise ConfigError(
                    f"env.tools: the maker of {name!r} returned {type(make).__name__}, which is no "
                    "tool; return an object of a subclass of BaseTool",
                    code="wrong_code",
                )
            new_tools = [make]
        else:
            choices = sorted([*tables.names("tool"), *servers])
            hints = [
                ", " + entry["tool_hint"].format(name=server)
                for entry in tables.entries("setting").values()
                if "tool_hint" in entry
            ]
            raise ConfigError(
                f"unknown tool {name!r}{nearest(name, choices)}; choose from "
                f"{', '.join(choices)}, or name your own as "
                f"FILE.py:NAME{''.join(hints)}",
                code="unknown_tool",
            )
        for one in new_tools:
            if one.name in tools:
                raise ConfigError(
                    f"env.tools: {sources[one.name]} and {name} both have a tool called "
                    f"{one.name!r}; leave one out",
                    code="tool_name_taken",
                )
            tools[one.name] = one
            sources[one.name] = name
    return tools


def own_tool(name: str, setting: str = "env.tools") -> BaseTool:
    """Load a user-defined tool (`FILE.py:NAME`).

    It is a BaseTool, its class, or a typed and documented function.

    Raises ConfigError for anything else.
    """
    body = plugins.load_trusted(name, setting)
    is_class = isinstance(body, type)
    is_tool_class = is_class and issubclass(body, BaseTool)
    is_function = callable(body) and not is_class
    if not (isinstance(body, BaseTool) or is_tool_class or is_function):
        raise ConfigError(
            f"{setting}={name} is a {type(body).__name__}, not a tool; give a function or a "
            "BaseTool",
            code="wrong_code",
        )
    try:
        if isinstance(body, BaseTool):
            return body
        if isinstance(body, type) and issubclass(body, BaseTool):
            return body()
        return tool(body)
    except ConfigError as error:
        raise ConfigError(
            f"{setting}: {plugins.source_location(body)}: {error}", code=error.code
        ) from None
