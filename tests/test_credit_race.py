"""The race in Stop: equal episodes, exact rewards, the entropy's gradient, resumed stages."""

import json
import math

import pytest
import torch
from lab.experiments import credit_race
from lab.experiments.credit_race import climb_in_stop, name_of, run_stage, table, with_entropy

from agent_r1 import AdvantageConfig, Estimator
from agent_r1_recipes.race.stair import Climb


def test_a_run_plays_its_episodes_and_is_scored_exactly():
    """Two steps of 48 episodes; the start is worth .409 (frozen/stop-start.json)."""
    climb = climb_in_stop("rloo", {"lr": 1e-3}, 900, 100, pay=0.2, level=0.1)
    assert [episodes for episodes, _ in climb.scores] == [48, 96]
    assert climb.episodes == 48 and climb.scores[0][1] == pytest.approx(0.409, abs=0.1)
    assert climb.scores[0][1] != climb.scores[1][1]
    never = climb_in_stop("rloo", {"lr": 1e-3, "group": 16}, 900, 100, pay=0.2, level=1.9)
    assert math.isinf(never.episodes) and [n for n, _ in never.scores] == [96]


def test_the_episodes_of_a_critic_count():
    climb = climb_in_stop("ppo-.95", {"lr": 1e-3}, 900, 100, pay=0.2, level=1.9)
    assert [episodes for episodes, _ in climb.scores] == [96]


def test_entropy_pays_unlikely_tokens():
    class Batch:
        logprobs_BT = torch.tensor([[-2.0, -1.0, 0.0]])
        mask_BT = torch.tensor([[1, 1, 0]])

    ones = Estimator(lambda batch, advantage: (torch.ones(1, 3), torch.zeros(1, 3)))
    advantages_BT, _ = with_entropy(ones, 0.5)(Batch(), AdvantageConfig())
    torch.testing.assert_close(advantages_BT, torch.tensor([[2.0, 1.5, 1.0]]))
    assert with_entropy(ones, 0.0) is ones


def test_a_stage_is_resumed_run_by_run(tmp_path, monkeypatch):
    ran = []

    def fake(method, settings, seed, episodes, pay, level):
        ran.append((method, seed))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return Climb(480 if method == "rloo" else math.inf, 1.0, [(960, 1.25)], 2.0)

    monkeypatch.setattr(credit_race, "climb_in_stop", fake)
    setting = {
        "tune": {
            "episodes": 960, "pay": 0.0, "level": 1.5, "first_seed": 5, "seeds": 1,
            "arms": [["rloo", {"lr": 0.01}], ["grpo", {}]],
        },
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run_stage("tune", setting, tmp_path / "race.json")
    record = run_stage("tune", setting, tmp_path / "race.json")
    assert ran == [("rloo", 5), ("grpo", 5), ("grpo", 5)]
    assert json.loads((tmp_path / "race.json").read_text()) == json.loads(json.dumps(record))
    rows = table(record["tune"]["runs"]).splitlines()[2:]
    assert rows == ["| rloo lr=0.01 | 1 | 1 | 480 | 1.250 | 2.0 |",
                    "| grpo | 1 | 0 | never | 1.250 | 2.0 |"]  # fmt: skip
    assert name_of("grpo", {"lr": 0.003, "group": 16}) == "grpo lr=0.003 group=16"
