"""Room 3: every call gets an answer, whatever the model wrote and whatever the tool did."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.config import tables
from agent_r1.ground.errors import ConfigError
from agent_r1.search.index import Hit
from agent_r1.tool import (
    BaseTool,
    InvalidArgumentsError,
    ToolCall,
    ToolErrorKind,
    ToolOutput,
    call_tool,
    make_tools,
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

    body = {"name": "it", "description": "It.", "parameters": {"type": "object"}, "execute": method, **attributes}
    return type("It", (BaseTool,), body)()


def call(tool_, arguments=None, timeout_s=5.0, max_chars=1000, name=None, error=None):
    """Run one call to the end."""
    request = ToolCall(name or tool_.name, {} if arguments is None else arguments, error)
    return asyncio.run(call_tool({tool_.name: tool_}, request, timeout_s, max_chars))


# -------------------------------------------------------------------------------------------------- the good path


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


def test_sync_calls_run_side_by_side():
    """A barrier that only opens when all eight calls are inside it at the same time."""
    barrier = threading.Barrier(8)
    it = make(lambda args: str(barrier.wait(timeout=100) >= 0))

    async def main():
        return await asyncio.gather(*(call_tool({"it": it}, ToolCall("it"), 100, 100) for _ in range(8)))

    assert [result.content for result in asyncio.run(main())] == ["True"] * 8


def test_other_results_become_json_and_data_stays_aside():
    assert call(make(lambda args: {"a": [1, None], "ü": True})).content == '{"a": [1, null], "ü": true}'
    result = call(make(lambda args: ToolOutput("seen", {"ids": ["p1"]})))
    assert result.content == "seen" and result.data == {"ids": ["p1"]}


def test_an_async_function_behind_a_plain_decorator_is_awaited():
    async def inner(args):
        return "awaited"

    @functools.wraps(inner)
    def outer(args):
        return inner(args)

    assert call(make(lambda args: outer(args))).content == "awaited"


# ------------------------------------------------------------------------------------------------ the error texts


ACCEPTS = "; accepts: text (string, required), times (integer), mood"


@pytest.mark.parametrize(
    ("request_", "kind", "content"),
    [
        (ToolCall("ecco", {}), "unknown_tool", "unknown tool 'ecco'; available: echo"),
        (ToolCall(["echo"], {}), "unknown_tool", "unknown tool list; available: echo"),
        (ToolCall(None, {}), "unknown_tool", "unknown tool None; available: echo"),
        (ToolCall(10**5000, {}), "unknown_tool", "unknown tool int; available: echo"),
        (ToolCall("", {}, error="the call is not JSON"), "malformed_call", "the call is not JSON"),
        (ToolCall("echo", {}), "invalid_arguments", f"echo: missing argument 'text'{ACCEPTS}"),
        (ToolCall("echo", {"text": 5}), "invalid_arguments", f"echo: argument 'text' must be string, not 5{ACCEPTS}"),
        (ToolCall("echo", {"text": "a", "time": 2}), "invalid_arguments",
         f"echo: unknown argument 'time' (did you mean 'times'?){ACCEPTS}"),
        (ToolCall("echo", {"text": "a", "mood": "mad"}), "invalid_arguments",
         f"echo: argument 'mood' must be one of 'glad', 'sad', not 'mad'{ACCEPTS}"),
        (ToolCall("echo", {"text": "a", "times": 0}), "invalid_arguments",
         f"echo: argument 'times' must have minimum 1, not 0{ACCEPTS}"),
        (ToolCall("echo", ["text"]), "invalid_arguments", f"echo: arguments must be an object{ACCEPTS}"),
    ],
)  # fmt: skip
def test_error_texts_say_what_is_wrong_and_what_is_right(request_, kind, content):
    result = asyncio.run(call_tool({"echo": Echo()}, request_, 1, 1000))
    assert (result.ok, result.error, result.content) == (False, ToolErrorKind(kind), f"error: {content}")


def test_quoted_model_output_is_short_and_on_one_line():
    result = call(Echo(), name="x\n" * 5000)
    assert len(result.content) < 100 and "\n" not in result.content
    result = call(Echo(), {"text": {"a": "b" * 5000}})
    assert len(result.content) < 200
    result = call(Echo(), error="line one\nline two " + "z" * 5000)
    assert len(result.content) <= 310 and "\n" not in result.content


def test_no_tools_at_all():
    result = asyncio.run(call_tool({}, ToolCall("echo"), 1, 100))
    assert result.content == "error: unknown tool 'echo'; available: none"


@pytest.mark.parametrize("exception", [ValueError, KeyError, RecursionError, MemoryError, StopIteration, SystemExit])
@pytest.mark.parametrize("is_async", [True, False])
def test_every_exception_becomes_a_tool_error(exception, is_async):
    def sync(args):
        raise exception("out of luck")

    async def asynchronous(args):
        raise exception("out of luck")

    result = call(make(asynchronous if is_async else sync))
    assert result.error is ToolErrorKind.TOOL_ERROR and result.content.startswith("error: it failed: ")
    assert "Traceback" not in result.content


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ZeroDivisionError("division by zero"), "error: it failed: division by zero"),
        (FileNotFoundError(2, "No such file", "/home/me/key"), "error: it failed: No such file"),
        (KeyError("rate"), "error: it failed: KeyError: 'rate'"),
        (ValueError("cannot read '/home/me/key', sorry"), "error: it failed: cannot read '(path)', sorry"),
        (ValueError(r"cannot read C:\Users\me\key"), "error: it failed: cannot read (path)"),
        (ValueError("see https://example.org/a and 1/2 or and/or"),
         "error: it failed: see https://example.org/a and 1/2 or and/or"),
        (ValueError("first\nsecond"), "error: it failed: first"),
        (ValueError(), "error: it failed: ValueError"),
        (TimeoutError("server busy"), "error: it failed: server busy"),
        (InvalidArgumentsError("x is too large"), "error: it: x is too large"),
    ],
)  # fmt: skip
def test_exception_texts_hold_no_paths(error, content):
    async def execute(args):
        raise error

    result = call(make(execute))
    assert result.content == content and (result.error == "invalid_arguments") == isinstance(
        error, InvalidArgumentsError
    )


@pytest.mark.parametrize("exception", [KeyboardInterrupt, asyncio.CancelledError])
def test_interruptions_pass_through(exception):
    async def execute(args):
        raise exception

    with pytest.raises(exception):
        call(make(execute))


def test_a_cancelled_episode_is_cancelled():
    async def main():
        task = asyncio.create_task(call_tool({"it": it}, ToolCall("it"), 5, 100))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    async def wait(args):
        await asyncio.sleep(5)

    it = make(wait)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


# --------------------------------------------------------------------------------------------- deadlines and sizes


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
    assert result.content == "error: it took longer than 0.05 s and was stopped" and result.seconds >= 0.045


def test_calls_that_hang_do_not_starve_the_others():
    """In asyncio's shared thread pool, forty hanging calls would hold every worker."""
    release, ended = threading.Event(), []
    tools = {"hang": make(lambda args: release.wait(100) and ended.append(1)), "quick": make(lambda args: "done")}

    async def main():
        await asyncio.gather(*(call_tool(tools, ToolCall("hang"), 0.05, 100) for _ in range(40)))
        return await call_tool(tools, ToolCall("quick"), 60, 100)

    assert asyncio.run(main()).content == "done"
    assert ended == []  # nor does asyncio.run wait for them at the end
    release.set()


