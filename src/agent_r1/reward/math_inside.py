"""Runs inside of a sandbox: is an answer the same number, expression or set as the right one? Line by line of JSON,
[answer, targets] in, true or false out. `maths.py` asks.

In a sandbox, because sympy's parser calls `eval`, and because a short expression can take forever.
"""

import json
import logging
import sys

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Mul, Number, Symbol

BOXED = [LatexExtractionConfig(boxed_match_priority=0)]


def value(text):
    """The one expression that all of the text is; None where it is none, or several."""
    text = text.strip().strip("$").strip()
    boxed = text if text.startswith("\\boxed{") else f"\\boxed{{{text}}}"
    if boxed.count("\\boxed") != 1:  # math-verify would make a set of them
        return None
    found = parse(
        boxed, extraction_config=BOXED, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    return found[0] if found else None


def worked_out(expression):
    """Whether it is a number, and no sum or product that leaves the work to the one who compares."""
    if isinstance(expression, Mul) and len(expression.args) == 2 and expression.args[0] == -1:
        expression = expression.args[1]
    return isinstance(expression, Number)


def same(answer, target):
    mine, right = value(answer), value(target)
    if isinstance(mine, Eq):
        if not isinstance(mine.lhs, Symbol):  # 71=72
            return False
        mine = mine.rhs
    if mine is None or right is None or (worked_out(right) and not worked_out(mine)):
        return False
    return bool(verify(right, mine, timeout_seconds=None))


if __name__ == "__main__":
    logging.disable()  # what it says would stand among the answers
    for line in sys.stdin:
        answer, targets = json.loads(line)
        right = False
        for target in targets:
            try:
                right = right or same(answer, target)
            except Exception:  # what cannot be read is not right
                continue
        print(json.dumps(right), flush=True)
