"""The comparison of runs before and after a change of structure finds one changed number, and minds
no clock."""

from __future__ import annotations

from benchmarks.same_bits import _clean, difference


def test_a_changed_number_is_found_and_a_clock_is_not():
    before = {"actor/lr": 0.5, "timing_s/gen": 1.0, "steps": [{"reward": 1.0, "seconds": 2.0}]}
    assert difference(_clean(before), _clean(before | {"timing_s/gen": 9.0}), "x") is None
    slower = before | {"steps": [{"reward": 1.0, "seconds": 3.0}]}
    assert difference(_clean(before), _clean(slower), "x") is None
    other = before | {"steps": [{"reward": 0.5, "seconds": 2.0}]}
    assert (
        difference(_clean(before), _clean(other), "x") == "x: steps[0]: reward: 1.0 before, 0.5 now"
    )
    assert "gone" in difference({"gone": 1}, {}, "x")
