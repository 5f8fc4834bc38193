"""benchmarks/race.py: what it keeps of runs, and that it goes on with those of another home."""

from __future__ import annotations

import json
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
    assert kept["grpo"]["reached"]["0.85"] == {"val": 0.85, "step": None, "episodes": None, "seconds": None}
    picture = tmp_path / "docs" / "images" / "race-smoke.svg"
    drawn = picture.read_bytes()
    race.main("smoke")
    assert picture.read_bytes() == drawn and b"grpo (1)" in drawn and b"ppo (1)" in drawn