def test_a_tool_that_finishes_after_its_deadline_disturbs_nobody():
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        release = threading.Event()
        result = await call_tool({"it": make(lambda args: release.wait(5))}, ToolCall("it"), 0.01, 100)
        release.set()
        await asyncio.sleep(0.05)  # long enough for the thread to hand in its late result
        return result

    assert asyncio.run(main()).error is ToolErrorKind.TIME_OUT
    assert complaints == []


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
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "time_out\n", "")


def test_a_tool_may_set_its_own_deadline():
    async def slow(args):
        await asyncio.sleep(5)

    assert call(make(slow, timeout_s=0.02)).error is ToolErrorKind.TIME_OUT


@pytest.mark.parametrize("max_chars", [0, 5, 40, 99, 100, 101])
def test_size_cap(max_chars):
    content = call(make(lambda args: "a" * 100), max_chars=max_chars).content
    assert len(content) == min(max_chars, 100)
    assert (content == "a" * 100) == (max_chars >= 100)
    if 40 <= max_chars < 100:
        assert content.endswith(" [cut off: 100 characters]")


def test_lone_surrogates_do_not_reach_the_tokenizer():
    assert call(Echo(), {"text": "a\ud800b"}).content == "a?b"
    call(Echo(), {"text": 1, "\ud800": 2}).content.encode()


