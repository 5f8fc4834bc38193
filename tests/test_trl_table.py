"""The ratios of the comparison with TRL, its looks and its clock."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from benchmarks import common
from benchmarks.trl_compare import equal_em
from benchmarks.trl_compare.table import ratio_of_steps
from runs import ROOT


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


def test_seconds_until_an_accuracy_leave_out_the_looks(tmp_path, monkeypatch):
    """A side that looks twice: a second for each look, and the target at the second one."""
    script = tmp_path / "side.py"
    script.write_text(
        "import json, sys, time\n"
        "for step, em in ((5, 0.5), (10, 0.95)):\n"
        "    time.sleep(1)\n"
        "    look = {'step': step, 'em': em, 'evaluation_seconds': step / 5}\n"
        "    print(json.dumps(look), flush=True)\n"
        "print('{\"test_em\": 0.875}')\n"
    )
    monkeypatch.setattr(equal_em, "SIDES", {"ours": (sys.executable, str(script))})
    trial = equal_em.run_trial(equal_em.LAPTOP, "ours", equal_em.TRIALS[0], 0)
    assert [look[:2] for look in trial["looks"]] == [[5, 0.5], [10, 0.95]]
    assert 0 <= trial["seconds"] < 1, "two seconds, less two of looking"
    assert trial["test_em"] == 0.875


def test_a_side_that_fails_is_not_a_trial(tmp_path, monkeypatch):
    script = tmp_path / "side.py"
    look = '{"step": 5, "em": 0.5, "evaluation_seconds": 0}'  # it fails after a look
    script.write_text(f"print({look!r})\nraise SystemExit(1)\n")
    monkeypatch.setattr(equal_em, "SIDES", {"ours": (sys.executable, str(script))})
    with pytest.raises(SystemExit, match="ours failed"):
        equal_em.run_trial(equal_em.LAPTOP, "ours", equal_em.TRIALS[0], 0)


def test_a_trial_past_its_limit_is_ended_but_not_at_its_last_step(tmp_path, monkeypatch):
    """The look after step 5 is past the limit. It ends a trial of ten steps, not one of five."""
    script = tmp_path / "side.py"
    script.write_text(
        "import json, time\n"
        'print(json.dumps({"step": 5, "em": 0.5, "evaluation_seconds": -1000}), flush=True)\n'
        "time.sleep(1)\n"
        "print('{\"test_em\": 0.5}')\n"
    )
    monkeypatch.setattr(equal_em, "SIDES", {"ours": (sys.executable, str(script))})
    task = replace(equal_em.LAPTOP, limit=900, steps=10)
    assert equal_em.run_trial(task, "ours", equal_em.TRIALS[0], 0)["test_em"] is None
    trial = equal_em.run_trial(replace(task, steps=5), "ours", equal_em.TRIALS[0], 0)
    assert (trial["seconds"], trial["test_em"]) == (None, 0.5)


def test_the_kept_trials_give_the_table_of_the_page(capsys):
    """Of each side seven trials, and the shortest is what the rounds use."""
    trials = equal_em.read()
    for side in equal_em.SIDES:
        searched = [t for t in trials if t["part"] == "search" and t["side"] == side]
        assert [t["settings"] for t in searched] == list(equal_em.TRIALS)
        used = [t["settings"] for t in trials if t["part"] == "rounds" and t["side"] == side]
        assert used == [equal_em.best(side)] * len(used)
    equal_em.print_table()
    printed = capsys.readouterr().out
    page = (ROOT / "benchmarks/README.md").read_text()
    for seconds in re.findall(r"(\d+\.\d+) s, \d+ steps, test EM", printed):
        assert f"{float(seconds):.1f} s" in page


def test_the_page_has_the_table_of_looks_with_smollm2():
    assert equal_em.looks_table("pocket", 0) in (ROOT / "benchmarks/README.md").read_text()


def test_a_side_that_ends_earlier_has_empty_cells(tmp_path, monkeypatch):
    """TRL is stopped after its first look, so it has no test EM; a trial of seed 2 stays out."""
    monkeypatch.setattr(equal_em, "FILE", tmp_path / "trials.jsonl")
    trial = {"seed": 1, "settings": {}, "seconds": None}
    ours, theirs = equal_em.SIDES
    looks = [[2, 0.5, 10.4], [4, 0.75, 20.6]]
    equal_em.keep("pocket", {**trial, "side": ours, "test_em": 0.7, "looks": looks})
    equal_em.keep("pocket", {**trial, "side": theirs, "test_em": None, "looks": [[2, 0.25, 99.0]]})
    equal_em.keep("pocket", {**trial, "seed": 2, "side": theirs, "test_em": 1, "looks": looks})
    assert equal_em.looks_table("pocket", 1).splitlines()[2:] == [
        "| 2 | 10 s, EM 0.500 | 99 s, EM 0.250 |",
        "| 4 | 21 s, EM 0.750 |  |",
        "| test questions | EM 0.7 |  |",
    ]


def test_a_run_is_looked_at_every_few_steps_and_after_its_last(monkeypatch, capsys):
    """Five steps, a look every two, and a target that is not reached: the last step has test EM."""
    monkeypatch.setattr(common, "greedy_em", lambda setting, model, rows: model)
    config = SimpleNamespace(trainer=SimpleNamespace(steps=5))
    setting = SimpleNamespace(config=config, validation=["v"], test=["t"])
    watch = common.Watch(setting, target=0.9, look_every=2)
    ends = [watch.reached(step, lambda: 0.5) for step in range(1, 6)]
    assert ends == [False, False, False, False, True]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines[:-1]] == [2, 4, 5]
    assert lines[-1] == {"test_em": 0.5}
    assert common.Watch(setting, target=0.9, look_every=2).reached(2, lambda: 0.9)
