"""Define tools, and execute calls.

In: a `ToolCall` that `env/` parsed. Out: a `ToolResult` for the next turn.

The caller is a language model in training. It misspells names and forgets arguments, thousands of
times. So `call_tool` never raises for an error of model or tool. It returns one short line with the
fault and the remedy, because the model reads this line next and learns from it. A traceback would
fill its context and expose our file system.

    ToolCall ── known tool? ── arguments fit the schema? ── execute, within the deadline ── cut to
    size ──▶ ToolResult
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
    """One call as the agent wrote it: untrusted model output."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Set if the call could not be parsed: the fault and the expected form, for the agent."""
    end: int | None = (
        None  # end of the call in the turn's text, in characters; None: end of the turn
    )


@dataclass(frozen=True)
class ToolResult:
    """Result of one call."""

    content: str
    """For the agent: the result, or one line that begins with `error:`.

    Valid Unicode of limited length.
    """
    ok: bool = True
    error: ToolErrorKind | None = None
    seconds: float = 0.0  # wall-clock time of the call
    data: dict[str, Any] = field(default_factory=dict)
    """For the environment and for logs (such as titles of passages); the agent never sees it."""


@dataclass(frozen=True)
class ToolOutput:
    """Result of `execute` with data for the environment and logs, instead of a string."""

    content: str
    data: dict[str, Any] = field(default_factory=dict)


MAX_TOOL_CHARS = 10_000
"""Most characters in a foreign tool's description and schema, which every prompt contains."""
NO_TEXT = (bytes, bytearray, memoryview, types.GeneratorType, types.AsyncGeneratorType)
"""Types of results that are mistakes of a tool's author; every other type has some form as JSON."""


class InvalidArgumentsError(ValueError):
    """Raised by a tool for arguments that fit its schema but make no sense.

    The agent reads the text.
    """


class BaseTool(ABC):
    """A tool: three class attributes and a method.

        class Double(BaseTool):
            name = "double" description = "Doubles a number." parameters = {"type": "object",
            "properties": {"x": {"type": "number"}}, "required": ["x"]}

            def execute(self, args):
                return str(2 * args["x"])

    `@tool` in function.py makes one from a typed function with a docstring. Construction raises
    ConfigError for a wrong name, description or schema.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, of type `object`."""
    timeout_s: float | None = None
    """Deadline of one call in seconds; None: the caller's (`env.tool_timeout_s`)."""
    foreign = False
    """Whether description and schema come from a server.

    If so, they are limited (see also arguments.py).
    """
    retries: int = 0
    """Times that a failed call is repeated within its deadline.

    Only for a tool that may run twice.
    """

    def __init__(self) -> None:
        self.validator.compile()

    @abstractmethod
    def execute(self, args: dict[str, Any]) -> Any:
        """Run the call with `args`, which fit the schema.

        Return the text for the agent or a `ToolOutput`; anything else is converted to JSON. An
        `async def` must not block: it runs in the event loop of all episodes, which would all wait.
        It must let `asyncio.CancelledError` pass, which ends it at its deadline. A plain `def` runs
        in its own thread, concurrently with other calls of the same tool. Exceptions become errors
        that the agent reads.
        """

    def for_episode(self, shared: dict[Any, Any]) -> BaseTool:
        """Return the tool of one episode: itself, unless it has state per episode.

        `shared` is one dictionary for all tools of that episode.
        """
        return self

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release what `for_episode` made, at the end of the episode. Must not wait."""

    def schema(self) -> dict[str, Any]:
        """Describe this tool in OpenAI's form, for chat templates and servers."""
        parameters = {
            "properties": {},
            **self.parameters,
        }  # templates read them, also if there are none
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def body(self) -> Callable[..., Any] | None:
        """The function whose file and line a failure reports to people."""
        return self.execute

    @property
    def is_async(self) -> bool:
        """Whether `execute` runs in the event loop (True) or in a thread (False)."""
        return inspect.iscoroutinefunction(self.execute)

    @functools.cached_property
    def validator(self) -> SchemaChecker:
        """The schema, compiled at most once for a tool and its copies.

        Compiling takes a hundred times as long as validating. Raises ConfigError for a missing
        attribute, a wrong name or a long foreign schema.
        """
        owner = f"tool {getattr(self, 'name', None) or type(self).__name__}"
        for attribute in ("name", "description", "parameters"):
            if not getattr(self, attribute, None):
                raise ConfigError(
                    f"{owner} has no {attribute}; set it as a class attribute",
                    code="missing_attribute",
                )
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ConfigError(
                f"{owner}: a tool's name has 1 to 64 letters, digits, '_' or '-'; rename it",
                code="bad_tool_name",
            )
        if self.foreign and isinstance(self.parameters, dict):
            try:
                size = len(json.dumps(self.schema()))
            except RecursionError:
                size = MAX_TOOL_CHARS + 1
            if size > MAX_TOOL_CHARS:
                raise ConfigError(
                    f"{owner}: its description and schema have {size} characters, which every "
                    f"prompt would contain; at most {MAX_TOOL_CHARS} are allowed",
                    code="schema_too_long",
                )
        return SchemaChecker(self.parameters, owner, self.foreign)


