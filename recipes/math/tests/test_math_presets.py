"""The presets of mathematics train and are evaluated, with a tiny model on files in the published
forms."""

from __future__ import annotations

import json

import pytest
from qa_files import a_step_of_maths
from runs import main


@pytest.mark.parametrize("stage", ["gsm8k env.tools=[] env.max_turns=1", "gsm8k", "dapo-math"])
def test_a_preset_of_mathematics_trains(tmp_path, monkeypatch, micro_model, stage):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    preset, *settings = stage.split()
    words = a_step_of_maths(tmp_path, micro_model, preset, *settings)
    assert main("train", *words, "--plain") == 0 and main("eval", *words) == 0
    card = json.loads((tmp_path / "runs/maths/eval.json").read_text())
    assert (card["dataset"], card["n"], card["score_name"]) == (preset, 4, "reward")