# ------------------------------------------------------------------------------------------------------ properties

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
echo_like = st.dictionaries(st.sampled_from(["text", "times", "mood", "x"]), json_values, max_size=4)
ECHO = Echo()


@given(json_values | st.just("echo"), json_values | echo_like, st.none() | st.text(), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
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


EVIL = {"type": "string", "pattern": "^(a+)+$"}
STEP = {"$ref": "#/$defs/0"}
DOUBLING = {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)} | {"40": {"type": "string"}}
TREE = {"anyOf": [{"properties": {"x": {"$ref": "#/$defs/tree"}}, "required": [name]} for name in "bc"]}
DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.timeout(60)  # unbounded, these take minutes or for ever
@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"properties": {"x": STEP}, "$defs": DOUBLING}, "a", False),
        ({"properties": {"x": {**STEP, **DRAFT7}}, "$defs": DOUBLING, **DRAFT7}, "a", False),
        ({"properties": {"x": TREE}, "$defs": {"tree": TREE}}, functools.reduce(lambda x, _: {"x": x}, range(40), {}), False),
        ({"properties": {"x": {"items": {"enum": list(range(1500))}}}}, [-1] * 100_000, False),
        ({"properties": {"x": EVIL}}, "a" * 40 + "!", True),  # it is the server's to refuse
        ({"properties": {"x": EVIL}}, 7, False),
        ({"properties": {"x": {"propertyNames": EVIL}}}, {"a" * 40 + "!": 1}, True),
        ({"patternProperties": {EVIL["pattern"]: {}}, "additionalProperties": False}, "a" * 40 + "!", True),
        ({"properties": {"x": {"uniqueItems": True}}}, [n if n % 2 else str(n) for n in range(20_000)], True),
        ({"properties": {"pattern": {"type": "integer"}, "x": {}}, "additionalProperties": False, **DRAFT7}, 1, True),
    ],
    ids=["doubling", "dialect", "tree", "enum", "pattern", "type", "names", "pattern names", "unique", "a name"],
)  # fmt: skip
def test_the_check_of_a_strangers_schema_is_bounded(schema, value, fits):
    foreign = make(lambda args: "done", parameters={"type": "object", **schema}, foreign=True)
    result = call(foreign, {"x": value})
    assert result.error is (None if fits else ToolErrorKind.INVALID_ARGUMENTS)


def test_a_schema_of_ones_own_is_checked_whole():
    own = make(lambda args: "done", parameters={"type": "object", "properties": {"x": {"pattern": "^a+$"}}})
    assert call(own, {"x": "aa"}).ok and call(own, {"x": "b"}).error is ToolErrorKind.INVALID_ARGUMENTS


# ---------------------------------------------------------------------------------------------------- wrong tools


def nested(depth: int) -> dict:
    return functools.reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(depth), {})


@pytest.mark.parametrize("depth", [100, 10_000])
def test_a_schema_that_is_nested_too_deeply_is_refused_in_one_line(depth):
    for foreign in (False, True):
        with pytest.raises(
            ConfigError, match="tool .*(nested deeper than 64 levels|characters, and every prompt)"
        ) as said:
            make(lambda args: "", parameters=nested(depth), foreign=foreign)
        assert "\n" not in str(said.value) and len(str(said.value)) < 200
    assert make(lambda args: "", parameters=nested(30), foreign=True).schema()


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"name": "two words"}, "letters, digits"),
        ({"description": ""}, "has no description"),
        ({"parameters": {"type": "objekt"}}, "not a JSON schema"),
        ({"parameters": {"type": "string"}}, 'must have "type": "object"'),
    ],
)
def test_a_wrong_tool_is_refused_when_it_is_made(attributes, says):
    with pytest.raises(ConfigError, match=says):
        make(lambda args: "", **attributes)


