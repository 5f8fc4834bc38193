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
    "add_class_tools",
    "brings_tools",
    "dialect_of",
    "environment",
    "make_env",
    "wants_answers",
    "without_tools",
]


def environment(name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    """Return the maker of environments of that name.

    Raises ConfigError for an unknown name or unsuitable user-defined code.
    """
    if plugins.is_user_code(name):
        return _own_environment(name)
    return _environment_maker(tables.resolve("env", name, "env.name"), name)


@cache  # called for each episode, and finding a file by name reads the disk
def _own_environment(name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    scheme, _, place = name.partition(":")
    if tables.env_scheme(name) is None:
        return _environment_maker(plugins.load_trusted(name, "env.name"), name)
    # gym:FILE.py:Class names the user's class, gym:ID an installed one.
    cls = None
    if ":" in place:
        cls = plugins.load_trusted(name, "env.name")
    else:
        plugins.check_trusted(name, "env.name")
    plain_class = tables.resolve("scheme", scheme, "env.name")(name, cls)
    return _environment_maker(plain_class, name)


def _environment_maker(
    environment_class: Any, name: str
) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    """Convert a dialect, an environment or a plain class to a maker of environments."""
    if isinstance(environment_class, type) and issubclass(environment_class, Dialect):
        return in_dialect(environment_class)
    if isinstance(environment_class, type) and issubclass(environment_class, AgentEnv):
        return environment_class
    from agent_r1.env.class_env import as_environment

    return as_environment(environment_class, name)


def add_class_tools(tools: dict[str, BaseTool], config: EnvConfig) -> dict[str, BaseTool]:
    """Add the tools of a plain class to `tools`. A server's tools are known only in its episodes.

    Raises ConfigError for two tools of one name.
    """
    make = environment(config.name)
    if isinstance(make, type):
        return tools
    return make(tools, config).tools


def dialect_of(config: EnvConfig) -> Dialect:
    """Return the dialect of the configured environment; Hermes if it has none."""
    make = environment(config.name)
    if isinstance(make, type) and issubclass(make, BaseToolEnv):
        return make.dialect
    return HERMES


def brings_tools(name: str) -> bool:
    """Return whether the environment is a world that adds tools to `env.tools`."""
    make = environment(name)
    return not isinstance(make, type) or getattr(make, "stateful", False)


def wants_answers(name: str) -> bool:
    """Return whether the environment compares answers, so that each question needs one."""
    make = environment(name)
    return isinstance(make, type) and getattr(make, "outcome", None) is QuestionEnv.outcome


def make_env(row: Row, tools: dict[str, BaseTool], config: EnvConfig) -> AgentEnv:
    """Make the environment of one episode, with all `tools` or those that the row lists."""
    make = environment(row["agent_name"])
    names = (row.get("env_kwargs") or {}).get("tools")
    if names is None:
        names = list(tools)
    missing = [name for name in names if name not in tools]
    if missing:
        raise ConfigError(
            f"the row asks for tool {missing[0]!r}; add it to env.tools (now: {', '.join(tools)})",
            code="missing_tool",
        )
    states: dict[Any, Any] = {}
    mine = {name: tools[name].for_episode(states) for name in names}
    env = make(mine, config)
    env.episode_tools = [tool for key, tool in mine.items() if tool is not tools[key]]
    for wrap in tables.for_changed_settings("around_env", env=config):
        env = wrap(env, config)
    return env


def without_tools(row: Row) -> Row:
    """Return the row as a closed-book question."""
    return row | {"env_kwargs": (row.get("env_kwargs") or {}) | {"tools": []}}
