"""Room 3: every call gets an answer, whatever the model wrote and whatever the tool did."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import subprocess
import sys
import threading
import time
from typing import Any, Literal

import pytest
from conftest import fails_with
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.ground.errors import ConfigError
from agent_r1.search.index import Hit
from agent_r1.tool import (
    BaseTool,
    InvalidArgumentsError,
    ToolCall,
    ToolErrorKind,
    ToolOutput,
    call_tool,
    tool,
)
from agent_r1.tool.search import SearchTool


class Echo(BaseTool):
    name = "echo"
    description = "Says it again."
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "times": {"type": "integer", "minimum": 1},
            "mood": {"enum": ["glad", "sad"]},
        },
        "required": ["text"],
        "additionalProperties": False,
    }

    async def execute(self, args):
        return args["text"] * args.get("times", 1)


def make(execute, **attributes) -> BaseTool:
    """A tool named `it`, without declared arguments, around `execute(args)`."""
    if asyncio.iscoroutinefunction(execute):

        async def method(self, args):
            return await execute(args)
    else:

        def method(self, args):
            return execute(args)

    body = {
        "name": "it",
        "description": "It.",
        "parameters": {"type": "object"},
        "execute": method,
        **attributes,
    }
    return type("It", (BaseTool,), body)()


def call(tool_, arguments=None, timeout_s=5.0, max_chars=1000, name=None, error=None):
    """Run one call to the end."""
    request = ToolCall(name or tool_.name, {} if arguments is None else arguments, error)
    return asyncio.run(call_tool({tool_.name: tool_}, request, timeout_s, max_chars))


# ------------------------------------------------------------------------------------ the good path


def test_a_good_call():
    result = call(Echo(), {"text": "ab", "times": 2})
    assert result.ok and result.error is None and result.content == "abab" and result.seconds >= 0
    function = {"name": "echo", "description": "Says it again.", "parameters": Echo.parameters}
    assert Echo().schema() == {"type": "function", "function": function}  # OpenAI's form


def test_sync_runs_in_a_thread_and_async_does_not():
    async def where(args):
        return threading.current_thread().name

    assert call(make(where)).content == threading.main_thread().name
    assert call(make(lambda args: threading.current_thread().name)).content == "tool"


def test_other_results_become_json_and_data_stays_aside():
    assert (
        call(make(lambda args: {"a": [1, None], "ü": True})).content
        == '{"a": [1, null], "ü": true}'
    )
    result = call(make(lambda args: ToolOutput("seen", {"ids": ["p1"]})))
    assert result.content == "seen" and result.data == {"ids": ["p1"]}


# ---------------------------------------------------------------------------------- the error texts


ACCEPTS = "; accepts: text (string, required), times (integer), mood"


@pytest.mark.parametrize(
    ("request_", "kind", "content"),
    [
        (ToolCall("ecco", {}), "unknown_tool", "unknown tool 'ecco'; available: echo"),
        (ToolCall("", {}, error="the call is not JSON"), "malformed_call", "the call is not JSON"),
        (ToolCall("echo", {}), "invalid_arguments", f"echo: missing argument 'text'{ACCEPTS}"),
        (ToolCall("echo", {"text": 5}), "invalid_arguments", "echo: argument 'text' must be "
            f"string, not 5{ACCEPTS}"),
        (ToolCall("echo", {"text": "a", "time": 2}), "invalid_arguments",
         f"echo: unknown argument 'time' (did you mean 'times'?){ACCEPTS}"),
        (ToolCall("echo", {"text": "a", "mood": "mad"}), "invalid_arguments",
         f"echo: argument 'mood' must be one of 'glad', 'sad', not 'mad'{ACCEPTS}"),
        (ToolCall("echo", ["text"]), "invalid_arguments", "echo: arguments must be an "
            f"object{ACCEPTS}"),
    ],
)  # fmt: skip
def test_error_texts_say_what_is_wrong_and_what_is_right(request_, kind, content):
    result = asyncio.run(call_tool({"echo": Echo()}, request_, 1, 1000))
    assert (result.ok, result.error, result.content) == (
        False,
        ToolErrorKind(kind),
        f"error: {content}",
    )


class OutOfLuck(BaseException):
    """What a library may raise to pass every `except Exception`."""


EXCEPTIONS = [
    ValueError,
    StopIteration,
    SystemExit,
    asyncio.CancelledError,
    GeneratorExit,
    OutOfLuck,
]


@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("is_async", [True, False])
def test_every_exception_becomes_a_tool_error(exception, is_async):
    def sync(args):
        raise exception("out of luck")

    async def asynchronous(args):
        raise exception("out of luck")

    result = call(make(asynchronous if is_async else sync))
    assert result.error is ToolErrorKind.TOOL_ERROR and result.content.startswith(
        "error: it failed: "
    )
    assert "Traceback" not in result.content


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ZeroDivisionError("division by zero"), "error: it failed: division by zero"),
        (ValueError("cannot read '/home/me/key', sorry"), "error: it failed: cannot read '(path)', "
            "sorry"),
        (ValueError("see https://example.org/a and 1/2 or and/or"),
         "error: it failed: see https://example.org/a and 1/2 or and/or"),
        (ValueError("7 // 0 or a / b"), "error: it failed: 7 // 0 or a / b"),
        (ValueError("first\nsecond"), "error: it failed: first"),
        (InvalidArgumentsError("x is too large"), "error: it: x is too large"),
        (InvalidArgumentsError("write + - * / // % or see /help"), "error: it: write + - * / // % "
            "or "
            "see /help"),
        (InvalidArgumentsError("first,\nsecond"), "error: it: first, second"),
    ],
)  # fmt: skip
def test_exception_texts_hold_no_paths(error, content):
    async def execute(args):
        raise error

    result = call(make(execute))
    assert result.content == content and (result.error == "invalid_arguments") == isinstance(
        error, InvalidArgumentsError
    )


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (BaseExceptionGroup("two", [GeneratorExit("first"), ValueError("second")]), "first"),
        (ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("deep")])]), "deep"),
        (BaseExceptionGroup("x", [asyncio.CancelledError()]), "CancelledError"),
        (type("Unprintable", (Exception,), {"__str__": lambda self: 1 / 0})(), "Unprintable"),
    ],
)
def test_a_group_of_exceptions_is_told_by_its_first_cause(is_async, error, says):
    def sync(args):
        raise error

    async def asynchronous(args):
        raise error

    result = call(make(asynchronous if is_async else sync))
    assert result.error is ToolErrorKind.TOOL_ERROR
    assert result.content == f"error: it failed: {says}"


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BaseExceptionGroup("x", [KeyboardInterrupt()])]
)
def test_ctrl_c_passes_through(error, is_async):
    def sync(args):
        raise error

    async def asynchronous(args):
        raise error

    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
        call(make(asynchronous if is_async else sync))


@pytest.mark.parametrize("swallows", ["returns", "raises"])
def test_a_tool_that_swallows_the_cancellation_of_the_run_cannot_keep_it(swallows):
    after = []

    async def execute(args):
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            if swallows == "raises":
                raise ValueError("no") from None
            return "I go on"

    async def main():
        async def episode():
            await call_tool({"it": make(execute)}, ToolCall("it", {}), 200, 100)
            after.append("the episode went on")

        run = asyncio.create_task(episode())
        await asyncio.sleep(0.01)
        run.cancel()
        await run

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert not after


def test_a_coroutine_that_nobody_awaits_can_be_closed():
    """Python then raises GeneratorExit at its `await`. A result instead would raise
    RuntimeError."""

    async def execute(args):
        await asyncio.sleep(100)

    async def main():
        running = call_tool({"it": make(execute)}, ToolCall("it", {}), 200, 100)
        task = asyncio.create_task(running)
        await asyncio.sleep(0.01)
        return task, running

    loop = asyncio.new_event_loop()
    task, running = loop.run_until_complete(main())
    running.close()
    assert inspect.getcoroutinestate(running) == inspect.CORO_CLOSED
    task._log_destroy_pending = False
    loop.close()


async def _sleep_through(args):
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0.2)
    return "late"


async def _block(args):
    time.sleep(0.2)
    return "late"


async def _raise_late(args):
    try:
        await asyncio.sleep(0.2)
    except asyncio.CancelledError:
        raise InvalidArgumentsError("late") from None


@pytest.mark.parametrize("execute", [_sleep_through, _block, _raise_late])
def test_a_result_after_the_deadline_is_a_time_out(execute):
    result = call(make(execute), timeout_s=0.05)
    assert result.error is ToolErrorKind.TIME_OUT
    assert result.content == "error: it took longer than 0.05 s and was stopped"


# ------------------------------------------------------------------------------ deadlines and sizes


@pytest.mark.parametrize("is_async", [True, False])
def test_deadline(is_async):
    release, ended = threading.Event(), []

    async def slow(args):
        await asyncio.sleep(100)
        ended.append(1)

    it = make(slow if is_async else lambda args: release.wait(100) and ended.append(1))
    result = call(it, timeout_s=0.05)
    assert ended == [] and result.error is ToolErrorKind.TIME_OUT
    release.set()
    assert (
        result.content == "error: it took longer than 0.05 s and was stopped"
        and result.seconds >= 0.045
    )


def test_calls_that_hang_do_not_starve_the_others():
    """In asyncio's shared thread pool, forty hanging calls would hold every worker."""
    release, ended = threading.Event(), []
    tools = {
        "hang": make(lambda args: release.wait(100) and ended.append(1)),
        "quick": make(lambda args: "done"),
    }

    async def main():
        await asyncio.gather(*(call_tool(tools, ToolCall("hang"), 0.05, 100) for _ in range(40)))
        return await call_tool(tools, ToolCall("quick"), 60, 100)

    assert asyncio.run(main()).content == "done"
    assert ended == []  # nor does asyncio.run wait for them at the end
    release.set()


