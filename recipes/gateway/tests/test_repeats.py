"""A whole training through the gateway, one episode at a time, repeats to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import TINY, curve, main, rollouts, weights

AGENT = Path(__file__).parent / "clients" / "plain_agent.py"
ONE_BY_ONE = [
    f"--agent={AGENT}:answer", "rollout.max_concurrent_episodes=1", "trainer.steps=2",
    "trainer.eval_every=0", "trainer.rollouts_every=1", "cold_start.copy_steps=20",
    "cold_start.mix_steps=20", "env.call_reward=0", "rollout.prompts_per_step=2",
]  # fmt: skip


@pytest.mark.slow
def test_two_trainings_are_equal_to_the_bit(produced, tmp_path, monkeypatch):
    home = Path(shutil.copytree(produced, tmp_path / "home"))
    monkeypatch.setenv("AGENT_R1_HOME", str(home))
    for name in ("one", "two"):
        assert main("train", "grpo", *TINY, *ONE_BY_ONE, f"--run={name}") == 0
    one, two = home / "runs/one", home / "runs/two"
    assert weights(one) == weights(two) and curve(one) == curve(two)
    assert rollouts(one) == rollouts(two) and len(rollouts(one)) == 2
    for step in curve(one):  # or nothing was compared
        assert step["gateway/trained_tokens"] > 100 and step["actor/grad_norm"] > 0
