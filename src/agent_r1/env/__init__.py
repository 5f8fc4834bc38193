"""Room 4, env: what an agent lives in.

An environment shows observations (chat messages), takes actions (the agent's turns) and pays rewards. `core.py` has the
interface `AgentEnv`. `base.py` holds `BaseToolEnv`, the environment of everything that is driven by tool calls. `dialect.py` says
what a dialect is, `hermes.py` is the one in `<tool_call>` and `<answer>` tags, and recipes/dialects has others. `calls.py` plays
calls in a dialect and `questions.py` pays the answer. User-defined worlds (`stateful_env.py`) pay what was done: a plain
class whose methods are the tools (`class_env.py`), and any server that speaks OpenEnv (recipes/openenv).

Rows choose an environment by their `agent_name`, which is `env.name`. docs/tutorial/your-own-environment.md writes one.
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
    """Return what makes environments of that name.

    Raises ConfigError where there is none, or where a user-defined one keeps no contract.
    """
    return (
        _own_environment(name) if plugins.is_user_code(name) else _made(tables.resolve("env", name, "env.name"), name)
    )


@cache  # it is asked for at each episode, and finding a file by name takes a few looks at the disk
def _own_environment(name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    return _made(plugins.load(name, "env.name"), name)


def _made(found: Any, name: str) -> Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]:
    """What a dialect, an environment, or a plain class whose methods are tools comes to."""
    if isinstance(found, type) and issubclass(found, Dialect):
        return in_dialect(found)
    if isinstance(found, type) and issubclass(found, AgentEnv):
        return found
    return tables.resolve("adapter", "methods", "env.name")(found, name)


def offered_tools(tools: dict[str, BaseTool], config: EnvConfig) -> dict[str, BaseTool]:
    """`tools`, and next to them the methods of a plain class; what a server offers is known in its episodes only. Raises
    ConfigError where two have one name."""
    made = environment(config.name)
    return tools if isinstance(made, type) else made(tools, config).tools


def dialect_of(config: EnvConfig) -> Dialect:
    """How turns are written and read in the configured environment; in Hermes tags where it does not say."""
    made = environment(config.name)
    return made.dialect if isinstance(made, type) and issubclass(made, BaseToolEnv) else HERMES


def brings_tools(name: str) -> bool:
    """Whether the environment of that name is a world, with tools next to those of `env.tools`."""
    made = environment(name)
    return not isinstance(made, type) or getattr(made, "stateful", False)


def wants_answers(name: str) -> bool:
    """Whether environments of that name pay for an answer that equals the right one, so that each question needs one."""
    made = environment(name)
    return isinstance(made, type) and getattr(made, "outcome", None) is QuestionEnv.outcome


def make_env(row: Row, tools: dict[str, BaseTool], config: EnvConfig) -> AgentEnv:
    """A fresh environment for one episode of `row`, with all of `tools`, or with those that the row asks for, if only none."""
    made = environment(row["agent_name"])
    asked = (row.get("env_kwargs") or {}).get("tools")
    wanted = list(tools) if asked is None else list(asked)
    missing = [tool for tool in wanted if tool not in tools]
    if missing:
        raise ConfigError(
            f"the row asks for tool {missing[0]!r}; add it to env.tools (now: {', '.join(tools)})", code="missing_tool"
        )
    shared: dict[Any, Any] = {}
    mine = {tool: tools[tool].for_episode(shared) for tool in wanted}
    env = made(mine, config)
    env.episode_tools = [tool for key, tool in mine.items() if tool is not tools[key]]
    for wrap in tables.asked_for("around_env", env=config):
        env = wrap(env, config)
    return env


def without_tools(row: Row) -> Row:
    """The same question, asked closed-book."""
    return row | {"env_kwargs": (row.get("env_kwargs") or {}) | {"tools": []}}
