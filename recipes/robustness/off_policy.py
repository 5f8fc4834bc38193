"""Make the sampler differ from the trainer on purpose, to see the effect (`rollout.mismatch`).

Here, sampler and trainer run the same float32 arithmetic. In a real stack another program samples.
It rounds to bfloat16 with its own kernels, cuts off unlikely tokens (top-p), or has weights of some
steps ago. In: the trainer's model and the setting. Out: a `Policy`, and an estimator with weights
that correct for it. docs/algorithms.md shows the cost of each.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from agent_r1 import AdvantageConfig, Batch, Column, Config, Decoder, Estimator, LocalPolicy
from agent_r1_recipes.robustness.settings import MismatchSettings


class MismatchedPolicy(LocalPolicy):
    """Sample from a modified copy of the trainer's model, and record its log-probabilities.

    A resumed run has no old weights and begins with the newest. Evaluations keep the exact policy.
    """

    has_trainer_weights = False

    def __init__(self, actor: Decoder, stop_ids: tuple[int, ...], rollout: MismatchSettings):
        dial = rollout.mismatch
        assert dial is not None, "recipe.toml names this policy for the setting alone"
        dtype = torch.bfloat16 if dial.bf16 else torch.float32
        model = copy.deepcopy(actor).to(dtype)
        super().__init__(
            model, stop_ids, slots=rollout.max_concurrent_episodes, max_context=rollout.max_context
        )
        self.versions: deque[dict[str, Tensor]] = deque(maxlen=dial.steps_old + 1)
        if dial.top_p < 1:
            model.logits = lambda hidden: nucleus(type(model).logits(model, hidden), dial.top_p)

    def sync(self, actor: Decoder) -> None:
        """Take the weights of `steps_old` steps ago; called once per step."""
        # The queue has steps_old + 1 places, so its first entry is `steps_old` steps old.
        self.versions.append({name: weight.clone() for name, weight in actor.state_dict().items()})
        self.model.load_state_dict(self.versions[0])
        self.stats = type(self.stats)()


def nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens with total probability `top_p` (1904.09751, section 3.1).

    All others become -inf.
    """
    probs_BV, order_BV = logits_BV.float().softmax(-1).sort(dim=-1, descending=True)
    beyond_BV = probs_BV.cumsum(-1) - probs_BV >= top_p  # the token that reaches the limit stays
    return logits_BV.masked_fill(beyond_BV.scatter(1, order_BV, beyond_BV), -torch.inf)


def truncated_weights(
    sampled_BT: Tensor, now_BT: Tensor, mask_BT: Tensor, cap: float | None
) -> tuple[Tensor, dict[str, float]]:
    """Compute min(trainer's probability / sampler's, cap) of each action token; 1 without a cap.

    This is truncated importance sampling. The gradient is an expectation under the *trainer's*
    policy. The weights correct for tokens that the sampler drew too often or too rarely, and the
    cap bounds the weight of one token. A token's loss is proportional to its advantage, so the
    weight may multiply that. Also measures how far the two policies differ.
    """
    mask_BT = mask_BT.bool()
    apart_BT = torch.where(mask_BT, now_BT - sampled_BT, 0.0)
    ratio_BT = apart_BT.exp()
    weights_BT = torch.ones_like(ratio_BT)
    if cap is not None:
        weights_BT = ratio_BT.clamp(max=cap)
    return weights_BT, {
        # KL of the sampler's policy to the trainer's, by the estimator k1.
        "training/rollout_kl": -apart_BT[mask_BT].mean().item(),
        "training/rollout_ratio_max": ratio_BT[mask_BT].max().item(),
        "actor/rollout_is_weight": weights_BT[mask_BT].mean().item(),
    }


SAMPLER_LOGPROBS = Column("sampled_BT", torch.float32, lambda step: step.action_logprobs)
"""The sampler's own log-probabilities, while the trainer recomputes `logprobs_BT`."""


def with_truncated_weights(inner: Estimator, config: Config) -> Estimator:
    """Correct the advantages of `inner` for a modified sampler (`rollout.mismatch`)."""

    def credit(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        advantages_BT, returns_BT = inner(batch, advantage)
        weights_BT, metrics = truncated_weights(
            batch.columns[SAMPLER_LOGPROBS.name],
            batch.logprobs_BT,
            batch.mask_BT,
            config.rollout.mismatch.tis_cap,
        )
        batch.metrics |= metrics
        return weights_BT * advantages_BT, returns_BT

    return replace(inner, credit=credit, columns=(*inner.columns, SAMPLER_LOGPROBS))
