"""answers.yaml: kinds of targets, other ways to write each, and near misses that earn nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import yaml

from agent_r1_recipes.code.sandbox import Sandbox
from agent_r1_recipes.math.math_inside import same
from agent_r1_recipes.math.maths import MathWorker
from agent_r1_recipes.math.notation import read

KINDS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))
FORMATS = [
    "**{}**",
    "{{{}}}",
    "\\boxed{{{}}}",
    "\\textbf{{{}}}",
    "\\text{{{}}}",
    "\\mathbf{{{}}}",
    "`{}`",
    " {}. ",
    "\\( {} \\)",
    "$${}$$",
]
SENTENCES = ["The answer is {}", "{} is the answer", "{} \\text{{ is the "
    "answer}}", "{} or 9999", "9999 or {}",
             "{}, 9999", "not {}", "{} because it fits", "\\boxed{{{}}} "
                 "\\boxed{{9999}}"]  # fmt: skip
NOUNS = """eggs books people pages weeks cats tickets pieces apples miles hours cents dollars coins
    boxes litres glasses knights jabłek яблок"""
WORDS = NOUNS.split()  # nothing that multiplies, such as dozens


def test_there_are_many_kinds_and_each_has_near_misses():
    assert len({kind["target"] for kind in KINDS}) == len(KINDS) >= 100
    assert all(kind["right"] and len(kind["wrong"]) > 1 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=[kind["target"] for kind in KINDS])
def test_a_kind_of_target(kind):
    target = kind["target"]
    for answer in [target, *kind["right"]]:
        assert same(answer, target), answer
    for answer in kind["wrong"]:
        assert not same(answer, target), answer


def test_formatting_changes_nothing_and_a_sentence_everything():
    """One format and one sentence for each kind, in turn, so that all pairs of both are met over
    time."""
    for number, kind in enumerate(KINDS):
        target = kind["target"]
        formatted = FORMATS[number % len(FORMATS)].format(target)
        assert same(formatted, target), formatted
        quoted = SENTENCES[number % len(SENTENCES)].format(target)
        assert not same(quoted, target), quoted


@pytest.mark.parametrize("value", ["18", "-3.5", "\\frac{3}{4}", "2\\sqrt{3}", "1 1/2"])
def test_one_rule_for_all_words(value):
    for index, word in enumerate(WORDS):
        other = WORDS[index - 1]
        for form in ("{} {}", "{}\\text{{ {}}}", "${}$ {}", "{} \\mathrm{{{}}}", "**{}** {}"):
            written = form.format(value, word)
            assert same(written, value), written
            assert same(value, written), written
            assert same(f"{value} {word}", written), written
            assert not same(f"{value} {other}", written), written


def test_numbers_are_compared_exactly():
    draw = random.Random(0)
    for _ in range(300):
        digits = f"{draw.randrange(10**6)}.{draw.randrange(10**9)}1"
        last = "2" if digits[-1] == "1" else "1"
        assert same(digits, digits) and same(f"{digits}0", digits)
        assert not same(digits[:-1] + last, digits) and not same(digits[:-1], digits)
        assert not same(f"-{digits}", digits) and not same(digits.replace(".", ""), digits)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_no_string_is_right_for_two_of_the_targets(part):
    """Each near miss is right for itself, so its target must be wrong for it; or both are equal."""
    equal = {
        "146/2",
        "70 + 3",
        "\\frac{73}{1}",
        "1-4",
        "1-1",
        "10^3",
        "2.5\\times10^{12}",
        "1/2",
        "15/4",
        "3 3/4",
        "-1/4",
        "2/4",
        "1:2",
        "6/8",
        "-14/10",
        "2/6",
        "1 2/4",
        "6/4",
        "22/8",
        "x-5 = 0",
        "x = 10/2",
        "y-2x=1",
    }
    for kind in KINDS:
        for miss in kind["wrong"][part::4]:
            if miss not in equal and "\\boxed" not in miss:
                assert same(miss, miss) and not same(kind["target"], miss), miss


def test_the_process_in_the_sandbox_reads_the_same():
    worker = MathWorker(Sandbox())
    assert worker.same("18 eggs", ["18"]) and worker.same("10:30 a.m.", ["10:30 \\text{ AM}"])
    assert not worker.same("18 eggs", ["18 cats"])


def test_hostile_text_costs_no_time():
    """Patterns that try every split would take minutes for 300 characters, the longest answer."""
    texts = ("a ", "1 ", "{", "\\text{", "a-", "**", "5 a/", "\\text{a}", "a^2 ", "1,", "$", "x=")
    start = time.process_time()
    for text in texts:
        read((text * 300)[:300])
        read("7 " + (text * 300)[:298])
    assert time.process_time() - start < 2
