"""Compare answers with the right number, expression or set, inside a sandbox.

JSON line by line: [answer, targets] in, true or false out. `maths.py` asks. It needs a sandbox
because sympy's parser calls `eval`, and because a short expression can take forever.
"""

import json
import logging
import re
import sys
from decimal import Decimal
from math import gcd
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, FiniteSet, Interval, Mul, Number, Symbol, Tuple

BOXED = [LatexExtractionConfig(boxed_match_priority=0)]
COMMA = re.compile(r"\{,\}|,\\!\s*")  # as TeX writes thousands
PERCENT = re.compile(r"(?<=\d)\s*\\?%$")
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d+)?[eE][-+]?\d{1,2}")
UNIT = re.compile(r"\\(text|textrm|mathrm|mbox)\s*\{[^{}\d]*\}(\^\{?\d\}?)?")
TEX_SIGN = re.compile(r"[\\^_|(\[{=]")
NUMERAL = re.compile(r"\d[\d,.]*|\.\d+")
FRACTION = re.compile(
    r"[-+]?(?:\d*\s*\\[dt]?frac\s*\{?\s*[-+]?(\d+?)\s*\}?\s*\{?\s*(\d+)\s*\}?|(\d+)\s*/\s*(\d+))"
)


def strip_tex(text: str) -> str:
    """Remove a box, dollars, a final full stop and a percent sign (50% is 50)."""
    text = bare(text)
    if boxed := re.fullmatch(r"\\boxed\{(.*)\}", text, re.DOTALL):
        text = bare(boxed[1])
    text = PERCENT.sub(
        "", COMMA.sub(",", text)
    )  # TeX takes the rest of the line after % for a comment
    return (
        format(Decimal(text), "f") if SCIENTIFIC.fullmatch(text) else text
    )  # 2.5e+12: TeX reads Euler's e


def bare(text: str) -> str:
    return text.rstrip(".$ \t\n").lstrip("$ \t\n")


def value(text: str) -> Any:
    """Parse the text as one expression; None if it is none, or several."""
    if "\\boxed" in text:  # math-verify would make a set of several boxes
        return None
    found = parse(
        f"\\boxed{{{text}}}",
        extraction_config=BOXED,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found else None


def is_evaluated(expression: Any) -> bool:
    """Return whether it is a number, not an unevaluated sum or product."""
    if isinstance(expression, Mul) and len(expression.args) == 2 and expression.args[0] == -1:
        expression = expression.args[1]
    return isinstance(expression, Number)


def numeral(text: str) -> bool:
    """Return whether the text has nothing left to compute.

    It is short, and has at most one numeral, no fraction and little TeX.
    """
    text = UNIT.sub("", text)
    return (
        len(text) <= 100
        and len(TEX_SIGN.findall(text)) <= 4
        and len(NUMERAL.findall(text.rpartition("=")[2])) <= 1
        and "frac" not in text
    )


def reduced(text: str) -> bool:
    """Return whether the text is a fraction of whole numbers in lowest terms."""
    found = FRACTION.fullmatch(text.rpartition("=")[2].strip())
    return bool(found) and gcd(*(int(part) for part in found.groups() if part)) == 1


def same(answer: str, target: str) -> bool:
    answer, target = strip_tex(answer), strip_tex(target)
    right = value(target)
    # Before parsing: 497/7 would become 71, and most texts that take the parser seconds end here.
    if is_evaluated(right) and not numeral(answer) and (numeral(target) or not reduced(answer)):
        return False
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
    return bool(verify(right, mine, timeout_seconds=None))


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
