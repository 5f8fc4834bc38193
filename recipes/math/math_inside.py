"""Compare answers with the right number, expression, equation or set, inside a sandbox.

JSON line by line: [answer, targets] in, true or false out. `maths.py` asks, and sends this file and
`notation.py`. It needs a sandbox because sympy's parser calls `eval`, and because a short
expression can take forever.
"""

import itertools
import json
import logging
import re
import sys
from fractions import Fraction
from math import gcd
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, FiniteSet, Float, Interval, MatrixBase, Mul, Number, Rational, Symbol, Tuple

from agent_r1_recipes.math.notation import (
    NO_UNITS_IN_SENTENCES,
    ROMAN,
    SERIES,
    has_finite_decimal,
    is_rounded,
    normal,
    number,
    numbers_and_words,
    quantities,
    read,
    with_base,
)

BOX_EXTRACTION = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        # Units are split off in notation.py: math-verify takes the `t` of 3t for one.
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        ),
    )
]
TEX_SIGN = re.compile(r"[\\^_|(\[{=]")
NUMERAL = re.compile(r"\d[\d,.]*|\.\d+")
FRACTION = re.compile(
    r"[-+]?(?:\d*\s*\\frac\s*\{?\s*[-+]?(\d+?)\s*\}?\s*\{?\s*(\d+)\s*\}?|(\d+)\s*/\s*(\d+))"
)
EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
COLONS = re.compile(r"-?[\w.]+(?: ?: ?-?[\w.]+)+")
"""A ratio, or a time of day."""
NAME = re.compile(r"[a-zA-Z]|\\[a-zA-Z]+")
"""The left side of a solved equation: a letter, or a command such as `\\theta`."""
ASSIGNMENT = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\w|\{\w+\}))? ?=(?![=<>])")
"""The beginning of `x = 7`."""
MATHEMATICS = frozenset(
    ("and", "or", "sqrt", "sin", "cos", "tan", "log", "exp", "infinity", "text", "begin", "end")
)
"""Words that math-verify understands."""
WORDS = re.compile(r"[^\W\d_]{4,}|[^\W\d_]+(?:[ -][^\W\d_]+)+")
"""A word of four letters or several words. Shorter ones may be products of variables."""
SHORT_WORDS = ("yes", "no")
PROSE = re.compile(r"[^\\]*[^\W\d_]{4,}[^\\]*")
"""A text with a word, such as `March 14, 2023`: capitals do not count."""
MAX_PERMUTED = 6
"""Elements of a set, above which it is compared in sympy's order."""


def same(answer: str, target: str) -> bool:
    """Return whether an answer is equal to its target, whatever kind of text that is."""
    mine, right = read(answer), read(target)
    if "\\boxed" in mine.text:  # several boxes, of which one may be right
        return False
    if mine.text == right.text:
        return True
    if PROSE.fullmatch(right.text) and mine.text.casefold() == right.text.casefold():
        return True
    if several := quantities(right.text):  # 3 hours 20 minutes
        return quantities(mine.text) == several
    units = {mine.unit, right.unit}
    # A unit may be left out, but 5 cm is not 5 m, and 10:30 is not 10:30 PM.
    if len(units) == 2 and ("" not in units or units & {"am", "pm"}):
        return False
    return same_value(mine.value, right.value)


def same_value(answer: str, target: str) -> bool:
    """Compare two texts without units. The kind of the target decides how."""
    if normal(answer) == normal(target):
        return True
    if COLONS.fullmatch(answer):  # math-verify divides: 1:2:3 would be 1/6
        return normal(answer).lstrip("0") == normal(target).lstrip("0")  # 09:30 is 9:30
    if SERIES.fullmatch(target) or (ROMAN.fullmatch(target) and ROMAN.fullmatch(answer)):
        return False  # its text is not the target's
    for reading in (with_base, numbers_and_words):
        mine_in_order = reading(answer)
        right_in_order = reading(target)
        if mine_in_order and right_in_order:
            return mine_in_order == right_in_order
    if WORDS.fullmatch(target) or target.casefold() in SHORT_WORDS:
        return answer.casefold() == target.casefold()
    right, mine = number(target), number(answer)
    if right and mine:
        return same_number(mine, right)
    if len(EQUALS.findall(target)) == 1:
        if EQUALS.search(answer):
            return same_equation(answer, target)
        if "|" in EQUALS.split(target)[0]:  # 1 solves |x|=1, and so does -1
            return False
    elif ASSIGNMENT.match(answer):  # x = 7 is right for 7
        return same_value(ASSIGNMENT.sub("", answer, count=1), target)
    return not has_sentence(answer, target) and same_expression(answer, target)


