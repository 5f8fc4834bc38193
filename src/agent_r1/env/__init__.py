"""Room 4, env: the worlds of agents.

An environment shows observations (chat messages), takes actions (the agent's turns) and pays
rewards.

- `core.py`: the interface `AgentEnv`
- `base.py`: `BaseToolEnv`, an environment with tool calls and their rewards
- `dialect.py`: how turns are written; `hermes.py`: in `<tool_call>` and `<answer>` tags;
  recipes/dialects has others
- `questions.py`: rewards for answers
- `stateful_env.py`: user-defined worlds; `class_env.py`: a plain class whose methods are tools;
  recipes/openenv: servers

A row's `agent_name`, which is `env.name`, chooses its environment.
docs/tutorial/your-own-environment.md writes one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from agent_r1.config import plugins, tables
from agent_r1.config.settings import EnvConfig
from agent_r1.core import INVALID, AgentEnv, Outcome, Row
from agent_r1.env.base import BaseToolEnv
from agent_r1.env.dialect import Dialect
from agent_r1.env.hermes import HERMES, HermesToolEnv
from agent_r1.env.questions import QuestionEnv, in_dialect
from agent_r1.ground.errors import ConfigError
from agent_r1.tool import BaseTool

__all__ = [
    "INVALID",
    "AgentEnv",
    "BaseToolEnv",
    "Dialect",
    "HermesToolEnv",
    "Outcome",
    "brings_tools",
    "dialect_of",
    "environment",
    "make_env",
    "offered_tools",
    "wants_answers",
    "without_tools",
]


def environment(name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    """Return the maker of environments of that name.

    Raises ConfigError for an unknown name or unsuitable user-defined code.
    """
    return (
        _own_environment(name)
        if plugins.is_user_code(name)
        else _made(tables.resolve("env", name, "env.name"), name)
    )


@cache  # called for each episode, and finding a file by name reads the disk
def _own_environment(name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    return _made(plugins.load_trusted(name, "env.name"), name)


def _made(found: Any, name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    """Convert a dialect, an environment or a plain class to a maker of environments."""
    if isinstance(found, type) and issubclass(found, Dialect):
        return in_dialect(found)
    if isinstance(found, type) and issubclass(found, AgentEnv):
        return found
    return tables.resolve("adapter", "methods", "env.name")(found, name)


def offered_tools(tools: dict[str, BaseTool], config: EnvConfig) -> dict[str, BaseTool]:
    """Add the tools of a plain class to `tools`. A server's tools are known only in its episodes.

    Raises ConfigError for two tools of one name.
    """
    made = environment(config.name)
    return tools if isinstance(made, type) else made(tools, config).tools


def dialect_of(config: EnvConfig) -> Dialect:
    """Return the dialect of the configured environment; Hermes if it has none."""
    made = environment(config.name)
    return made.dialect if isinstance(made, type) and issubclass(made, BaseToolEnv) else HERMES


def brings_tools(name: str) -> bool:
    """Return whether the environment is a world that adds tools to `env.tools`."""
    made = environment(name)
    return not isinstance(made, type) or getattr(made, "stateful", False)


def wants_answers(name: str) -> bool:
    """Return whether the environment compares answers, so that each question needs one."""
    made = environment(name)
    return isinstance(made, type) and getattr(made, "outcome", None) is QuestionEnv.outcome


def make_env(row: Row, tools: dict[str, BaseTool], config: EnvConfig) -> AgentEnv:
    """Make the environment of one episode, with all `tools` or those that the row lists."""
    made = environment(row["agent_name"])
    asked = (row.get("env_kwargs") or {}).get("tools")
    wanted = list(tools) if asked is None else list(asked)
    missing = [tool for tool in wanted if tool not in tools]
    if missing:
        raise ConfigError(
            f"the row asks for tool {missing[0]!r}; add it to env.tools (now: {', '.join(tools)})",
            code="missing_tool",
        )
    shared: dict[Any, Any] = {}
    mine = {tool: tools[tool].for_episode(shared) for tool in wanted}
    env = made(mine, config)
    env.episode_tools = [tool for key, tool in mine.items() if tool is not tools[key]]
    for wrap in tables.for_changed_settings("around_env", env=config):
        env = wrap(env, config)
    return env


def without_tools(row: Row) -> Row:
    """Return the row as a closed-book question."""
    return row | {"env_kwargs": (row.get("env_kwargs") or {}) | {"tools": []}}
