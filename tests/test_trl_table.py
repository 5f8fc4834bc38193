"""The ratio that benchmarks/trl_compare/table.py prints."""

from __future__ import annotations

import math
import re
import runpy

import pytest
from runs import ROOT

ratio_of_steps = runpy.run_path(str(ROOT / "benchmarks/trl_compare/table.py"))["ratio_of_steps"]


def a_round(*seconds: float) -> dict:
    return {"seconds": [{"step": s} for s in seconds]}


def test_rounds_are_paired_and_their_logarithms_averaged():
    """Ratios 4 and 9: the geometric mean is 6. Student's t of one degree of freedom is 12.706."""
    said = ratio_of_steps([a_round(1, 3), a_round(1)], [a_round(8), a_round(8, 10)])
    middle, low, high = map(float, re.findall(r"\d+\.\d\d", said))
    half = 12.706 * math.log(9 / 4) / 2
    assert middle == 6
    assert low == pytest.approx(6 * math.exp(-half), abs=0.005)
    assert high == pytest.approx(6 * math.exp(half), rel=1e-3)


def test_one_round_has_no_interval():
    assert ratio_of_steps([a_round(2)], [a_round(9)]).endswith("4.50 (one round, so no interval)")
