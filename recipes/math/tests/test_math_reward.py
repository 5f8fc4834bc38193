"""Answers of mathematics are compared by value, within a deadline, and an answer is never
computed."""

from __future__ import annotations

import pytest

from agent_r1_recipes.code.sandbox import Sandbox
from agent_r1_recipes.math import maths
from agent_r1_recipes.math.maths import MathWorker


@pytest.fixture(scope="module")
def worker():
    return MathWorker(Sandbox())


@pytest.mark.parametrize(
    "answer, target, right",
    [
        ("395", "395", True),
        ("395.0", "395", True),
        (" $395$ ", "395", True),
        ("\\boxed{395}", "395", True),
        ("395.", "395", True),
        ("$395.$", "395", True),
        ("\\boxed{395}.", "395", True),
        ("395\\text{ cm}^2", "395", True),
        ("50%", "50", True),
        ("50\\%", "50%", True),
        ("50", "50\\%", True),
        ("2.5e+12", "2500000000000", True),
        ("50%", "0.5", False),
        ("395", "39.5", False),
        ("0.5", "\\frac{1}{2}", True),
        ("1/2", "\\frac{1}{2}", True),
        ("-\\frac12", "-1/2", True),
        ("3/2", "1\\frac{1}{2}", True),
        ("-3", "-3", True),
        ("1,000", "1000", True),
        ("1{,}450{,}000", "1450000", True),
        ("11,\\! 025", "11025", True),
        ("a^" * 20 + "a", "395", False),
        ("|" * 90 + "395", "395", False),
        ("\\sin " * 9 + "395", "395", False),
        ("x = 7", "7", True),
        ("x^2 - 1", "(x-1)(x+1)", True),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("1/2", "0.5", False),
        ("790/2", "395", False),
        ("\\frac{790}{2}", "395", False),
        ("x = 790/2", "395", False),
        ("{790 \\over 2}", "395", False),
        ("391 4", "395", False),
        ("\\binom{6}{2}", "15", False),
        ("2/4", "\\frac{1}{2}", False),
        ("395\\text{ or 391}", "395", False),
        ("\\boxed{395} or 391", "395", False),
        ("(1, 2)", "(1, 2)", True),
        ("\\{1, 2\\}", "(1, 2)", False),
        ("2, 1", "(1, 2)", False),
        ("(1, 2)", "\\{1, 2\\}", False),
        ("394", "395", False),
        ("391+4", "395", False),
        ("391 = 395", "395", False),
        ("391, 395", "395", False),
        ("391 or 395", "395", False),
        ("", "395", False),
        ("\\boxed{391} \\boxed{395}", "395", False),
        ("it is 395", "395", False),
        ("[0, 1000]", "395", False),
        ("__import__('os').getpid()", "395", False),
        ("\ud800", "395", False),
        ("3" * 301, "3" * 301, False),
        ("395", "no number at all \\frac{", False),
    ],
)
def test_equal_is_equal_however_it_is_written(worker, answer, target, right):
    assert worker.same(answer, [target]) is right
    assert worker.same(answer, ["12345", target]) is right


def test_an_answer_that_takes_forever_costs_its_deadline_and_nothing_else(worker, monkeypatch):
    monkeypatch.setattr(maths, "EQUALITY_TIMEOUT_S", 1.0)
    before = worker._talk
    assert worker.same(r"(x+\sqrt{2})^{9999}", [r"(x+\sqrt{3})^{9999}"]) is False  # more than 20 s
    assert worker.same("395", ["395"]) is True and worker._talk is not before


def test_brackets_cost_no_time(worker, monkeypatch):
    """290 of them took 8 s, one answer at a time for all episodes. A deadline that is too short for
    the parser shows who parses."""
    worker.same("1", ["1"])
    monkeypatch.setattr(maths, "EQUALITY_TIMEOUT_S", 0.0)
    before = worker._talk
    for answer in ("(" * 290, "(" * 140 + "395" + ")" * 140, "{" * 8 + "395" + "}" * 8, "[" * 7):
        assert worker.same(answer, ["395"]) is False
    assert worker._talk is before  # the process is replaced after an answer that was late