async def call_tool(
    tools: dict[str, BaseTool], call: ToolCall, timeout_s: float, max_chars: int
) -> ToolResult:
    """Execute one call. Return a `ToolResult`, whatever the model or the tool does.

    `timeout_s` (seconds) is for tools without their own, `max_chars` for all. Cancellation of the
    episode and Ctrl-C pass through, also if the tool tries to catch them.
    """
    start = time.perf_counter()
    tool = tools.get(call.name) if isinstance(call.name, str) else None
    refusal = _refusal(tools, tool, call)
    if tool is None or refusal is not None:
        kind, message = refusal or (ToolErrorKind.UNKNOWN_TOOL, "")
        return _error_result(kind, message, max_chars, start)
    limit_s = timeout_s if tool.timeout_s is None else tool.timeout_s
    clock = asyncio.get_running_loop()
    begin = clock.time()
    task = asyncio.current_task()
    cancellations = task.cancelling()
    error: BaseException | None = None
    output = ToolOutput("")
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            output = await _run_with_retries(tool, call.arguments)
    # BaseException, because a tool may raise SystemExit by sys.exit(), or CancelledError from a
    # cancel scope of its own. Neither may end a training run.
    except BaseException as failure:
        if ends_run(failure, task):
            raise
        error = failure
    if task.cancelling() > cancellations:  # the run's, also if the tool caught it
        raise asyncio.CancelledError from error
    # A tool may catch the deadline's cancellation, too, or block the event loop so that the
    # deadline is noticed only when the tool returns. Its result is late either way.
    is_late = deadline.expired() or (tool.is_async and clock.time() - begin >= limit_s)
    if is_late:
        message = f"{tool.name} took longer than {limit_s:g} s and was stopped"
        return _error_result(ToolErrorKind.TIME_OUT, message, max_chars, start)
    if isinstance(error, InvalidArgumentsError):
        # Its author wrote the text for the agent. A server's text may have paths of this machine.
        words = _safe(error) if tool.foreign else _text_of(error)
        message = f"{tool.name}: {words}"
        return _error_result(ToolErrorKind.INVALID_ARGUMENTS, message, max_chars, start)
    if error is not None:
        message = f"{tool.name} failed: {_safe(error)}"
        place = {"at": _place(tool, error)}
        return _error_result(ToolErrorKind.TOOL_ERROR, message, max_chars, start, place)
    seconds = time.perf_counter() - start
    return ToolResult(cut_middle(output.content, max_chars), seconds=seconds, data=output.data)


# --------------------------------------------------------------------------- the parts of call_tool


def _refusal(
    tools: dict[str, BaseTool], tool: BaseTool | None, call: ToolCall
) -> tuple[ToolErrorKind, str] | None:
    """Return why this call is not run, or None."""
    if call.error is not None:
        return ToolErrorKind.MALFORMED_CALL, call.error
    if tool is None:
        names = ", ".join(sorted(tools)) or "none"
        return ToolErrorKind.UNKNOWN_TOOL, f"unknown tool {quote(call.name)}; available: {names}"
    wrong = tool.validator.complaint(call.arguments)
    return None if wrong is None else (ToolErrorKind.INVALID_ARGUMENTS, f"{tool.name}: {wrong}")


def _error_result(
    kind: ToolErrorKind,
    message: str,
    max_chars: int,
    start: float,
    data: dict[str, Any] | None = None,
) -> ToolResult:
    """Make the result of a failed call: one line, cut at its end."""
    content = f"error: {_one_line(message)}"[:max_chars]
    seconds = time.perf_counter() - start
    return ToolResult(content, ok=False, error=kind, seconds=seconds, data=data or {})


