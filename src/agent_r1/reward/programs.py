"""Programs: does the code do what the tests say? In: code and tests. Out: 1 or 0.

A test is `assert CALL == LITERAL` (as MBPP has them), or {"input": ..., "output": ...} as JSON (as APPS has them). What is right
never enters the sandbox. There, a harness makes the calls and prints what they return; the comparison is made here. So a program
that ends early, prints "passed", or redefines equality has answered nothing.
"""

from __future__ import annotations

import ast
import json
import math
from typing import Any

from agent_r1.tool.python import Runner, without_fence

WITHIN_S = 5.0

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
    try:
        told(source, {{"__name__": "__main__"}})
    except SystemExit:
        pass
    except Exception:
        sys.stdout = io.StringIO()
    results.append(sys.stdout.getvalue())
print("\\n" + json.dumps(results), file=shown)
"""
"""Runs in the sandbox and nowhere else."""


def passes(code: str, tests: list[str], runner: Runner) -> bool:
    """Whether all tests pass. Raises ValueError where a test is none; AgentR1Error where the sandbox fails."""
    calls, inputs, wanted = [], [], []
    for test in tests:
        call, value = _call(test)
        (calls if call else inputs).append(call or value["input"])
        wanted.append(value if call else value["output"])
    if not tests or calls and inputs:
        raise ValueError("tests of a program are asserts, or inputs with outputs: some of one kind")
    ran = runner.run(HARNESS.format(facts=json.dumps([without_fence(code), calls, inputs])), WITHIN_S)
    try:
        found = json.loads(ran.output.rstrip().splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return False
    if not isinstance(found, list) or len(found) != len(wanted):
        return False
    compare = _equal if calls else _same_output
    return all(compare(one, right) for one, right in zip(found, wanted, strict=True))


def _call(test: str) -> tuple[str, Any]:
    """(the call, its value) of an assert; ("", the pair) of an input with its output."""
    try:
        if test.lstrip().startswith("{"):
            pair = json.loads(test)
            if set(pair) == {"input", "output"} and all(isinstance(text, str) for text in pair.values()):
                return "", pair
        match ast.parse(test.strip()).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                return ast.unparse(left), ast.literal_eval(right)
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f'{test[:80]!r} is no test; write assert CALL == LITERAL, or {{"input": "...", "output": "..."}}')


def _equal(found: Any, right: Any) -> bool:
    """Whether the written value `found` is that literal. Of floats the first nine digits count."""
    try:
        value = ast.literal_eval(found)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    if isinstance(right, float) and isinstance(value, int | float):
        return math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-12)
    return type(value) is type(right) and value == right


def _same_output(found: Any, right: str) -> bool:
    return isinstance(found, str) and [line.rstrip() for line in found.strip().splitlines()] == [
        line.rstrip() for line in right.strip().splitlines()
    ]
