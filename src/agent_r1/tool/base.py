"""What a tool is, and how one is called. In: a `ToolCall` that `env/` parsed. Out: a `ToolResult` for the next turn.

The caller of a tool is a language model in training. It will misspell names, forget arguments, ask for the impossible,
and do all of that a thousand times a minute. So `call_tool` never raises for anything that the model or the tool did:
it answers with one short line that says what was wrong and what would be right, because that line is what the model
reads next and learns from. A traceback would teach it nothing, fill its context, and show it our file system.

    ToolCall ── known tool? ── arguments fit the schema? ── execute, within the deadline ── cut to size ──▶ ToolResult
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import queue
import re
import threading
import time
import traceback
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agent_r1.core import ToolErrorKind
from agent_r1.ground.errors import ConfigError
from agent_r1.tool.arguments import SchemaChecker, quote


@dataclass(frozen=True)
class ToolCall:
    """One call as the agent wrote it. Everything in it is model output, so nothing in it is trusted."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Set when the call could not be parsed: what was wrong and what is expected, for the agent to read."""
    end: int | None = None
    """Where it ends in the turn's text, in characters; None: with the turn."""


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
    """For the environment and for logs (titles of passages, for example). The agent never sees it."""


@dataclass(frozen=True)
class ToolOutput:
    """What `execute` may return instead of a plain string, when there is something for people and logs as well."""

    content: str
    data: dict[str, Any] = field(default_factory=dict)


MAX_SCHEMA = 10_000
"""Characters of a foreign tool's description and schema, which every prompt carries."""
NO_TEXT = (bytes, bytearray, memoryview, types.GeneratorType, types.AsyncGeneratorType)
"""Results in which a tool's author has made a mistake; everything else has some form as JSON."""


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
    foreign = False
    """Whether a server wrote its description and schema: then they are bounded (see also arguments.py)."""
    retries: int = 0
    """How often a call that failed is made again within its deadline. Only for a tool that may do its work twice."""

    def __init__(self) -> None:
        _ = self.validator

    @abstractmethod
    def execute(self, args: dict[str, Any]) -> Any:
        """Do it. `args` fit the schema.

        Return the text for the agent, or a `ToolOutput`; anything else is written as JSON. May be `async def`; then it
        must not block, because it runs in the event loop among all other episodes. A plain `def` runs in a thread of
        its own, concurrently with other calls of the same tool. Exceptions become errors that the agent reads.
        """

    def for_episode(self, shared: dict[Any, Any]) -> BaseTool:
        """The tool of one episode; itself, unless it remembers something that other episodes must not see.

        `shared` is one dictionary for all tools of that episode.
        """
        return self

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """For what `for_episode` made: the episode is over, however it ended. Must not wait for anything."""

    def schema(self) -> dict[str, Any]:
        """This tool in OpenAI's form, as chat templates and servers expect it."""
        parameters = {"properties": {}, **self.parameters}  # templates read them, where there are none as well
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def body(self) -> Callable[..., Any] | None:
        """The function that a failure is looked up in, for the file and line that people get to read."""
        return self.execute

    @property
    def is_async(self) -> bool:
        """Whether `execute` runs in the event loop (True) or in a thread (False)."""
        return inspect.iscoroutinefunction(self.execute)

    @functools.cached_property
    def validator(self) -> SchemaChecker:
        """The compiled schema, made once a tool: checking and compiling takes a hundred times as long as validating."""
        owner = f"tool {getattr(self, 'name', None) or type(self).__name__}"
        for attribute in ("name", "description", "parameters"):
            if not getattr(self, attribute, None):
                raise ConfigError(f"{owner} has no {attribute}; set it as a class attribute", code="missing_attribute")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ConfigError(
                f"{owner}: a tool's name has 1 to 64 letters, digits, '_' or '-'; rename it", code="bad_tool_name"
            )
        if self.foreign and isinstance(self.parameters, dict):
            try:
                size = len(json.dumps(self.schema()))
            except RecursionError:
                size = MAX_SCHEMA + 1
            if size > MAX_SCHEMA:
                raise ConfigError(
                    f"{owner}: its description and schema have {size} characters, and every prompt would carry them; at most "
                    f"{MAX_SCHEMA}",
                    code="schema_too_long",
                )
        return SchemaChecker(self.parameters, owner, self.foreign)


