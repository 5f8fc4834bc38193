"""`trainer.device=cuda`, a choice: no tensor of a step is left in host memory where the model or a loss reads it.

One step of the local loop runs on the CPU under the rule that a GPU would enforce (devices.py). Nothing here is CUDA."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import learner_of, micro_config
from devices import CreatedWithDevice

from agent_r1.rollout import sampler
from agent_r1.rollout.rows import Batch
from agent_r1.training import loop
from agent_r1.training.cold_start import clone


def one_step(micro, chat, model, algorithm: str, *overrides: str) -> None:
    small = (
        "actor.minibatches=1",
        "critic.minibatches=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=3",
        "rollout.max_tokens_per_turn=24",
    )
    config = micro_config(algorithm, "trainer.steps=1", "trainer.dtype=bfloat16", *small, *overrides)
    reference = copy.deepcopy(model) if config.actor.kl_coef else None
    with CreatedWithDevice():
        loop.train(
            config, learner_of(config, model), chat, micro.tools, micro.rows("train"), lambda *_: None, lambda policy: {},
            lambda learner: None, reference,
        )  # fmt: skip


IN_REWARD = ("actor.kl_coef=0.01", "actor.kl_in=reward", "actor.kl_estimator=k1", "advantage.process_weight=0.5")
CASES = [
    ("ppo", IN_REWARD),
    ("grpo", ("actor.kl_coef=0.01", "actor.entropy_coef=0.001", "trainer.recompute=true")),
    ("gigpo", ("rollout.mismatch={bf16: true, top_p: 0.9, steps_old: 1, tis_cap: 2}",)),
    ("remax", ("actor.loss_aggregation=seq-mean-token-mean",)),
]


@pytest.mark.parametrize(("algorithm", "overrides"), CASES, ids=[name for name, _ in CASES])
def test_a_step_reads_only_tensors_of_the_models_device(micro, chat, cloned_model, algorithm, overrides):
    one_step(micro, chat, cloned_model, algorithm, *overrides)


def test_cloning_reads_only_tensors_of_the_models_device(demonstrations, cloned_model):
    with CreatedWithDevice():
        clone(cloned_model, demonstrations, 2, 1024, 1e-3, 0, lambda step, loss: None, torch.bfloat16)


def in_sampler(monkeypatch) -> None:
    draw = sampler.sample_tokens
    monkeypatch.setattr(
        sampler, "sample_tokens", lambda logits, heat, noise: draw(logits, heat, torch.tensor(noise.tolist()))
    )


def in_cache(monkeypatch) -> None:
    extend = sampler.LocalPolicy._extend

    def forgetful(self, chunk):
        self.cache.lengths = torch.tensor(self.cache.lengths.tolist())
        return extend(self, chunk)

    monkeypatch.setattr(sampler.LocalPolicy, "_extend", forgetful)


def in_batch(monkeypatch) -> None:
    monkeypatch.setattr(Batch, "to", lambda self, device: self)


def in_loss(monkeypatch) -> None:
    mean = loop.aggregate_loss
    monkeypatch.setattr(loop, "aggregate_loss", lambda x, *rest: mean(x * torch.ones(x.shape), *rest))


def in_critics_loss(monkeypatch) -> None:
    mask = loop.critic_mask
    monkeypatch.setattr(loop, "critic_mask", lambda batch, name: torch.tensor(mask(batch, name).tolist()))


@pytest.mark.parametrize("plant", [in_sampler, in_cache, in_batch, in_loss, in_critics_loss])
def test_a_planted_fault_is_caught(micro, chat, cloned_model, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="takes tensors of host and GPU"):
        one_step(micro, chat, cloned_model, "ppo")
