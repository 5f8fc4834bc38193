"""The tests themselves: none of them holds a wall-clock time against a limit, since another machine is slower or busy."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

CLOCKS = {"perf_counter", "monotonic", "process_time", "thread_time", "time", "getrusage"}
FILES = sorted(Path(__file__).parent.glob("*.py"))


def timed_asserts(source: str) -> list[int]:
    """Lines of the `assert`s that look at a difference of two readings of a clock, or at a name that holds one.

    A deadline of a wait, `assert time.monotonic() < deadline`, is none: it has no difference in it.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        readings, spans = set(), set()

        def mentions(node: ast.AST, names: set[str], clocks: bool = False) -> bool:
            return any(
                (isinstance(n, ast.Name) and n.id in names)
                or (clocks and isinstance(n, ast.Call) and getattr(n.func, "attr", "") in CLOCKS)
                for n in ast.walk(node)
            )

        def is_span(node: ast.AST, readings: set[str] = readings, spans: set[str] = spans, mentions=mentions) -> bool:
            differences = [n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub)]
            return mentions(node, spans) or any(mentions(n, readings, clocks=True) for n in differences)

        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
                if is_span(node.value):
                    spans |= names
                elif mentions(node.value, set(), clocks=True):
                    readings |= names
        found += [node.lineno for node in ast.walk(function) if isinstance(node, ast.Assert) and is_span(node.test)]
    return sorted(set(found))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_test_asserts_a_time(path):
    assert timed_asserts(path.read_text()) == []


def test_a_time_is_recognised():
    assert timed_asserts("def f():\n  a = time.perf_counter()\n  b()\n  assert time.perf_counter() - a < 5") == [4]
    assert timed_asserts("def f():\n  a = t.monotonic()\n  b = t.monotonic() - a\n  assert b < 5") == [4]
    assert timed_asserts("def f():\n  limit = t.monotonic() + 60\n  while x():\n    assert t.monotonic() < limit") == []


@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning])
def test_a_warning_of_our_own_modules_is_an_error(kind):
    with pytest.raises(kind):
        warnings.warn_explicit("ours", kind, "ours.py", 1, module="agent_r1.rollout.decoder")
    if kind is DeprecationWarning:
        warnings.warn_explicit("theirs", kind, "theirs.py", 1, module="somebody.else")
