"""Our estimators and our policy loss under the names that verl looks up.

In: verl's tensors of the response part [B, T]. Out: what `training/advantages.py` and `training/losses.py` compute of
them. verl imports this module in every worker (through engine.py); `trainer.py` calls the estimators through verl's
table. The critic's loss is verl's own: it has no table, and tests/test_verl_equivalence.py holds it against ours.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from agent_r1.errors import AgentR1Error
from agent_r1.rollout.rows import Batch
from agent_r1.settings import AdvantageConfig
from agent_r1.training.advantages import ESTIMATORS, Estimator
from agent_r1.training.losses import aggregate_loss, loss_normalizer, policy_loss


def _adapter(estimate: Estimator):
    def estimator(
        token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config, values: Tensor | None = None, **_
    ) -> tuple[Tensor, Tensor]:
        """`index` holds verl's keys: `{prompt}_{sample}_{row}`. Rows may come in any order."""
        return advantages(estimate, token_level_rewards, response_mask, index, config, values)

    return estimator


for _name, _estimate in ESTIMATORS.items():
    register_adv_est(f"agent_r1_{_name}")(_adapter(_estimate))


def advantages(
    estimate: Estimator, rewards_BT: Tensor, mask_BT: Tensor, keys: np.ndarray, config, values_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] in the order of `keys`.

    verl shuffles rows to balance its workers and adds rows of padding, which have no action. Our estimators want whole
    trajectories in time order, so rows are sorted, padding is left out, and everything is put back at the end.
    """
    parts = [str(key).rsplit("_", 2) for key in keys]
    acted = mask_BT.bool().any(dim=1).tolist()
    order = sorted(
        (i for i in range(len(parts)) if acted[i]), key=lambda i: (parts[i][0], int(parts[i][1]), int(parts[i][2]))
    )
    members: dict[str, set[str]] = {}
    for i in order:
        members.setdefault(parts[i][0], set()).add(parts[i][1])
    if estimate is ESTIMATORS["grpo"]:  # the environment broke off all but one of a group: nothing to compare it with
        order = [i for i in order if len(members[parts[i][0]]) > 1]
    out = torch.zeros_like(rewards_BT, dtype=torch.float32), torch.zeros_like(rewards_BT, dtype=torch.float32)
    if not order:
        return out
    trajectories = {name: n for n, name in enumerate(dict.fromkeys(tuple(parts[i][:2]) for i in order))}
    batch = Batch(
        rewards_BT=rewards_BT[order],
        mask_BT=mask_BT[order],
        values_BT=None if values_BT is None else values_BT[order],
        groups=[parts[i][0] for i in order],
        trajectory_B=torch.tensor([trajectories[tuple(parts[i][:2])] for i in order]),
    )
    section = AdvantageConfig(gamma=config["gamma"], lam=config["lam"], normalize_std=config["norm_adv_by_std_in_grpo"])
    out[0][order], out[1][order] = estimate(batch, section)
    return out


@register_policy_loss("agent_r1")
def verl_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """`losses.policy_loss`, aggregated over the whole minibatch, of which this micro-batch on this rank is a part.

    verl averages gradients over `dp_size` ranks, so each rank's share is multiplied by it. `rollout_is_weights` [B, T]
    correct for a sampler that rounds otherwise than the trainer (verl.tis_cap).
    """
    loss_BT, stats = policy_loss(
        log_prob, old_log_prob, advantages, response_mask,
        config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c,
    )  # fmt: skip
    if rollout_is_weights is not None:
        loss_BT = loss_BT * rollout_is_weights
        stats["actor/rollout_is_weight"] = rollout_is_weights[response_mask.bool()].mean().item()
    whole = config.global_batch_info
    loss = aggregate_loss(loss_BT, response_mask, loss_agg_mode, _normalizer(response_mask, loss_agg_mode, whole))
    return loss * (whole.get("dp_size") or 1), stats


def _normalizer(mask_BT: Tensor, mode: str, whole: dict) -> float:
    """What the minibatch's loss is divided by, from verl's counts over all ranks and micro-batches."""
    if mode == "token-mean" and whole.get("batch_num_tokens"):
        return float(whole["batch_num_tokens"])
    if mode != "token-mean" and whole.get("global_batch_size"):
        rows = float(whole["global_batch_size"])
        return rows * (whole["loss_scale_factor"] or mask_BT.shape[1]) if mode.endswith("-norm") else rows
    return loss_normalizer(mask_BT, mode, whole.get("loss_scale_factor"))


class SamplerWatch:
    """Ends a run whose sampler no longer has the trainer's weights, which no other number shows for hours."""

    # Rounding in bfloat16 gives .002 to .01 in probability, and .01 to .02 in log-probability.
    LIMITS = {"training/rollout_probs_diff_mean": 0.05, "training/rollout_logprobs_diff_mean": 0.2}

    def __init__(self):
        self.strange = 0

    def check(self, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
        """Mean differences between the two's log-probabilities of the sampled tokens, before any update.

        Raises AgentR1Error the second time in a row that one is over its limit.
        """
        acted_BT = mask_BT.bool()
        trainer, sampler = trainer_BT[acted_BT].float(), sampler_BT[acted_BT].float()
        apart = (trainer.exp() - sampler.exp()).abs().mean().item(), (trainer - sampler).abs().mean().item()
        found = dict(zip(self.LIMITS, apart, strict=True))
        sound = all(value <= self.LIMITS[name] for name, value in found.items())
        self.strange = 0 if sound else self.strange + 1
        if self.strange == 2:
            raise AgentR1Error(
                "vLLM does not have the trainer's weights: in two steps running its probabilities of the tokens that it "
                f"sampled were others than the trainer's (by {apart[0]:.2f}, and {apart[1]:.2f} in logarithms, on average)"
            )
        return found