def has_sentence(answer: str, target: str) -> bool:
    """Return whether the answer has words that the target lacks: math-verify reads past them."""
    words = {word for word in re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", answer)}
    known_words = {word for word in re.findall(r"[a-zA-Z]+", target)} | MATHEMATICS
    return " " in answer and any(
        word.lower() in NO_UNITS_IN_SENTENCES or len(word) > 3 for word in words - known_words
    )


def same_number(mine: Any, right: Any) -> bool:
    """Compare two numbers that are written out.

    For the target 15, neither 30/2 nor 1.5\\times10 is right: it may be copied from the question.
    """
    if right.form == "numeral" and mine.form != "numeral":
        return False
    if not has_finite_decimal(right.value) and is_rounded(mine, right.value):
        return True
    return mine.value == right.value and mine.reduced


def same_equation(answer: str, target: str) -> bool:
    """Compare two equations, side by side.

    `6=2x+3y` is right for `2x+3y=6`, and `2x+3y-6=0` is, too. A solved equation is right only if it
    is solved: for `x=5`, `2x=10` may be copied from the question.
    """
    mine = [side.strip() for side in EQUALS.split(answer)]
    right = [side.strip() for side in EQUALS.split(target)]
    if len(mine) != 2:
        return False
    for sides in (mine, mine[::-1]):
        if same_side(sides[0], right[0]) and same_value(sides[1], right[1]):
            return True
    if any(NAME.fullmatch(side) for side in right):
        return False
    differences = [
        value(f"({first_side})-({second_side})") for first_side, second_side in (mine, right)
    ]
    if any(difference is None for difference in differences):
        return False
    first, second = differences
    if not second.free_symbols:  # 71=72 and 70=71 differ by one each
        return False
    return any(bool((first - sign * second).equals(0)) for sign in (1, -1))


def same_side(answer: str, target: str) -> bool:
    """Compare the sides of two equations: `f(x)` with `f(x)`, `AB` with `BA`."""
    return normal(answer) == normal(target) or same_expression(answer, target)


# ------------------------------------------------------------------------------ with math-verify


def same_expression(answer: str, target: str) -> bool:
    """Compare with math-verify, and then exactly: math-verify rounds to six decimals."""
    right = value(target)
    # Before parsing: 497/7 would become 71, and most texts that take the parser seconds end here.
    if is_evaluated(right) and not numeral(answer) and (numeral(target) or not is_reduced(answer)):
        return False
    decimal = number(answer)
    if decimal and decimal.form == "numeral" and (exact := irrational(right)) is not None:
        return is_rounded(decimal, exact)
    mine = value(answer)
    if {isinstance(mine, FiniteSet), isinstance(right, FiniteSet)} == {True, False} and isinstance(
        right if isinstance(mine, FiniteSet) else mine, Interval | Tuple
    ):
        return False  # math-verify takes the set {1, 2} for the pair (1, 2)
    if isinstance(mine, Eq):
        if not isinstance(mine.lhs, Symbol):  # 71=72
            return False
        mine = mine.rhs
    if mine is None or right is None or (is_evaluated(right) and not is_evaluated(mine)):
        return False
    return bool(verify(right, mine, timeout_seconds=None)) and not differs(mine, right)


def value(text: str) -> Any:
    """Parse the text as one expression; None if it is none, or several."""
    if "\\boxed" in text:  # math-verify would make a set of several boxes
        return None
    values = parse(
        f"\\boxed{{{text}}}",
        extraction_config=BOX_EXTRACTION,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return values[0] if values else None


def is_evaluated(expression: Any) -> bool:
    """Return whether it is a number, not an unevaluated sum or product."""
    if isinstance(expression, Mul) and len(expression.args) == 2 and expression.args[0] == -1:
        expression = expression.args[1]
    return isinstance(expression, Number)


def numeral(text: str) -> bool:
    """Return whether the text has nothing left to compute.

    It is short, and has at most one numeral, no fraction and little TeX.
    """
    return (
        len(text) <= 100
        and len(TEX_SIGN.findall(text)) <= 4
        and len(NUMERAL.findall(text.rpartition("=")[2])) <= 1
        and "frac" not in text
    )


def is_reduced(text: str) -> bool:
    """Return whether the text is a fraction of whole numbers in lowest terms."""
    match = FRACTION.fullmatch(text.rpartition("=")[2].strip())
    return bool(match) and gcd(*(int(part) for part in match.groups() if part)) == 1


def irrational(expression: Any) -> Fraction | None:
    """Return an irrational number to 50 digits; None for other expressions."""
    try:
        if not expression.is_number or not expression.is_real or expression.has(Float):
            return None
        exact = expression.doit()
        if exact.is_Rational:
            return None
        return Fraction(str(exact.evalf(50)))
    except (AttributeError, TypeError, ValueError):
        return None


def differs(mine: Any, right: Any) -> bool:
    """Return whether two expressions that math-verify takes for equal have different numbers.

    Looks into sets, tuples, intervals and matrices. Only for a target without a finite decimal is a
    rounded number equal.
    """
    if isinstance(mine, Interval) and isinstance(right, Interval):
        return differs(mine.start, right.start) or differs(mine.end, right.end)
    if isinstance(mine, MatrixBase) and isinstance(right, MatrixBase):
        return any(differs(a, b) for a, b in zip(mine.flat(), right.flat(), strict=True))
    if isinstance(mine, Tuple) and isinstance(right, Tuple):
        return any(differs(a, b) for a, b in zip(mine, right, strict=True))
    if isinstance(mine, FiniteSet) and isinstance(right, FiniteSet):
        return _sets_differ(list(mine), list(right))
    my_number = rational(mine)
    right_number = rational(right)
    if my_number is None or right_number is None:
        return False
    return my_number != right_number and has_finite_decimal(right_number)


def _sets_differ(mine: list[Any], right: list[Any]) -> bool:
    if len(mine) > MAX_PERMUTED:
        return False
    orders = itertools.permutations(mine)
    return not any(
        all(not differs(a, b) for a, b in zip(order, right, strict=True)) for order in orders
    )


def rational(expression: Any) -> Fraction | None:
    """Return the exact value of a rational number; None for other expressions."""
    try:
        exact = expression.doit()
    except (AttributeError, TypeError, ValueError):
        return None
    if isinstance(exact, Float):
        return Fraction(str(exact))  # as many digits as were written
    return Fraction(exact.p, exact.q) if isinstance(exact, Rational) else None


if __name__ == "__main__":
    logging.disable()  # log messages would mix with the answers
    for line in sys.stdin:
        answer, targets = json.loads(line)
        right = False
        for target in targets:
            try:
                right = right or same(answer, target)
            except Exception:  # an unreadable answer is wrong
                continue
        print(json.dumps(right), flush=True)
