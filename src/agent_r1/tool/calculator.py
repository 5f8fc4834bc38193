"""Compute arithmetic, and nothing else that Python can do.

In: an expression. Out: its value as text.

An agent writes the expression, so it may be anything. It is parsed to a syntax tree, and only nodes
in the tables below are computed, never `eval`. The cost is limited as well: `9**9**9` would fill
the memory. So a whole number may not exceed a float's range (2**1024, about 1.8e308), and a power
or factorial is refused *before* it is computed. With at most `MAX_EXPRESSION_CHARS`, every call
takes about a millisecond at most, so it runs in the event loop instead of a thread.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from agent_r1.tool.base import BaseTool, InvalidArgumentsError

Number = int | float

MAX_EXPRESSION_CHARS = 500
MAX_EXPRESSION_DEPTH = 200  # nested operations and brackets
MAX_BITS = 1024  # of a whole number
TOO_LARGE = "the result is too large; numbers go up to about 1.8e308"
EXAMPLE = "write numbers, + - * / // % **, brackets and functions, for example (3 + 4) * sqrt(2)"


def value_of(expression: str) -> Number:
    """Compute the value as Python would. Raise InvalidArgumentsError, in words for the agent."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise InvalidArgumentsError(
            f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARS}; "
            "take smaller steps"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    # A null byte; a thousand brackets.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        hint = EXAMPLE
        if "=" in expression:
            hint = "leave out = and what stands before or after it"
        raise InvalidArgumentsError(f"this is no expression; {hint}") from None
    try:
        return _value(tree.body, MAX_EXPRESSION_DEPTH)
    except ZeroDivisionError:
        raise InvalidArgumentsError("division by zero") from None
    except OverflowError:
        raise InvalidArgumentsError(TOO_LARGE) from None
    except (ValueError, TypeError) as error:  # sqrt(-1), sin(1, 2), factorial(1.5)
        if isinstance(error, InvalidArgumentsError):
            raise
        raise InvalidArgumentsError(f"{error}; {EXAMPLE}") from None


class Calculator(BaseTool):
    """Compute arithmetic: whole numbers exactly, others to 15 digits, never with an exponent."""

    name = "calculator"
    description = "Compute the value of an arithmetic expression."
    parameters = {
        "type": "object",
        "properties": {
            "expression": {
                "type": "string",
                "description": "For example (3 + 4) * 2**10 / sqrt(2).",
            },
        },
        "required": ["expression"],
        "additionalProperties": False,
    }

    async def execute(self, args: dict[str, Any]) -> str:
        return without_exponent(value_of(args["expression"]))


def make(**_: Any) -> Calculator:
    """Make the tool, for `make_tools`; it needs no resources of a run."""
    return Calculator()


def without_exponent(value: Number) -> str:
    """Write a number without an exponent.

    The reward would read 2.5e+12 as a product with Euler's e.
    """
    # Floats represent powers of ten exactly up to 1e22.
    if value == int(value) and abs(value) < 1e22:
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    return format(Decimal(f"{value:.15g}"), "f")


# --------------------------------------------------------------------------------- what is computed


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent > 0 and abs(base) > 1 and (base.bit_length() - 1) * exponent > MAX_BITS:
        raise OverflowError
    return base**exponent


def _factorial(n: Number) -> int:
    if n > 170:  # 171! exceeds every float
        raise OverflowError
    return math.factorial(n)


def _round(number: Number, digits: int = 0) -> Number:
    if abs(digits) > 400:  # round(1, -10**9) computes 10**10**9
        raise ValueError("round takes up to 400 digits")
    if not digits:  # an integer, also of a float
        return round(number)
    return round(number, digits)


OPERATORS: dict[type, Callable[..., Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs, "min": min, "max": max, "round": _round, "floor": math.floor, "ceil": math.ceil,
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "factorial": _factorial, "gcd": math.gcd,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


def _value(node: ast.expr, room: int) -> Number:
    """Compute a node whose parts may be nested `room` deep."""
    if room == 0:
        raise InvalidArgumentsError(
            f"more than {MAX_EXPRESSION_DEPTH} operations within one another; take smaller steps"
        )
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            result = value
        case ast.Name(name) if name in CONSTANTS:
            result = CONSTANTS[name]
        case ast.UnaryOp(op, inner) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(inner, room - 1))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(left, room - 1), _value(right, room - 1))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            result = FUNCTIONS[name](*[_value(argument, room - 1) for argument in arguments])
        case _:
            raise InvalidArgumentsError(_explanation(node))
    if isinstance(result, complex):
        raise InvalidArgumentsError("the result is no real number")
    if isinstance(result, int) and result.bit_length() > MAX_BITS or not math.isfinite(result):
        raise OverflowError
    return result


def _explanation(node: ast.expr) -> str:
    """Explain what is not computed and what to write instead, for a model's usual mistakes."""
    match node:
        case ast.BinOp(op=ast.BitXor()):
            return "^ is not computed; write ** for a power"
        case ast.Tuple():
            return "a comma separates the arguments of a function only; write 12000 for 12,000"
        case ast.Name(name) | ast.Call(ast.Name(name)):
            names = ", ".join([*FUNCTIONS, *CONSTANTS])
            return f"{name[:40]!r} is not known; known are {names}"
    return f"that is no arithmetic; {EXAMPLE}"
