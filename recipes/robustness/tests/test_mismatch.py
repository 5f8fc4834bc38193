"""Settings that make the sampler's policy differ from the trainer's, and the weights that correct
for it."""

from __future__ import annotations

import pytest
import torch
from batches import inputs_of
from conftest import micro_config
from letters import letters_run

from agent_r1 import LocalPolicy, make_estimator
from agent_r1_recipes.robustness.off_policy import nucleus, truncated_weights

GAP = "training/rollout_logprobs_diff_mean"


def test_a_nucleus_by_hand():
    # .5, .3, .15, .05 in another order: .5 and .3 make .8, so .79 needs both and .81 a third.
    logits_BV = torch.tensor([[0.3, 0.05, 0.5, 0.15]]).log().repeat(3, 1)
    kept = [nucleus(logits_BV[:1], p)[0].isfinite().tolist() for p in (0.4, 0.79, 0.81)]
    assert kept == [
        [False, False, True, False],
        [True, False, True, False],
        [True, False, True, True],
    ]
    probabilities = nucleus(logits_BV[:1], 0.79).softmax(-1)
    torch.testing.assert_close(probabilities, torch.tensor([[0.375, 0, 0.625, 0]]))


def test_truncated_weights_by_hand():
    # Trainer .4, .2, .1; sampler .2, .4, .01: ratios 2, 1/2, 10. The last token is nobody's action.
    batch, _ = inputs_of([[0, 0, 0, 0]], [[1, 1, 1, 0]])
    batch.logprobs_BT = torch.tensor([[0.2, 0.4, 0.01, 1.0]]).log()
    now_BT = torch.tensor([[0.4, 0.2, 0.1, 0.5]]).log()
    weights_BT, said = truncated_weights(batch.logprobs_BT, now_BT, batch.mask_BT, 3.0)
    torch.testing.assert_close(weights_BT, torch.tensor([[2.0, 0.5, 3.0, 1.0]]))
    assert said["training/rollout_kl"] == pytest.approx(
        torch.tensor([0.5, 2, 0.1]).log().mean().item()
    )
    assert said["training/rollout_ratio_max"] == pytest.approx(10)
    assert said["actor/rollout_is_weight"] == pytest.approx(5.5 / 3)
    assert truncated_weights(batch.logprobs_BT, now_BT, batch.mask_BT, None)[0].eq(1).all()


def test_each_dial_parts_the_sampler_from_the_trainer_and_validation_from_neither(
    chat, monkeypatch
):
    def run(dial: str, algorithm: str = "grpo"):
        seen = []

        def evaluate(policy: LocalPolicy) -> dict[str, float]:
            seen.append((type(policy), policy.model))
            return {}

        settings = ["trainer.steps=3", "trainer.eval_every=3", f"rollout.mismatch={dial}"]
        record = letters_run(chat, monkeypatch, algorithm, *settings, evaluate=evaluate)
        assert seen == [(LocalPolicy, record.learner.actor)]
        return record

    for m in run("{}").metrics:
        assert m[GAP] < 1e-4 and abs(m["training/rollout_kl"]) < 1e-4
    old = run("{steps_old: 1}").metrics
    assert old[0][GAP] < 1e-4 < 1e-3 < old[1][GAP]
    for m in run("{bf16: true}").metrics:
        assert 1e-4 < m[GAP] < 0.1
    cut, learns = run("{top_p: 0.5, tis_cap: 2}", "reinforce++"), 0
    for m, batch in zip(cut.metrics, cut.batches, strict=True):
        # What is left was drawn more often than the trainer would: no ratio is above 1, the weights
        # put them right.
        assert m["training/rollout_ratio_max"] < 1 and m["training/rollout_kl"] > 0.1
        advantages_BT, _ = make_estimator(micro_config("reinforce++"))(
            batch, micro_config().advantage
        )
        if advantages_BT.any():  # else all episodes scored alike
            weights = (batch.advantages_BT / advantages_BT)[batch.mask_BT.bool()]
            learns += 1
            assert (weights < 1).all() and weights.mean() == pytest.approx(
                m["actor/rollout_is_weight"], abs=1e-3
            )
    assert learns
