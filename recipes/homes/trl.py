"""Play our environments in TRL: a class for `GRPOTrainer(environment_factory=...)`.

In: a preset. Out: a class of which TRL makes an object for each episode, a reward function, and
rows for `train_dataset`. The tools, the questions and the reward are those of our own loop; the
model, the sampling and the update are TRL's.

    Home = trl_home("support")
    GRPOTrainer(environment_factory=Home, reward_funcs=reward, train_dataset=..., ...)

TRL calls an environment from one thread and in no event loop, and ours are coroutines. So they run
in an event loop of a thread, which all objects share.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from agent_r1 import (
    BaseTool,
    BaseToolEnv,
    ConfigError,
    Hermes,
    Observation,
    Row,
    StopReason,
    ToolCall,
    Workspace,
    load_config,
    make_env,
    maybe_await,
)

TYPES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""Type in a JSON schema -> type in a signature, which TRL reads."""


class Home:
    """One episode at a time of a preset's environment. TRL resets an object for each."""

    workspace: Workspace
    tools: dict[str, BaseTool]

    def __init__(self) -> None:
        self.env: BaseToolEnv | None = None
        """Of the episode that has begun."""

    def reset(self, **row: Any) -> str:
        """Begin an episode. Return what TRL adds to the question."""
        if self.env is not None:
            _wait(_close(self.env))
        self.env = _make(self.workspace, self.tools, row)
        observation = _wait(_begin(self.env, row))
        text = observation.messages[-1]["content"]
        return text.removeprefix(row["prompt"][-1]["content"])

    # A class method is no function of the class, so TRL does not offer it as a tool.
    @classmethod
    def rows(cls, split: str, limit: int | None = None) -> list[Row]:
        """Return rows for `datasets.Dataset.from_list`."""
        return [dict(row) for row in cls.workspace.load_rows(split)[:limit]]


def call_of(home: Home, name: str, arguments: dict[str, Any]) -> str:
    """Run a tool in an object's episode. Raise RuntimeError before `reset`."""
    if home.env is None:
        raise RuntimeError("TRL called a tool before reset")
    [result] = _wait(home.env.execute([ToolCall(name, arguments)]))
    return result.content


def reward(
    completions: list[list[dict[str, Any]]], environments: list[Home], **columns: Any
) -> list[float | None]:
    """Score finished episodes by the environment's own outcome: a reward function of TRL.

    A method `get_reward` would be simpler, but TRL does not show it the answer.
    """
    rewards: list[float | None] = []
    for messages, home in zip(completions, environments, strict=True):
        if home.env is None:
            raise RuntimeError("TRL asked for a reward before reset")
        rewards.append(score(home.env, messages))
    return rewards


def score(env: BaseToolEnv, messages: list[dict[str, Any]]) -> float:
    """Return the outcome's reward of an episode that TRL has ended."""
    env.turns = sum(message["role"] == "assistant" for message in messages)
    stop = StopReason.CONTEXT_OVERFLOW  # TRL drops a result that does not fit
    if messages and messages[-1]["role"] == "assistant":
        text = turn_text(messages[-1])
        reason = env.stop(text, env.extract_tool_calls(text))
        stop = StopReason.MAX_TURNS if reason is None else reason
        if reason is not None:
            env.final_turn = text
    return float(_wait(_outcome(env, stop)).reward)


def trl_home(preset: str, *settings: str) -> type[Home]:
    """Return the environment class of a preset. Its data is made if it does not exist.

    Raises ConfigError for an environment that is not in the Hermes dialect.
    """
    config = load_config(preset, list(settings), algorithm="grpo")
    workspace = Workspace(config)
    workspace.make_task()
    tools = workspace.load_tools()
    row = workspace.load_rows("train")[0]
    env = _make(workspace, tools, row)
    if not (isinstance(env, BaseToolEnv) and isinstance(env.dialect, Hermes)):
        raise ConfigError(
            f"{preset} is not in the Hermes dialect, whose calls TRL parses; use an environment "
            "such as env.name=hermes",
            code="agent_needs_hermes",
        )
    _wait(_begin(env, row))  # a class adds its methods when it begins
    members: dict[str, Any] = {"workspace": workspace, "tools": tools, "__doc__": Home.__doc__}
    for name, tool in env.tools.items():
        members[name] = method_of(name, tool.schema()["function"])
    _wait(_close(env))
    return type("Home", (Home,), members)


def method_of(name: str, schema: dict[str, Any]) -> Callable[..., str]:
    """Write a tool as a typed method. TRL makes its schema from the docstring."""
    properties = schema["parameters"].get("properties", {})
    required_names = schema["parameters"].get("required", [])

    def method(self: Home, **arguments: Any) -> str:
        return call_of(self, name, arguments)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    annotations: dict[str, Any] = {"return": str}
    lines = [schema.get("description", name), "", "Args:"]
    for key, facts in properties.items():
        annotations[key] = TYPES.get(str(facts.get("type")), str)
        default = inspect.Parameter.empty if key in required_names else facts.get("default")
        parameters.append(
            inspect.Parameter(
                key,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default,
                annotation=annotations[key],
            )
        )
        lines.append(f"    {key}: {facts.get('description', key)}")
    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join(lines if properties else lines[:1])
    method.__annotations__ = annotations
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore
    return method


def turn_text(message: dict[str, Any]) -> str:
    """Write a message that TRL parsed as a turn of ours."""
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += Hermes().write_call(ToolCall(function["name"], function["arguments"]))
    return text


def _make(workspace: Workspace, tools: dict[str, BaseTool], row: Row) -> BaseToolEnv:
    return make_env(row, tools, workspace.config.env)


# ----------------------------------------------------------------------------------- the event loop


async def _begin(env: BaseToolEnv, row: Row) -> Observation:
    return await maybe_await(env.reset(row))


async def _outcome(env: BaseToolEnv, stop: StopReason) -> Any:
    return await maybe_await(env.outcome(stop))


async def _close(env: BaseToolEnv) -> None:
    await maybe_await(env.close())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _wait(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()
