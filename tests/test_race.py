"""benchmarks/race.py: what it keeps of runs, and that it goes on with those of another home."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from benchmarks import race

from agent_r1.files import read_jsonl


def test_the_race_is_told_from_its_runs_and_in_parts(produced, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(race, "DOCS", tmp_path / "docs")
    for arm in ("grpo", "ppo"):  # each made in a home of its own
        monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / arm))
        shutil.copytree(produced / "runs" / arm, tmp_path / arm / "runs" / f"race-smoke-{arm}-s0")
        race.main("smoke")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in printed[-2:]] == ["| grpo", "| ppo"]
    kept = {run["arm"]: run for run in json.loads((tmp_path / "docs" / "race" / "smoke.json").read_text())}
    lines = read_jsonl(produced / "runs" / "grpo" / "metrics.jsonl")
    assert [episodes for episodes, _, _ in kept["grpo"]["curve"]] == [4 * 16, 8 * 16]  # validated after steps 4 and 8
    assert kept["grpo"]["curve"][-1][1] == pytest.approx(sum(line["timing_s/step"] for line in lines), abs=0.1)
    assert " | - | - | not reached (0 of 1) | " in printed[-1]  # one seed has neither worst nor best, and no deviation
    picture = tmp_path / "docs" / "images" / "race-smoke.svg"
    drawn = picture.read_bytes()
    race.main("smoke")
    assert picture.read_bytes() == drawn and b"grpo (1)" in drawn and b"ppo (1)" in drawn


def test_the_table_says_what_the_seeds_support():
    """By hand: scores .80, .90, .88 have mean .86, deviation .0529 (n - 1), and 4.303 * .0529 / sqrt(3) = .131 on either side."""
    curves = [[0.70, 0.85, 0.80, 0.86], [0.85, 0.60, 0.80, 0.70], [0.81, 0.82, 0.86, 0.90]]
    runs = [
        {"arm": "grpo", "seed": seed, "score": score, "s_step": 1.0, "credit": 0.0, "idle": 0.5, "gb": 0.5}
        | {"curve": [[96 * (i + 1), 10.0 * (i + 1), val] for i, val in enumerate(curve)]}
        for seed, (score, curve) in enumerate(zip((0.8, 0.9, 0.88), curves, strict=True))
    ]
    cells = race.table(runs).splitlines()[-1].split(" | ")
    assert cells[1:5] == ["3", "0.860 (0.729 to 0.991)", "0.800 to 0.900", "0.053"]
    # A single crossing does not count, and the median takes a seed that never got there for the slowest.
    assert [race.reached(run, 0.8)[0] for run in runs] == [192, math.inf, 96]
    assert cells[5:9] == ["192 (2 of 3)", "not reached (1 of 3)", "not reached (0 of 3)", "not reached (1 of 3)"]
