"""Reward a program that passes its tests. In: code and tests. Out: 1 or 0.

A test is an assert as in MBPP, or {"input": ..., "output": ...} as JSON, as in APPS.

    assert CALL == LITERAL        also set(CALL) == set(LITERAL), and so on; LITERAL == CALL; CALL is None
    assert CALL, assert not CALL
    assert math.isclose(CALL, NUMBER, rel_tol=...), assert abs(CALL - NUMBER) < NUMBER

The expected values never enter the sandbox. In it a harness makes the calls and prints their results; they are
compared here. So a program that exits early, prints "passed", or redefines equality gets nothing.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import json
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from agent_r1 import Row
from agent_r1_recipes.code.python import Runner, make_runner, without_fence
from agent_r1_recipes.code.settings import CodeSettings

PROGRAM_TIMEOUT_S = 5.0

HARNESS = """
import io, json, sys
source, calls, inputs = json.loads({facts!r})
shown, results, sys.stdout = sys.stdout, [], io.StringIO()

def told(text, space):
    exec(compile(text, "<solution>", "exec"), space)
    return space

if calls:
    space = told(source, {{"__name__": "solution"}})
    for call in calls:
        try:
            results.append(repr(eval(call, dict(space))))
        except Exception:
            results.append(None)
for given in inputs:
    sys.stdin, sys.stdout = io.StringIO(given), io.StringIO()
    printed, crashed = sys.stdout, False
    try:
        told(source, {{"__name__": "__main__"}})
    except SystemExit as end:
        crashed = end.code not in (None, 0)
    except Exception:
        crashed = True
    results.append(None if crashed else printed.getvalue())
print("\\n" + json.dumps(results), file=shown)
"""
"""Runs in the sandbox and nowhere else."""


def passes_tests(code: str, tests: list[str], runner: Runner) -> bool:
    """Return whether all tests pass. Raises ValueError for a malformed test.

    Raises AgentR1Error if the sandbox fails.
    """
    calls, inputs, checks = taken_apart(tests)
    ran = runner.run(HARNESS.format(facts=json.dumps([without_fence(code), calls, inputs])), PROGRAM_TIMEOUT_S)
    try:
        found = json.loads(ran.output.rstrip().splitlines()[-1])
        if not isinstance(found, list) or len(found) != len(checks):
            return False
        values = map(ast.literal_eval, found) if calls else found
        return all(check(value) for check, value in zip(checks, values, strict=True))
    except (ValueError, IndexError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
        return False  # not a literal: a program may print anything


def taken_apart(tests: list[str]) -> tuple[list[str], list[str], list[Callable[[Any], bool]]]:
    """Separate calls and inputs for the program from the checks of its results. Raises ValueError."""
    calls, inputs, checks = [], [], []
    for test in tests:
        call, given, check = _test(test)
        (calls if call else inputs).append(call or given)
        checks.append(check)
    if not tests or calls and inputs:
        raise ValueError("tests of a program are asserts, or inputs with outputs: some of one kind")
    return calls, inputs, checks


def _test(test: str) -> tuple[str, str, Callable[[Any], bool]]:
    """(call, input, check): the call of an assert, or else an input."""
    try:
        if test.lstrip().startswith("{"):
            pair = json.loads(test)
            if set(pair) == {"input", "output"} and all(isinstance(text, str) for text in pair.values()):
                return "", pair["input"], partial(_same_output, right=pair["output"])
        match ast.parse(test.strip()).body:
            case [ast.Assert(test=claim)]:
                call, check = _claim(claim)
                return ast.unparse(call), "", check
    except (SyntaxError, ValueError, TypeError, RecursionError):
        pass
    raise ValueError(
        f'{test[:80]!r} is not a test; write assert CALL == LITERAL, or {{"input": "...", "output": "..."}} (docs/safety.md)'
    )


def _claim(claim: ast.expr) -> tuple[ast.expr, Callable[[Any], bool]]:
    """Return the call of an assert, and the check of its value. Raises ValueError for other forms."""
    match claim:
        case ast.Call(ast.Attribute(ast.Name("math"), "isclose") | ast.Name("isclose"), [call, number], keywords):
            if all(keyword.arg in ("rel_tol", "abs_tol") for keyword in keywords):
                return call, partial(_close, right=_number(number), **{k.arg: _number(k.value) for k in keywords})
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub(), number)]), [ast.Lt() | ast.LtE()], [most]
        ):
            return call, partial(_close, right=_number(number), rel_tol=0.0, abs_tol=_number(most))
        case ast.Compare(left, [ast.Eq() | ast.Is()], [right]):
            with contextlib.suppress(ValueError):
                return left, partial(_equal, right=_literal(right))
            return right, partial(_equal, right=_literal(left))
        case ast.UnaryOp(ast.Not(), ast.Call(function) as call) if not _builtin(function):
            return call, operator.not_
        case ast.Call(function) if not _builtin(function):
            return claim, bool
    raise ValueError


def _builtin(function: ast.expr) -> bool:
    """Return whether it is a builtin such as all(...).

    The expected value would be among its arguments, and enter the sandbox.
    """
    return isinstance(function, ast.Name) and hasattr(builtins, function.id)


COLLECTIONS = {"set": set, "tuple": tuple, "list": list, "sorted": sorted, "dict": dict}


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of a collection such as set((1, 2)). Raises ValueError."""
    match node:
        case ast.Call(ast.Name(name), arguments, []) if name in COLLECTIONS:
            return COLLECTIONS[name](*map(_literal, arguments))
    return ast.literal_eval(node)


def _number(node: ast.expr) -> float:
    if type(value := _literal(node)) not in (int, float):
        raise ValueError
    return value


def _equal(value: Any, right: Any) -> bool:
    """Return whether the value equals the literal; floats by their first nine digits."""
    if type(value) is not type(right):
        return type(value) in (int, float) and type(right) in (int, float) and _close(value, right, abs_tol=1e-12)
    return _close(value, right, abs_tol=1e-12) if type(right) is float else value == right


def _close(value: Any, right: float, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> bool:
    return type(value) in (int, float) and math.isclose(value, right, rel_tol=rel_tol, abs_tol=abs_tol)


def _same_output(found: Any, right: str) -> bool:
    return isinstance(found, str) and [line.rstrip() for line in found.strip().splitlines()] == [
        line.rstrip() for line in right.strip().splitlines()
    ]


async def reward(answer: str, targets: list[str], row: Row, config: CodeSettings) -> float:
    """Pay 1 for a program that passes the question's tests."""
    return await asyncio.to_thread(passes_tests, answer, targets, make_runner(config))
