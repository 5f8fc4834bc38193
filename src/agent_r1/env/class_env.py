"""Make an environment from a plain class, whose public methods are the agent's tools.

    class Guess:
        def reset(self, answer, **row):              the row's values by name; text for the prompt
            self.number, self.done = int(answer), False

        def guess(self, number: int) -> str:         each other public method is a tool, documented
            \"\"\"Guess the number.

            Args:
                number: From 0 to 99.
            \"\"\"
            self.done = number == self.number         the episode ends
            return "right" if self.done else "wrong"

        def get_reward(self) -> float:               once, at the end
            return float(self.done)

This is the contract of TRL's `environment_factory` (docs/source/grpo_trainer.md there,
"Environments"). In: such a class. Out: a maker for the table of environments. Our additions:

- `done` ends an episode
- `get_reward` may take the agent's `answer`; without `get_reward`, `self.reward` is a number
- `reward_parts` are the summands of the reward by name
- `close` is called once at the end, also after a failure
- `truncated` tells an end by a limit from one by the task
- `score`, named `score_name`, is what evaluations report
- `state` identifies the agent's state (`Observation.extra`), unless it is a method
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import numbers
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agent_r1.config.settings import EnvConfig
from agent_r1.core import (
    Action,
    AgentEnv,
    Observation,
    Outcome,
    Row,
    StepResult,
    StopReason,
    maybe_await,
)
from agent_r1.env.stateful_env import WorldEnv
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.ui import say
from agent_r1.tool.base import BaseTool, OneThread, ToolCall, ends_run
from agent_r1.tool.function import FunctionTool

Maker = Callable[[dict[str, BaseTool], EnvConfig], AgentEnv]
RESERVED_METHODS = ("reset", "get_reward", "close")
ENV_ATTRIBUTES = ("done", "truncated", "reward", "reward_parts", "score", "score_name")
"""Attributes that are read. A public method would be a tool, so these are values or properties."""
TAKEN_SCORE_NAMES = (
    "em",
    "sub_em",
    "f1",
    "evidence",
    "malformed",
    "reward",
    "tool_calls",
    "invalid_calls",
    "failed_calls",
)
"""Names that a user-defined score cannot have, because they have another meaning."""


def as_environment(candidate: Any, name: str) -> Maker:
    """Make an environment of `candidate`: an AgentEnv class, or a plain class in a `MethodsEnv`.

    `name` is the user's name for it. Raises ConfigError, before anything runs, if `candidate` does
    not fit the contract.
    """
    owner = f"environment {name}"
    if isinstance(candidate, BaseTool):
        raise ConfigError(
            f"{owner} is the tool {candidate.name!r}; put it into env.tools, and name a class here",
            code="wrong_code",
        )
    if not isinstance(candidate, type):
        raise ConfigError(
            f"{owner} is not a class but {_what(candidate)}; name a class, of which each episode "
            "makes one object",
            code="wrong_code",
        )
    if missing := sorted(getattr(candidate, "__abstractmethods__", ())):
        raise ConfigError(
            f"{owner}: {candidate.__name__} has no {' and no '.join(missing)}; it needs them, or "
            "another base class",
            code="missing_method",
        )
    ours = issubclass(candidate, AgentEnv)
    try:
        inspect.signature(candidate).bind(*(({}, EnvConfig()) if ours else ()))
    except (TypeError, ValueError) as error:
        expectation = "takes (tools, config)" if ours else "needs no arguments: give them defaults"
        raise ConfigError(
            f"{owner}: {candidate.__name__}(...) {error}; wanted is a constructor that "
            f"{expectation}",
            code="wrong_signature",
        ) from None
    if ours:
        return candidate
    return functools.partial(MethodsEnv, owner, candidate, method_tools(owner, candidate))


# ------------------------------------------------------------------------------------- the contract


def method_tools(owner: str, cls: type) -> tuple[MethodTool, ...]:
    """Return the tools of a class, not yet bound to an object.

    Raise ConfigError for a wrong class.
    """
    tutorial_hint = "see docs/tutorial/your-own-environment.md"
    public = [n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n))]
    if "reset" not in public:
        raise ConfigError(
            f"{owner}: {cls.__name__} has no method reset (its public methods: "
            f"{', '.join(public) or 'none'}); an environment begins an episode with reset(self, "
            f"**row), {tutorial_hint}",
            code="missing_method",
        )
    if wrong := [n for n in ENV_ATTRIBUTES if n in public]:
        raise ConfigError(
            f"{owner}: {wrong[0]} is a method, which would be offered to the agent as a tool; make "
            f"it an attribute or a property, {tutorial_hint}",
            code="method_for_attribute",
        )
    name = inspect.getattr_static(cls, "score_name", "score")
    if not isinstance(name, str) or not name.isidentifier() or name in TAKEN_SCORE_NAMES:
        raise ConfigError(
            f"{owner}: score_name={name!r} cannot name a user-defined score; choose a word that is "
            f"not one of {', '.join(TAKEN_SCORE_NAMES)}",
            code="name_taken",
        )
    refuse_gymnasium(owner, cls, public)
    if "close" in public and _list_required(_bound(cls, "close")):
        raise ConfigError(
            f"{owner}: close takes no arguments; it releases what the object holds, at the end",
            code="wrong_signature",
        )
    if "get_reward" in public:
        get_reward = _bound(cls, "get_reward")
        if set(_list_required(get_reward)) - {"answer"}:
            signature = inspect.signature(get_reward)
            raise ConfigError(
                f"{owner}: get_reward takes no argument, or `answer`, not {signature}",
                code="wrong_signature",
            )
    non_tool_types = (staticmethod, type)  # helpers and inner classes
    tools = [
        n
        for n in public
        if n not in RESERVED_METHODS
        and not isinstance(inspect.getattr_static(cls, n), non_tool_types)
    ]
    return tuple(MethodTool(_bound(cls, n), f"{owner}, method {n}") for n in tools)


def refuse_gymnasium(owner: str, cls: type, public: list[str]) -> None:
    """Raise ConfigError for a Gymnasium environment, and name the setting for it.

    Its `step` and `render` would be offered to the agent as tools, and its `reset` returns a tuple.
    """
    options = "options" in inspect.signature(_bound(cls, "reset")).parameters
    spaces = any(hasattr(cls, name) for name in ("action_space", "observation_space"))
    is_likely = options or spaces or "render" in public or not _names_reward(cls, public)
    if "step" in public and is_likely:
        # `environment FILE.py:Class` is the owner of a class that the user named.
        place = owner.removeprefix("environment ")
        raise ConfigError(
            f"{owner}: {cls.__name__} looks like a Gymnasium environment (step, reset); name it "
            f"env.name=gym:{place}",
            code="gymnasium_class",
        )


def _names_reward(cls: type, public: list[str]) -> bool:
    """Say whether a class has a reward in our form: a method `get_reward`, or `self.reward`."""
    if "get_reward" in public or hasattr(cls, "reward"):
        return True
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        # `self.reward = 0.0` in a method: the attribute exists only after `reset`.
        if inspect.isfunction(member) and "reward" in member.__code__.co_names:
            return True
    return False


def _bound(cls: type, name: str) -> Callable[..., Any]:
    """Bind a method to the class in place of an object, for its signature."""
    attribute = getattr(cls, name)
    return attribute if inspect.ismethod(attribute) else types.MethodType(attribute, cls)


def _list_required(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


# ---------------------------------------------------------------------------------- the environment


class MethodsEnv(WorldEnv):
    """An episode in one object of a plain class."""

    def __init__(
        self,
        owner: str,
        cls: type,
        methods: tuple[MethodTool, ...],
        tools: dict[str, BaseTool],
        config: EnvConfig,
    ):
        if hasattr(cls, "_call_from_text"):
            # Each turn is a call, so a smaller budget of calls would be another limit of turns.
            budget = max(config.max_tool_calls, config.max_turns)
            config = config.model_copy(update={"max_tool_calls": budget})
        super().__init__(tools, config)
        self.owner = owner
        self.cls = cls
        self.methods = methods
        self.world: Any = None
        """The object of the episode, once it has begun."""
        self._instance: Any = None
        """The same object from its construction on: `reset` may fail and still hold a browser."""
        # One thread per object: SQLite connections, browsers and the like belong to the thread that
        # made them.
        self.thread = OneThread("environment")
        self.add_tools(methods, owner)

    @property
    def over(self) -> bool:
        return bool(getattr(self.world, "done", False))

    async def reset(self, row: Row) -> Observation:
        self._instance = await self.call(self.cls)
        world = self._instance
        facts = {**row, "max_turns": self.config.max_turns, **self.facts(row)}
        text = await self.call(world.reset, **self._select_arguments(world.reset, facts))
        if not isinstance(text, str | None):
            raise AgentR1Error(
                f"{self.owner}: reset returned {_what(text)}; it returns text for the agent, or "
                "None",
                code="wrong_return_value",
            )
        for method in self.methods:
            value = getattr(world, method.name)
            if not callable(value):
                raise AgentR1Error(
                    f"{self.owner}: the attribute {method.name}={value!r:.40} hides the method; "
                    "rename it",
                    code="name_taken",
                )
        self.world = world
        return self._with_state(self.first(row, text))

    def extract_tool_calls(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn. A class may read an action from a turn's plain text."""
        calls = super().extract_tool_calls(text)
        action_reader = getattr(self.cls, "_call_from_text", None)
        if calls or action_reader is None:
            return calls
        self.final_turn = text
        return [replace(action_reader(self.answer()), end=len(text))]

    def stop(self, text: str, calls: list[ToolCall]) -> StopReason | None:
        if hasattr(self.cls, "_call_from_text"):
            return None  # every turn is an action, and only the world ends the episode
        return super().stop(text, calls)

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        if result.observation:
            self._with_state(result.observation)
        if result.stop_reason is StopReason.ANSWERED and getattr(self.world, "truncated", False):
            result.stop_reason = StopReason.MAX_TURNS
        return result

    def _with_state(self, observation: Observation) -> Observation:
        """Add the world's `state`, if it has one."""
        state = getattr(self.world, "state", None)
        if state is not None and not callable(state):
            observation.extra["state"] = str(state)
        return observation

    async def outcome(self, stop_reason: StopReason) -> Outcome:
        if stop_reason.failed:
            return Outcome()
        outcome = Outcome(await self._reward(stop_reason), metrics=self.calls_by_tool())
        for name, value in dict(getattr(self.world, "reward_parts", {})).items():
            if name in TAKEN_SCORE_NAMES:
                raise AgentR1Error(
                    f"{self.owner}: reward_parts[{name!r}] has a reserved name; rename it",
                    code="name_taken",
                )
            outcome.parts[str(name)] = self._number(value, f"reward_parts[{name!r}] is")
        score = getattr(self.world, "score", None)
        if score is not None:
            outcome.score_name = getattr(self.cls, "score_name", "score")
            outcome.metrics[outcome.score_name] = self._number(score, "score is")
        return outcome

    async def close(self) -> None:
        """End the episode: call the object's `close` once, at most as long as a tool."""
        super().close()
        instance = self._instance
        self._instance = None
        close = getattr(instance, "close", None)
        try:
            # After a method that hangs, `close` waits in the thread, and nothing waits for it.
            if callable(close) and self.broken:
                self.thread.submit(close)
            elif callable(close):
                async with asyncio.timeout(self.config.tool_timeout_s):
                    await self.call(close)
        except Exception as error:  # its reward is known already
            say(
                f"warning: {self.owner}: close failed ({type(error).__name__}: {error})", sys.stderr
            )
        finally:
            self.thread.end()

    async def call(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Call a function of the world: a coroutine here, others in the world's thread.

        Raises an Exception for whatever the function raises, except for Ctrl-C and for the
        cancellation of the episode.
        """
        task = asyncio.current_task()
        cancellations = task.cancelling()
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            value = await self.thread.run(function, **arguments)
            return await maybe_await(value)
        except (Exception, SystemExit):
            raise
        except BaseException as error:
            if task.cancelling() > cancellations or ends_run(error, task):
                raise
            # A CancelledError of its own, a BaseExceptionGroup, a GeneratorExit.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _reward(self, stop_reason: StopReason) -> float:
        if not hasattr(self.world, "get_reward"):
            if not hasattr(self.world, "reward"):
                raise AgentR1Error(
                    f"{self.owner} has no reward; write get_reward(self), or set self.reward in "
                    "reset",
                    code="no_reward",
                )
            return self._number(self.world.reward, "reward is")
        answer = self.answer() if stop_reason is StopReason.ANSWERED else ""
        try:
            async with asyncio.timeout(self.config.tool_timeout_s):
                arguments = self._select_arguments(self.world.get_reward, {"answer": answer})
                reward = await self.call(self.world.get_reward, **arguments)
        except TimeoutError:
            raise AgentR1Error(
                f"get_reward took longer than {self.config.tool_timeout_s:g} s "
                "(env.tool_timeout_s)",
                code="timed_out",
            ) from None
        return self._number(reward, "get_reward returned")

    def _select_arguments(
        self, function: Callable[..., Any], values: dict[str, Any]
    ) -> dict[str, Any]:
        """Select the arguments that `function` takes; with a `**row`, all of them."""
        parameters = inspect.signature(function).parameters
        missing = [name for name in _list_required(function) if name not in values]
        if missing:
            raise AgentR1Error(
                f"{self.owner}: {function.__name__} requires {missing[0]!r}, which the row lacks; "
                f"the row has {', '.join(values)}",
                code="missing_column",
            )
        everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {name: value for name, value in values.items() if everything or name in parameters}

    def _number(self, value: Any, what: str) -> float:
        if not isinstance(value, numbers.Real):
            raise AgentR1Error(
                f"{self.owner}: {what} {_what(value)}, and must be a number",
                code="wrong_return_value",
            )
        return float(value)


class MethodTool(FunctionTool):
    """A method as a tool, bound to the object of an episode."""

    env: MethodsEnv
    is_async = True

    async def execute(self, args: dict[str, Any]) -> Any:
        try:
            return await self.env.call(getattr(self.env.world, self.name), **args)
        except asyncio.CancelledError:
            # The deadline; the method may still be working on the object.
            limit = f"{self.env.config.tool_timeout_s:g} s (env.tool_timeout_s)"
            self.env.broken = f"{self.name} took longer than {limit}"
            raise


def _what(value: Any) -> str:
    return f"{value!r:.40} ({type(value).__name__})"