async def call_tool(tools: dict[str, BaseTool], call: ToolCall, timeout_s: float, max_chars: int) -> ToolResult:
    """Execute one call. Whatever the model or the tool does, the answer is a `ToolResult`.

    `timeout_s` (seconds) holds for tools that do not set their own, `max_chars` for all. A cancellation of the episode and
    Ctrl-C pass through.
    """
    start = time.perf_counter()
    tool = tools.get(call.name) if isinstance(call.name, str) else None
    output, failure, data = ToolOutput(""), _refusal(tools, tool, call), {}
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
                failure = ToolErrorKind.TIME_OUT, f"{tool.name} took longer than {timeout_s:g} s and was stopped"
            else:
                failure = ToolErrorKind.TOOL_ERROR, f"{tool.name} failed: {_safe(error)}"
                data = {"at": _place(tool, error)}
    seconds = time.perf_counter() - start
    if failure is None:
        return ToolResult(_cut(output.content, max_chars), seconds=seconds, data=output.data)
    kind, message = failure  # short as it is; its beginning is what matters
    return ToolResult(f"error: {_one_line(message)}"[:max_chars], ok=False, error=kind, seconds=seconds, data=data)


# ------------------------------------------------------------------------------------------ the parts of call_tool


def _refusal(tools: dict[str, BaseTool], tool: BaseTool | None, call: ToolCall) -> tuple[ToolErrorKind, str] | None:
    """Why this call is not even tried, or None."""
    if call.error is not None:
        return ToolErrorKind.MALFORMED_CALL, call.error
    if tool is None:
        known = ", ".join(sorted(tools)) or "none"
        return ToolErrorKind.UNKNOWN_TOOL, f"unknown tool {quote(call.name)}; available: {known}"
    wrong = tool.validator.complaint(call.arguments)
    return None if wrong is None else (ToolErrorKind.INVALID_ARGUMENTS, f"{tool.name}: {wrong}")


async def _executed(tool: BaseTool, arguments: dict[str, Any]) -> ToolOutput:
    """The result of the first try that does not fail, or the failure of the last one."""
    for retry in range(tool.retries):
        try:
            return await _tried(tool, arguments)
        except InvalidArgumentsError:
            raise
        except Exception:
            await asyncio.sleep(0.1 * 2**retry)
    return await _tried(tool, arguments)


async def _tried(tool: BaseTool, arguments: dict[str, Any]) -> ToolOutput:
    value = await (tool.execute(arguments) if tool.is_async else _in_thread(tool.execute, arguments))
    if inspect.isawaitable(value):  # an async function in a plain decorator does not look like one
        value = await value
    output = value if isinstance(value, ToolOutput) else ToolOutput(value)
    if isinstance(output.content, str):
        return output
    if isinstance(output.content, Exception):  # in the place of a result, as `execute_batch` may
        raise output.content
    if output.content is None or isinstance(output.content, NO_TEXT):
        raise TypeError(f"it returned {type(output.content).__name__}, and an agent reads text; return a str")
    return ToolOutput(json.dumps(output.content, ensure_ascii=False, default=str), output.data)


async def _in_thread(execute: Callable[[dict[str, Any]], Any], args: dict[str, Any]) -> Any:
    thread = OneThread("tool")
    try:
        return await thread.run(execute, args)
    finally:
        thread.end()


class OneThread:
    """A separate thread for what blocks, awaited.

    `asyncio.to_thread` would be shorter, and has a trap: a thread cannot be stopped, so a call that hangs goes on after
    its deadline. In the shared pool (six workers on two cores) six such calls would block every tool for good, and the
    interpreter would wait for them before it exits. A daemon thread that hangs is a leak; it stops no other call.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        """Call it there, after what was asked before; raises what it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        done: Future[tuple[Any, BaseException | None]] = Future()
        self._jobs.put((done, functools.partial(contextvars.copy_context().run, function, *args, **arguments)))
        value, error = await asyncio.wrap_future(done)
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            done, call = job
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result((call(), None))
            except BaseException as error:  # also StopIteration, which a future of asyncio would not carry
                done.set_result((None, error))


def _cut(text: str, max_chars: int) -> str:
    """Keep at most so many characters. The cut is marked, or the agent would take what is left for all there is."""
    mark = f" [cut off: {len(text)} characters]"
    kept = valid_unicode(text[:max_chars])  # first cut, then read: a tool may return gigabytes
    if len(kept) == len(text):
        return kept
    return kept[: -len(mark)] + mark if len(mark) < len(kept) else kept


# ---------------------------------------------------------------------------------------------- words for the agent

LONGEST_MESSAGE = 300
_PATH = re.compile(r"(?<![\w/:])(?:[A-Za-z]:\\|~?/)[^\s'\",;)]+")


def _place(tool: BaseTool, error: BaseException) -> str:
    """`file:line` of the tool's own file where it failed, or where it begins; for people."""
    code = getattr(inspect.unwrap(tool.body), "__code__", None) if tool.body else None
    if code is None:
        return ""
    lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == code.co_filename]
    return f"{code.co_filename}:{(lines or [code.co_firstlineno])[-1]}"


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