# ---------------------------------------------------------------------------------------------------------- @tool


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
    nothing = {"type": "null"}
    assert convert.parameters == {
        "type": "object",
        "properties": {
            "amount": {"type": "number", "description": "How much, in the other currency, before fees."},
            "to": {"type": "string", "enum": ["EUR", "USD"], "description": "The currency wanted."},
            "digits": {"type": "integer", "description": "Decimals."},
            "notes": {"anyOf": [{"type": "array", "items": {"type": "string"}}, nothing], "description": "Remarks."},
            "table": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, nothing],
                "description": "Fees.",
            },
        },
        "required": ["amount", "to"],
        "additionalProperties": False,
    }


def test_a_function_tool_is_called_like_any_other_and_like_a_function():
    assert call(convert, {"amount": 2, "to": "EUR"}).content == "2.00 EUR"
    assert convert(2.5, "USD", digits=1) == "2.5 USD"
    assert call(convert, {"amount": 2, "to": "EUR", "notes": None, "table": {"x": 1}}).ok
    assert call(convert, {"amount": "2", "to": "EUR"}).content.startswith(
        "error: convert: argument 'amount' must be number, not '2'"
    )


def test_async_function_without_arguments():
    @tool
    async def now() -> str:
        """Tells the time."""
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert now.is_async and now.parameters["properties"] == {}
    assert call(now).content == threading.main_thread().name
    assert call(now, {"x": 1}).content == "error: now: unknown argument 'x'; accepts: no arguments"


DOCUMENTED = "Doubles.\n\nArgs:\n    x: A number.\n"


def plain(x: int): ...
def no_annotation(x): ...
def unknown_name(x: Nobody): ...  # noqa: F821
def bare_list(x: list): ...
def odd_type(x: complex): ...
def int_keys(x: dict[int, str]): ...
def star(*x: int): ...


@pytest.mark.parametrize(
    ("function", "doc", "says"),
    [
        (plain, None, "has no docstring!; write a docstring that says what it does"),
        (plain, "Args:\n    x: A number.\n", "write a docstring that says what it does"),
        (plain, "Doubles.", r"no description for the argument 'x'; write .* under 'Args:', a line 'name: \.\.\.'"),
        (plain, f"{DOCUMENTED}    y: Another.\n", "describes y, which it has no parameter for"),
        (no_annotation, DOCUMENTED, r"'x' has no type; annotate it \(for example x: str\)"),
        (unknown_name, DOCUMENTED, "an annotation cannot be resolved"),
        (bare_list, DOCUMENTED, "no JSON form; use str, int"),
        (odd_type, DOCUMENTED, "no JSON form; use str, int"),
        (int_keys, DOCUMENTED, "no JSON form; use str, int"),
        (star, DOCUMENTED, "cannot be given by name"),
    ],
)
def test_what_is_missing_is_refused_at_decoration(function, doc, says):
    function.__doc__ = doc
    with pytest.raises(ConfigError, match=says) as refused:
        tool(function)
    assert function.__name__ in str(refused.value)


# ---------------------------------------------------------------------------------------------- search, make_tools


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
    assert call(SearchTool(FakeSearcher(HITS), 3), {"q": "x"}).content == (
        "error: search: missing argument 'query'; accepts: query (string, required)"
    )


def test_make_tools():
    tools = make_tools(["search"], searcher=FakeSearcher(HITS), top_k=1)
    assert list(tools) == ["search"] and tools["search"].top_k == 1
    assert make_tools([]) == {}
    with pytest.raises(ConfigError, match=r"unknown tool 'serch' \(did you mean 'search'\?\); choose from .*search"):
        make_tools(["serch"])
    with pytest.raises(ConfigError, match="agent-r1 index"):
        make_tools(["search"])


def test_every_name_in_the_table_is_the_name_of_its_tool():
    for name in tables.names("tool"):
        assert make_tools([name], searcher=FakeSearcher([]), top_k=3)[name].name == name
