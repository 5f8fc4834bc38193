"""What a tool is, and how one is called. In: a `ToolCall` that `env/` parsed. Out: a `ToolResult` for the next turn.

The caller of a tool is a language model in training. It will misspell names, forget arguments, ask for the impossible,
and do all of that a thousand times a minute. So `call_tool` never raises for anything that the model or the tool did:
it answers with one short line that says what was wrong and what would be right, because that line is what the model
reads next and learns from. A traceback would teach it nothing, fill its context, and show it our file system.

    ToolCall ── known tool? ── arguments fit the schema? ── execute, within the deadline ── cut to size ──▶ ToolResult
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agent_r1.errors import ConfigError
from agent_r1.tool.arguments import compiled, complaint, quote

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


class ToolErrorKind(StrEnum):
    """Why a call gave no result. The environment counts these; the agent reads `ToolResult.content`."""

    MALFORMED_CALL = "malformed_call"
    """The text of the call could not be parsed."""
    UNKNOWN_TOOL = "unknown_tool"
    """There is no tool of that name."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments do not fit the tool's schema, or the tool refused them."""
    TIME_OUT = "time_out"
    """The tool did not answer within its deadline."""
    TOOL_ERROR = "tool_error"
    """The tool raised an exception."""


@dataclass(frozen=True)
class ToolCall:
    """One call as the agent wrote it. Everything in it is model output, so nothing in it is trusted."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Set when the call could not be parsed: what was wrong and what is expected, for the agent to read."""


@dataclass(frozen=True)
class ToolResult:
    """What came of one call."""

    content: str
    """For the agent: the result, or one line that begins with `error:`. Always valid Unicode, never over the cap."""
    ok: bool = True
    error: ToolErrorKind | None = None
    seconds: float = 0.0
    """Wall-clock time of the call."""
    data: dict[str, Any] = field(default_factory=dict)
    """For people and logs (ids of passages, for example). The agent never sees it."""


@dataclass(frozen=True)
class ToolOutput:
    """What `execute` may return instead of a plain string, when there is something for people and logs as well."""

    content: str
    data: dict[str, Any] = field(default_factory=dict)


class InvalidArgumentsError(ValueError):
    """Raised by a tool for arguments that fit its schema and make no sense all the same. The agent reads the text."""