def ends_run(error: BaseException, task: asyncio.Task[Any]) -> bool:
    """Return whether an exception of a call in `task` is not the tool's.

    That is Ctrl-C, or the end of a coroutine. A cancellation is told by `task.cancelling()`.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    if isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt):
        return True
    if isinstance(error, GeneratorExit):
        # Python closes a coroutine that is no longer awaited: then no task runs it.
        try:
            return asyncio.current_task() is not task
        except RuntimeError:
            return True
    return False


async def _run_with_retries(tool: BaseTool, arguments: dict[str, Any]) -> ToolOutput:
    """Return the first successful try's result, or raise the last try's failure."""
    for retry in range(tool.retries):
        try:
            return await _run_once(tool, arguments)
        except InvalidArgumentsError:
            raise
        except Exception:
            await asyncio.sleep(0.1 * 2**retry)
    return await _run_once(tool, arguments)


async def _run_once(tool: BaseTool, arguments: dict[str, Any]) -> ToolOutput:
    if tool.is_async:
        value = await tool.execute(arguments)
    else:
        value = await _in_thread(tool.execute, arguments)
    if inspect.isawaitable(value):  # an async function in a plain decorator looks synchronous
        value = await value
    output = value if isinstance(value, ToolOutput) else ToolOutput(value)
    if isinstance(output.content, str):
        return output
    if isinstance(output.content, Exception):  # `execute_batch` may return one
        raise output.content
    if output.content is None or isinstance(output.content, NO_TEXT):
        raise TypeError(
            f"it returned {type(output.content).__name__}, and an agent reads text; return a str"
        )
    return ToolOutput(json.dumps(output.content, ensure_ascii=False, default=str), output.data)


async def _in_thread(execute: Callable[[dict[str, Any]], Any], args: dict[str, Any]) -> Any:
    thread = OneThread("tool")
    try:
        return await thread.run(execute, args)
    finally:
        thread.end()


class OneThread:
    """A separate thread for blocking functions, awaited.

    `asyncio.to_thread` is shorter but has a trap: a thread cannot be stopped, so a hanging call
    outlives its deadline. In the shared pool (six workers on two cores), six of them would block
    every tool for good, and the interpreter could not exit. A hanging daemon thread is a leak, but
    it blocks nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        """Call `function` in the thread, after earlier calls. Raise its exceptions."""
        value, error = await asyncio.wrap_future(self.submit(function, *args, **arguments))
        if error is not None:
            raise error
        return value

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **arguments: Any
    ) -> Future[tuple[Any, BaseException | None]]:
        """Call `function` in the thread, after earlier calls. The result is (value, exception)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        done: Future[tuple[Any, BaseException | None]] = Future()
        self._jobs.put(
            (done, functools.partial(contextvars.copy_context().run, function, *args, **arguments))
        )
        return done

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            done, call = job
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result((call(), None))
            # Also StopIteration, which an asyncio future cannot carry.
            except BaseException as error:
                done.set_result((None, error))


def cut_middle(text: str, max_chars: int) -> str:
    """Cut a text to `max_chars` in the middle, with a mark.

    Two thirds of what remains are the beginning, where a search has its best passages. The rest is
    the end, where a program has its error.
    """
    if len(text) <= max_chars:
        return valid_unicode(text)
    mark = f" [cut off: {len(text)} characters] "
    room = max_chars - len(mark)
    end = room // 3
    if end < 1:
        return valid_unicode(text[:max_chars])
    # Cut before decoding: a tool may return gigabytes.
    return valid_unicode(f"{text[: room - end]}{mark}{text[-end:]}")


# ------------------------------------------------------------------------------ words for the agent

LONGEST_MESSAGE = 300
_PATH = re.compile(r"(?<![\w/:])(?:[A-Za-z]:\\|~?/{1,2}(?=[\w.~]))[^\s'\",;)]+")
"""`7 // 2` and `a / b` are no paths."""


def _place(tool: BaseTool, error: BaseException) -> str:
    """Return `file:line` of the failure in the tool's own file, or of its beginning."""
    code = getattr(inspect.unwrap(tool.body), "__code__", None) if tool.body else None
    if code is None:
        return ""
    lines = [
        n
        for frame, n in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == code.co_filename
    ]
    return f"{code.co_filename}:{(lines or [code.co_firstlineno])[-1]}"


def _safe(error: BaseException) -> str:
    """Return the first line of an exception, without paths. An OSError's text has its file name."""
    while isinstance(error, BaseExceptionGroup):  # its own text names no cause
        error = error.exceptions[0]
    text = _text_of(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    if isinstance(error, LookupError):  # a KeyError's text is only the key
        text = f"{type(error).__name__}: {text}"
    first_line = text.strip().splitlines()[0] if text.strip() else ""
    return _PATH.sub("(path)", first_line) or type(error).__name__


def _text_of(error: BaseException) -> str:
    """Return an exception's text; of one that cannot be printed, its type."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def _one_line(text: Any) -> str:
    text = valid_unicode(" ".join(str(text).split()))
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 3] + "..."


def valid_unicode(text: str) -> str:
    """Replace lone surrogates. JSON's "\\ud800" makes them, UTF-8 cannot encode them, and
    tokenizers raise on them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
