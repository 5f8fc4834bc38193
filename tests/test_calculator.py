"""The calculator agrees with Python on arithmetic, and what is none or too much ends in a sentence,
at once."""

from __future__ import annotations

import ast
import asyncio
import math
import operator
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.tool import InvalidArgumentsError, ToolCall, ToolErrorKind, call_tool, make_tools
from agent_r1.tool.calculator import MAX_BITS, MAX_EXPRESSION_CHARS, value_of, without_exponent

BINARY = [
    (ast.Add, operator.add),
    (ast.Sub, operator.sub),
    (ast.Mult, operator.mul),
    (ast.Div, operator.truediv),
    (ast.FloorDiv, operator.floordiv),
    (ast.Mod, operator.mod),
    (ast.Pow, operator.pow),
]
UNARY = [(ast.UAdd, operator.pos), (ast.USub, operator.neg)]
FUNCTIONS = [
    ("abs", 1, abs),
    ("sqrt", 1, math.sqrt),
    ("floor", 1, math.floor),
    ("max", 2, max),
    ("gcd", 2, math.gcd),
]

numbers = st.integers(0, 99) | st.floats(0, 99).map(lambda x: round(x, 2))
leaves = numbers.map(lambda n: (ast.Constant(n), lambda: n))


def grown(inner):
    """Expressions of `inner` ones: a syntax tree, and beside it what Python itself makes of the
    operands."""
    unary = st.builds(
        lambda op, a: (ast.UnaryOp(op[0](), a[0]), lambda: op[1](a[1]())),
        st.sampled_from(UNARY),
        inner,
    )
    binary = st.builds(
        lambda op, a, b: (ast.BinOp(a[0], op[0](), b[0]), lambda: op[1](a[1](), b[1]())),
        st.sampled_from(BINARY), inner, inner,
    )  # fmt: skip
    called = st.sampled_from(FUNCTIONS).flatmap(
        lambda f: st.lists(inner, min_size=f[1], max_size=f[1]).map(
            lambda parts: (
                ast.Call(ast.Name(f[0]), [p[0] for p in parts], []),
                lambda: f[2](*(p[1]() for p in parts)),
            )
        )
    )
    return unary | binary | called


@given(st.recursive(leaves, grown, max_leaves=8))
def test_the_value_is_pythons_own(expression):
    tree, compute = expression
    text = ast.unparse(tree)
    powers = sum(isinstance(node, ast.Pow) for node in ast.walk(tree))
    if (
        powers > 1 or len(text) > MAX_EXPRESSION_CHARS
    ):  # 99 ** 99 ** 99 is for the other tests: Python would not come back
        return
    try:
        wanted = compute()
        if isinstance(wanted, complex) or not math.isfinite(wanted):
            raise OverflowError
    except (ArithmeticError, ValueError, TypeError):
        with pytest.raises(InvalidArgumentsError):
            value_of(text)
        return
    try:
        found = value_of(text)
    except InvalidArgumentsError:
        assert powers  # an intermediate value was beyond the bounds, or complex
        return
    assert found == wanted and type(found) is type(wanted)


@given(st.integers(-(2**1000), 2**1000) | st.floats(-1e300, 1e300))
def test_a_number_is_written_with_digits_and_a_point(value):
    text = without_exponent(value)
    assert set(text) <= set("-.0123456789")
    assert float(text) == pytest.approx(value, rel=1e-14, abs=0) and (
        isinstance(value, float) or int(text) == value
    )


@given(st.text("0123456789.+-*/%()[]{}, ^=<>!&|~xeipqrtsnlogmaf_'\"\\\n;:@é\x00", max_size=60))
def test_any_text_has_a_number_or_a_sentence(text):
    try:
        assert math.isfinite(value_of(text))
    except InvalidArgumentsError as error:
        assert str(error) and "\n" not in str(error)


HOSTILE = [
    "10**10**10",
    "9**9**9**9",
    "2**99999",
    "2**2**20",
    "(-3)**10**9",
    "factorial(10**9)",
    "factorial(171)",
    "10**300*10**300",
    "round(1, -10**9)",
    "round(1, 10**9)",
    "1e308*10",
    "9" * 499,
    "(" * 249 + "1" + ")" * 249,
    "-" * 499 + "1",
    "+".join("1" * 250),
    "factorial(factorial(9))",
    "1e999",
    "exp(1000)",
    "0.1**-400",
    "0**-1",
    "1/0",
    "1//0.0",
    "5%0",
    "(-8)**0.5",
    "sqrt(-1)",
    "log(0)",
    "1" * (MAX_EXPRESSION_CHARS + 1),
    "1" * 10_000_000,
    "",
    "  ",
    "\x00",
    "3j",
    "True",
    "'a'*10**9",
    "[1]*10**9",
    "().__class__",
    "__import__('os').system('true')",
    "abs.__self__",
    "open('x')",
    "(lambda: 1)()",
    "[x for x in (1,)]",
    "max(*[1, 2])",
    "max(key=abs)",
    "1 if 1 else 2",
    "x := 3",
    "1 < 2",
    "a.b",
    "max()",
    "1 and 2",
    "~1",
    "1 << 9999",
    "1 @ 2",
    "f'{1}'",
    "...",
    "12,000 * 2",
    "2 ^ 3",
    "x = 3",
    "foo(1)",
    "\ud800",
]
CHILD = """
import ast, sys
from agent_r1.tool.calculator import value_of, InvalidArgumentsError
for text in ast.literal_eval(sys.stdin.read()):
    try:
        print("VALUE", value_of(text))
    except InvalidArgumentsError as error:
        print("no:", error)
"""


def test_hostile_expressions_end_within_bounds():
    """In a process that is killed if it takes more than 20 seconds of processor time or 4 GB: all
    of them together."""

    def limits():
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))

    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=ascii(HOSTILE),
        capture_output=True,
        text=True,
        preexec_fn=limits,
    )
    assert done.returncode == 0, done.stderr[-500:]
    answers = done.stdout.splitlines()
    assert len(answers) == len(HOSTILE)
    assert not [
        (text, answer)
        for text, answer in zip(HOSTILE, answers, strict=True)
        if not answer.startswith("no: ")
    ]


def test_it_is_a_tool():
    tools = make_tools(["calculator"])

    def told(**arguments):
        return asyncio.run(call_tool(tools, ToolCall("calculator", arguments), 5, 1000))

    assert told(expression="(17 * 23 + 4) / 5").content == "79"
    assert told(expression="0.1 + 0.2").content == "0.3"
    assert told(expression="1 / 3").content == "0.333333333333333"
    assert (
        told(expression="2 ** 60 / 1").content == str(2**60)
        and told(expression="10.0 ** 24").content == "1" + 24 * "0"
    )
    assert (
        told(expression="1 / 10 ** 9").content == "0.000000001"
        and told(expression="-0.0").content == "0"
    )
    assert value_of(f"2 ** {MAX_BITS - 1}") == 2 ** (
        MAX_BITS - 1
    )  # the last power of two that is in
    assert told(expression="1 / 0").content == "error: calculator: division by zero"
    assert told(expression="1 / 0").error is ToolErrorKind.INVALID_ARGUMENTS
    assert told(expr="1").error is ToolErrorKind.INVALID_ARGUMENTS
