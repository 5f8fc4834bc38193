"""`agent-r1 race`: arms, equal episodes, what is run again, and the pairs."""

import json
from argparse import Namespace

import pytest
import yaml
from conftest import fails_with

from agent_r1 import load_config
from agent_r1_recipes.race import race as module
from agent_r1_recipes.race.race import Arm, compare, equal_steps, interval, race


def arguments(*words, **changes):
    return Namespace(
        **{"settings": list(words), "preset": "small", "seeds": 2, "first_seed": 0,
           "episodes": None, "report": False, "json": None,
           "stair": None} | changes
    )  # fmt: skip


def test_an_arm_has_settings_and_a_folder():
    arm = Arm.parse("reinforce+++actor.lr=1e-4+env.tools=[search]")
    assert (arm.algorithm, arm.settings) == ("reinforce++", ("actor.lr=1e-4", "env.tools=[search]"))
    assert Arm.parse("reinforce++").algorithm == "reinforce++"
    name = arm.run_name("my/preset.yaml", 3)
    assert name == "race-preset-reinforce+++actor.lr-1e-4+env.tools--search--s3"


def test_equal_episodes_count_what_is_played():
    """small plays 12 x 8 episodes a step; remax one more of each prompt; ppo 96 x 1."""
    arms = [
        Arm.parse(word) for word in ("grpo", "ppo", "remax", "grpo+rollout.samples_per_prompt=4")
    ]
    steps = equal_steps(arms, "small", [], None)
    assert list(steps.values()) == [32, 32, round(32 * 96 / 108), 64]
    assert equal_steps(arms[:1], "small", [], 960) == {"grpo": 10}
    # Two rounds play at most three times as many, so a third of the steps is certainly no more.
    refilled = Arm.parse("grpo+rollout.dynamic_sampling_rounds=2")
    assert equal_steps([arms[0], refilled], "small", [], 960) == {"grpo": 10, refilled.name: 3}


def test_differences_are_paired():
    cards = {}
    for seed, (first, second) in enumerate([(0.2, 0.3), (0.6, 0.8), (0.9, 0.9)]):
        cards["grpo", seed] = {"score": first, "reliability": {"pass^8": first / 2}}
        cards["ppo", seed] = {"score": second, "reliability": {"pass^8": second / 2}}
    cards["ppo", 7] = {"score": 0.0}
    figures = compare([Arm.parse("grpo"), Arm.parse("ppo")], cards)
    difference = figures["ppo"]["score difference"]
    assert difference["pairs"] == 3
    # Student's t of .1, .2, 0: mean .1, deviation .1, 4.303 / sqrt(3) of it on each side.
    assert difference["mean"] == pytest.approx(0.1)
    assert difference["high"] == pytest.approx(0.1 + 4.303 * 0.1 / 3**0.5, abs=1e-4)
    assert figures["ppo"]["pass^8 difference"]["mean"] == pytest.approx(0.05)
    assert interval([0.1]) == {"pairs": 1, "mean": 0.1} and interval([]) == {"pairs": 0}


def test_finished_runs_are_kept_and_pairs_come_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    ran = []

    def fake_run(arm, preset, seed, settings):
        ran.append((arm.name, seed))
        if len(ran) == 3:
            raise KeyboardInterrupt
        folder = tmp_path / "runs" / arm.run_name(preset, seed)
        folder.mkdir(parents=True)
        config = load_config(preset, settings, algorithm=arm.algorithm, seed=seed)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
        (folder / "metrics.jsonl").touch()
        (folder / "eval.json").write_text(json.dumps({"score": 0.5}))

    monkeypatch.setattr(module, "run", fake_run)
    with pytest.raises(KeyboardInterrupt):
        race(arguments("grpo", "ppo"))
    race(arguments("grpo", "ppo"))
    assert ran == [("grpo", 0), ("ppo", 0), ("grpo", 1), ("grpo", 1), ("ppo", 1)]
    assert "over 2 pairs" in capsys.readouterr().out
    race(arguments("grpo", "ppo", report=True))
    assert len(ran) == 5
    with fails_with("other_settings"):
        race(arguments("grpo", "ppo", "actor.lr=1e-4"))
    with fails_with("other_settings"):
        race(arguments("grpo", "ppo", episodes=96))


@pytest.mark.parametrize("words", [("grpo",), ("grpo", "grpo"), ()])
def test_a_race_has_two_arms(words):
    with fails_with("missing_name"):
        race(arguments(*words))


def test_a_failed_stage_names_the_run(monkeypatch):
    class Done:
        returncode = 3

    monkeypatch.setattr(module.subprocess, "run", lambda *a, **k: Done())
    with fails_with("stage_failed", "race-small-grpo-s0: agent-r1 train ended with code 3"):
        module.run(Arm.parse("grpo"), "small", 0, [])
