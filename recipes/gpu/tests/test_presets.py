"""The presets for GPUs: batches divide among the ranks, and a bad run on rented GPUs ends by
itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1 import load_config

PRESETS = sorted(file.stem for file in Path(__file__).parents[1].glob("*.yaml"))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_suits_the_machine_that_it_names(name, algorithm):
    config = load_config(name, algorithm=algorithm)
    rollout, trainer = config.rollout, config.trainer
    assert (config.engine, trainer.device) == ("verl", "cuda") and config.verl.gpu
    assert (
        rollout.prompts_per_step * rollout.samples_per_prompt // config.actor.minibatches
    ) % config.verl.ranks == 0
    assert trainer.stop_on_collapse and 0 < trainer.max_hours <= 72
    # The longest conversation there can be, at 4 characters a token, is no longer than two
    # contexts: most do fit.
    assert config.env.tool_max_chars / 4 * (config.env.max_turns - 1) < rollout.max_context