def test_a_tool_that_hangs_does_not_keep_the_program_from_ending():
    code = """
import asyncio, time
from agent_r1.tool import BaseTool, ToolCall, call_tool
class Hang(BaseTool):
    name, description, parameters = "hang", "Hangs.", {"type": "object"}
    def execute(self, args):
        time.sleep(60)
print(asyncio.run(call_tool({"hang": Hang()}, ToolCall("hang"), 0.05, 100)).error)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "time_out\n", "")


@pytest.mark.parametrize("max_chars", [0, 40, 100])
def test_size_cap(max_chars):
    content = call(make(lambda args: "a" * 100), max_chars=max_chars).content
    assert len(content) == min(max_chars, 100)
    assert (content == "a" * 100) == (max_chars >= 100)
    if 40 <= max_chars < 100:
        assert content.startswith("aaaaaaa") and content.endswith(" [cut off: 100 characters] aaaa")


@pytest.mark.parametrize("max_chars", [100, 1000, 1500, 4000])
def test_the_end_of_a_long_result_is_kept(max_chars):
    text = "first line\n" + "".join(f"step {n} of many\n" for n in range(1000)) + "ValueError: last"
    content = call(make(lambda args: text), max_chars=max_chars).content
    assert len(content) == max_chars
    assert content.startswith("first line\n") and content.endswith("ValueError: last")
    assert content.count(f" [cut off: {len(text)} characters] ") == 1


def test_lone_surrogates_do_not_reach_the_tokenizer():
    assert call(Echo(), {"text": "a\ud800b"}).content == "a?b"
    call(Echo(), {"text": 1, "\ud800": 2}).content.encode()


# --------------------------------------------------------------------------------------- properties

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
echo_like = st.dictionaries(
    st.sampled_from(["text", "times", "mood", "x"]), json_values, max_size=4
)
ECHO = Echo()


@given(
    json_values | st.just("echo"),
    json_values | echo_like,
    st.none() | st.text(),
    st.integers(0, 200),
)
def test_whatever_the_model_writes_there_is_an_answer(name, arguments, error, max_chars):
    if isinstance(arguments, dict) and isinstance(arguments.get("times"), int | float):
        arguments = {**arguments, "times": 2}  # a billion times would only test Python's memory
    result = asyncio.run(call_tool({"echo": ECHO}, ToolCall(name, arguments, error), 5, max_chars))
    assert result.ok == (result.error is None)
    assert len(result.content) <= max_chars
    result.content.encode("utf-8")
    if not result.ok:
        assert "\n" not in result.content and result.content[:7] == "error: "[:max_chars]


def test_absurdly_nested_arguments():
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert call(Echo(), {"text": deep}).error is ToolErrorKind.INVALID_ARGUMENTS
    assert call(Echo(), {"text": 10**5000}).error is ToolErrorKind.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("value", "fits"),
    [("a" * 40 + "!", True), (1, False)],
    ids=["a pattern of hours is the server's to check", "type"],
)
def test_of_a_strangers_schema_names_and_types_are_checked(value, fits):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}},
        "additionalProperties": False,
    }
    foreign = make(lambda args: "done", parameters=schema, foreign=True)
    assert call(foreign, {"x": value}).ok is fits
    assert not call(foreign, {"y": value}).ok


def test_a_schema_of_ones_own_is_checked_whole():
    own = make(
        lambda args: "done", parameters={"type": "object", "properties": {"x": {"pattern": "^a+$"}}}
    )
    assert (
        call(own, {"x": "aa"}).ok and call(own, {"x": "b"}).error is ToolErrorKind.INVALID_ARGUMENTS
    )


# -------------------------------------------------------------------------------------- wrong tools


def nested(depth: int) -> dict:
    return functools.reduce(
        lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(depth), {}
    )


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"name": "two words"}, "bad_tool_name"),
        ({"description": ""}, "missing_attribute"),
        ({"parameters": {"type": "objekt"}}, "bad_schema"),
        ({"parameters": {"type": "string"}}, "bad_schema"),
        ({"parameters": nested(100)}, "bad_schema"),
        ({"parameters": nested(100), "foreign": True}, "bad_schema"),
        ({"parameters": nested(10_000), "foreign": True}, "schema_too_long"),
    ],
)  # fmt: skip
def test_a_wrong_tool_is_refused_when_it_is_made(attributes, code):
    with pytest.raises(ConfigError) as refused:
        make(lambda args: "", **attributes)
    assert refused.value.code == code and len(str(refused.value)) < 200


# -------------------------------------------------------------------------------------------- @tool


@tool
def convert(
    amount: float,
    to: Literal["EUR", "USD"],
    digits: int = 2,
    notes: list[str] | None = None,
    table: dict[str, int] | None = None,
) -> str:
    """Convert an amount
    of money.

    Nothing is rounded twice.

    Args:
        amount: How much, in the other
            currency, before fees.
        to: The currency wanted.
        digits: Decimals.
        notes: Remarks.
        table: Fees.

    Returns:
        The amount with its currency.
    """
    return f"{amount:.{digits}f} {to}"


def test_schema_from_annotations_and_docstring():
    assert convert.name == "convert"
    assert convert.description == "Convert an amount of money. Nothing is rounded twice."
    properties = convert.parameters["properties"]
    assert properties["amount"] == {
        "type": "number",
        "description": "How much, in the other currency, before fees.",
    }
    assert properties["to"] == {
        "type": "string",
        "enum": ["EUR", "USD"],
        "description": "The currency wanted.",
    }
    nothing = {"type": "null"}
    assert properties["notes"]["anyOf"] == [{"type": "array", "items": {"type": "string"}}, nothing]
    assert properties["table"]["anyOf"] == [
        {"type": "object", "additionalProperties": {"type": "integer"}},
        nothing,
    ]
    assert (
        convert.parameters["required"] == ["amount", "to"]
        and not convert.parameters["additionalProperties"]
    )


def test_a_function_tool_is_called_like_any_other_and_like_a_function():
    assert call(convert, {"amount": 2, "to": "EUR"}).content == "2.00 EUR"
    assert convert(2.5, "USD", digits=1) == "2.5 USD"
    assert call(convert, {"amount": 2, "to": "EUR", "notes": None, "table": {"x": 1}}).ok
    assert call(convert, {"amount": "2", "to": "EUR"}).content.startswith(
        "error: convert: argument 'amount' must be number, not '2'"
    )


DOCUMENTED = "Doubles.\n\nArgs:\n    x: A number.\n"


def plain(x: int): ...
def no_annotation(x): ...
def unknown_name(x: Nobody): ...  # noqa: F821
def odd_type(x: complex): ...
def star(*x: int): ...


@pytest.mark.parametrize(
    ("function", "doc", "code"),
    [
        (plain, None, "bad_docstring"),
        (plain, "Doubles.", "bad_docstring"),
        (plain, f"{DOCUMENTED}    y: Another.\n", "bad_docstring"),
        (no_annotation, DOCUMENTED, "bad_annotation"),
        (unknown_name, DOCUMENTED, "bad_annotation"),
        (odd_type, DOCUMENTED, "bad_annotation"),
        (star, DOCUMENTED, "wrong_signature"),
    ],
)
def test_what_is_missing_is_refused_at_decoration(function, doc, code):
    function.__doc__ = doc
    with fails_with(code, function.__name__):
        tool(function)


# ------------------------------------------------------------------------------- search, make_tools


class FakeSearcher:
    index = None

    def __init__(self, hits):
        self.hits, self.asked = hits, []

    async def search(self, query, top_k):
        self.asked.append((query, top_k))
        return self.hits[:top_k]


HITS = [
    Hit("p0", "Vexlor", "Vexlor is a company.", 0.9),
    Hit("p1", "Marn", "A person\nborn in Tulo.", 0.5),
    Hit("p2", "Tulo", "Tulo is a city.", 0.1),
]


def test_search_shows_one_passage_a_line():
    searcher = FakeSearcher(HITS)
    result = call(SearchTool(searcher, 2), {"query": "  Vexlor founder "})
    assert result.content == "Vexlor is a company.\nMarn: A person born in Tulo."
    assert result.data == {"titles": ["Vexlor", "Marn"]}
    assert searcher.asked == [("Vexlor founder", 2)]


def test_search_without_hits_or_query():
    assert call(SearchTool(FakeSearcher([]), 3), {"query": "x"}).content == "no results"
    result = call(SearchTool(FakeSearcher(HITS), 3), {"query": " \n"})
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS and "query is empty" in result.content


def test_a_schema_is_compiled_once_for_a_function_tool_and_its_copies(monkeypatch):
    """An environment of methods copies its tools for each episode, and start-up compiles
    nothing."""
    from jsonschema import Draft202012Validator

    compiled, check = [], Draft202012Validator.check_schema
    monkeypatch.setattr(
        Draft202012Validator,
        "check_schema",
        lambda schema: (compiled.append(schema), check(schema)),
    )

    @tool
    def double(x: int) -> int:
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x

    assert not compiled
    assert [copy.copy(double).validator.complaint({"x": 1}) for _ in range(3)] == [
        None
    ] * 3 and len(compiled) == 1
