"""The reward `code`: a program is right where all tests pass, and a test has one of two forms."""

from __future__ import annotations

import json

import pytest

from agent_r1_recipes.code.programs import passes_tests
from agent_r1_recipes.code.sandbox import Sandbox

MEAN = ["assert mean([1, 2]) == 1.5", "assert mean([3]) == 3.0", "assert mean([]) == None"]
SUM = [json.dumps({"input": "1 2\n", "output": "3\n"}), json.dumps({"input": "5 5\n", "output": "10"})]


SILENT = [json.dumps({"input": "", "output": ""})]
MBPP = [
    "assert set(f((4, 5, 4))) == set((5, 4))", "assert sorted(f([2, 1])) == sorted((1, 2))", "assert f(()) == tuple()",
    "assert not f(0)", "assert f(3)", "assert math.isclose(f(61.78), 61.8, rel_tol=0.001)", "assert abs(f(3.1) - 3.14) < 0.05",
    "assert f(None) is None", "assert f(True) is True", "assert 6 == f(6)", "assert f(7.0) == 7",
]  # fmt: skip


@pytest.fixture(scope="module")
def wall():
    return Sandbox()


@pytest.mark.parametrize(
    "code, tests, right",
    [
        ("def mean(x):\n    return sum(x) / len(x) if x else None", MEAN, True),
        ("```python\ndef mean(x):\n    print('hm')\n    return sum(x) / len(x) if x else None\n```", MEAN, True),
        ("def mean(x):\n    return sum(x) / len(x)", MEAN, False),
        ("def mean(x):\n    return sum(x) // len(x) if x else None", MEAN, False),
        ("def mean(x): return", MEAN, False),
        ("", MEAN, False),
        ("mean = (", MEAN, False),
        ("print(sum(map(int, input().split())))", SUM, True),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit()", SUM, True),
        ("print(3)", SUM, False),
        ("raise ValueError", SUM, False),
        ("pass", SILENT, True),
        ("1/0", SILENT, False),
        ("raise SystemExit(1)", SILENT, False),
        ("def f(x): return x", MBPP, True),
        ("def f(x): return str(x)", MBPP, False),
        ("def f(x): return 1", MBPP, False),
        ("def f(x): return 10 ** 400", MBPP, False),
        ("class E(int):\n    __repr__ = lambda self: 'E'\ndef f(x): return E(x) if type(x) is int else x", MBPP, False),
    ],
)
def test_a_program_is_right_where_all_tests_pass(wall, code, tests, right):
    assert passes_tests(code, tests, wall) is right


@pytest.mark.parametrize(
    "test",
    [
        "mean(1)",
        "assert mean(1) < 2",
        "assert f(1) == g(1)",
        "import os",
        '{"input": 1}',
        "{",
        "",
        "assert all([f(1) == 2])",
        "assert f(1) == 2 and f(2) == 3",
        "assert not f(1) == 2",
        "assert math.isclose(f(1), g(1))",
        "assert isinstance(f(1), int)",
        "assert math.isclose(f(1), 2, abs=1)",
        "assert f(1) == set(f(2))",
    ],  # fmt: skip
)
def test_what_is_no_test_is_said(wall, test):
    with pytest.raises(ValueError, match="is not a test; write assert CALL == LITERAL"):
        passes_tests("x = 1", [test], wall)
    with pytest.raises(ValueError, match="some of one kind"):
        passes_tests("x = 1", [*MEAN, *SUM], wall)