class BaseTool(ABC):
    """A tool: three class attributes and one method.

        class Double(BaseTool):
            name = "double"
            description = "Doubles a number."
            parameters = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}

            def execute(self, args):
                return str(2 * args["x"])

    A typed function with a docstring makes one too, see `@tool` in function.py. Construction raises ConfigError where
    the name, the description or the schema is wrong.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments; its type is `object`."""
    timeout_s: float | None = None
    """Deadline of one call in seconds; None takes the caller's (`env.tool_timeout_s`)."""

    def __init__(self) -> None:
        _ = self.validator

    @abstractmethod
    def execute(self, args: dict[str, Any]) -> Any:
        """Do it. `args` fit the schema.

        Return the text for the agent, or a `ToolOutput`; anything else is written as JSON. May be `async def`; then it
        must not block, because it runs in the event loop among all other episodes. A plain `def` runs in a thread of
        its own, concurrently with other calls of the same tool. Exceptions become errors that the agent reads.
        """

    def schema(self) -> dict[str, Any]:
        """This tool in OpenAI's form, as chat templates and servers expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def is_async(self) -> bool:
        """Whether `execute` runs in the event loop (True) or in a thread (False)."""
        return inspect.iscoroutinefunction(self.execute)

    @cached_property
    def validator(self) -> Draft202012Validator:
        """The compiled schema, made once a tool: checking and compiling takes a hundred times as long as validating."""
        owner = f"tool {getattr(self, 'name', None) or type(self).__name__}"
        for attribute in ("name", "description", "parameters"):
            if not getattr(self, attribute, None):
                raise ConfigError(f"{owner} has no {attribute}; set it as a class attribute")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ConfigError(f"{owner}: a tool's name has 1 to 64 letters, digits, '_' or '-'; rename it")
        return compiled(self.parameters, owner)


async def call_tool(tools: dict[str, BaseTool], call: ToolCall, timeout_s: float, max_chars: int) -> ToolResult:
    """Execute one call. Whatever the model or the tool does, the answer is a `ToolResult`.

    `timeout_s` (seconds) holds for tools that do not set their own, `max_chars` for all. A cancellation of the episode and
    Ctrl-C pass through.
    """
    start = time.perf_counter()
    tool = tools.get(call.name) if isinstance(call.name, str) else None
    output, failure = ToolOutput(""), _refusal(tools, tool, call)
    if failure is None:  # from here on, there is a tool
        timeout_s = timeout_s if tool.timeout_s is None else tool.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                output = await _executed(tool, call.arguments)
        except InvalidArgumentsError as error:
            failure = ToolErrorKind.INVALID_ARGUMENTS, f"{tool.name}: {_safe(error)}"
        # SystemExit is no Exception; a tool that calls sys.exit() must not end the training run.
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and deadline.expired():  # ours, and not one that the tool met on its way
                failure = ToolErrorKind.TIME_OUT, f"{tool.name} took longer than {timeout_s:g} s; ask for less"
            else:
                failure = ToolErrorKind.TOOL_ERROR, f"{tool.name} failed: {_safe(error)}"
    seconds = time.perf_counter() - start
    if failure is None:
        return ToolResult(_cut(valid_unicode(output.content), max_chars), seconds=seconds, data=output.data)
    kind, message = failure  # short as it is; its beginning is what matters
    return ToolResult(f"error: {_one_line(message)}"[:max_chars], ok=False, error=kind, seconds=seconds)


# ------------------------------------------------------------------------------------------ the parts of call_tool


def _refusal(tools: dict[str, BaseTool], tool: BaseTool | None, call: ToolCall) -> tuple[ToolErrorKind, str] | None:
    """Why this call is not even tried, or None."""
    if call.error is not None:
        return ToolErrorKind.MALFORMED_CALL, call.error
    if tool is None:
        known = ", ".join(sorted(tools)) or "none"
        return ToolErrorKind.UNKNOWN_TOOL, f"unknown tool {quote(call.name)}; available: {known}"
    wrong = complaint(tool.validator, call.arguments)
    return None if wrong is None else (ToolErrorKind.INVALID_ARGUMENTS, f"{tool.name}: {wrong}")


async def _executed(tool: BaseTool, arguments: dict[str, Any]) -> ToolOutput:
    value = await (tool.execute(arguments) if tool.is_async else _in_thread(tool.execute, arguments))
    if inspect.isawaitable(value):  # an async function behind a plain decorator does not look like one
        value = await value
    if isinstance(value, ToolOutput):
        return value
    return ToolOutput(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


async def _in_thread(execute: Callable[[dict[str, Any]], Any], args: dict[str, Any]) -> Any:
    """Run a blocking `execute` in a daemon thread of its own and await the result.

    `asyncio.to_thread` would be shorter, and has a trap: a thread cannot be stopped, so a call that hangs goes on after
    its deadline. In the shared pool (six workers on two cores) six such calls would block every tool for good, and the
    interpreter would wait for them before it exits. A daemon thread that hangs is a leak; it stops nobody.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():  # the deadline or a cancellation was first
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome = context.run(execute, args), None
        except BaseException as error:  # carried over to the coroutine, which raises it
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value


def _cut(text: str, max_chars: int) -> str:
    """At most `max_chars` characters. The cut is marked, or the agent would take what is left for all there is."""
    if len(text) <= max_chars:
        return text
    mark = f" [cut off: {len(text)} characters]"
    return text[: max_chars - len(mark)] + mark if len(mark) < max_chars else text[:max_chars]


# ---------------------------------------------------------------------------------------------- words for the agent

LONGEST_MESSAGE = 300
_PATH = re.compile(r"(?<![\w/:])(?:[A-Za-z]:\\|~?/)[^\s'\",;)]+")


def _safe(error: BaseException) -> str:
    """The first line of an exception, without the paths in it. An OSError's own words hold its file name."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, LookupError):  # a KeyError's text is the bare key
        text = f"{type(error).__name__}: {text}"
    text = _PATH.sub("(path)", text.strip().splitlines()[0] if text.strip() else "")
    return text or type(error).__name__


def _one_line(text: Any) -> str:
    text = valid_unicode(" ".join(str(text).split()))
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 3] + "..."


def valid_unicode(text: str) -> str:
    """Without lone surrogates: JSON's "\\ud800" makes them, no UTF-8 can hold them, and tokenizers raise on them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
