"""Losses: advantages to something that can be differentiated.

In: log-probabilities of the action tokens now and when they were sampled, their advantages, values. Out: a loss per
token and, from `aggregate_loss`, the scalar that `backward` is called on. Next: the optimiser, in the loop or in verl.

Per-token functions accept any shape (written BT) and compute in float32. Those that take a mask give 0 where it is 0;
what stands there, even NaN, reaches neither the loss nor a gradient. Metric names are verl's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agent_r1.config.settings import ActorConfig

# ---------------------------------------------------------------------------------------------------------- policy


def token_ratios(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """How much likelier each token has become since it was sampled."""
    return log_ratio_BT.exp()


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
    ratios: Callable[[Tensor, Tensor], Tensor] = token_ratios,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped surrogate (1707.06347, eq. 7), negated because optimisers minimise.

        ratio = exp(logprob - old_logprob)         how much more likely the token has become since it was sampled
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))

    The maximum is pessimistic: once a token has moved far enough in the direction that A asks for, its gradient is 0
    and the same samples can be used for several updates. A move in the wrong direction is never clipped.

    `clip_high > clip_low` is clip-higher (DAPO, 2503.14476, section 3.1): a token of probability 0.01 may otherwise
    only reach 0.012, which starves exploration. Dual clip (1912.09729): for A < 0 and a large ratio the loss -A * ratio
    has no bound and one token could dominate a batch, so there loss = min(loss, -A * clip_dual); `clip_dual <= 1`
    switches it off.

    `ratios` may put the ratio of a longer span in the token's place (actor.ratio).

    Returns the loss per token and metrics (means over action tokens): `actor/pg_clipfrac` (share that the clip
    decides), `actor/pg_clipfrac_lower` (share that dual clip decides), `actor/ppo_kl` (k1 estimate of KL(old || new)).
    """
    mask_BT = mask_BT.bool()
    # where() at the very start, not the end: a NaN that is only masked out later still makes its gradient 0 * NaN.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT.float() - old_logprobs_BT.float(), 0.0)
    log_ratio_BT = log_ratio_BT.clamp(-20.0, 20.0)  # exp(20) = 5e8: finite, and far beyond any clip
    advantages_BT = torch.where(mask_BT, advantages_BT.float(), 0.0)
    ratio_BT = ratios(log_ratio_BT, mask_BT)

    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    bounded_BT = torch.zeros_like(mask_BT)
    if clip_dual > 1.0:
        bound_BT = -advantages_BT * clip_dual
        bounded_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = torch.where(bounded_BT, bound_BT, loss_BT)

    means = _masked_means(mask_BT, clipped_BT > unclipped_BT, bounded_BT, -log_ratio_BT)
    names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
    return loss_BT, dict(zip(names, means, strict=True))


# ---------------------------------------------------------------------------------------------------------- critic


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, value_clip: float
) -> tuple[Tensor, dict[str, float]]:
    """Squared error of the critic, with the value clip of PPO's reference implementation (not in the paper).

        V_clip = clip(V, V_old - value_clip, V_old + value_clip) loss   = 0.5 * max((V - R)^2, (V_clip - R)^2)

    The same pessimism as in the policy: a value that has already moved by value_clip towards the return gets no
    further gradient from this batch. Mind the scale: value_clip is in units of reward.

    Returns the loss per token and the metric `critic/vf_clipfrac`, the share of action tokens that the clip decides.
    """
    mask_BT = mask_BT.bool()
    values_BT, old_values_BT, returns_BT = (
        torch.where(mask_BT, x.float(), 0.0) for x in (values_BT, old_values_BT, returns_BT)
    )
    clipped_values_BT = values_BT.clamp(old_values_BT - value_clip, old_values_BT + value_clip)
    unclipped_BT = (values_BT - returns_BT).square()
    clipped_BT = (clipped_values_BT - returns_BT).square()
    (clipfrac,) = _masked_means(mask_BT, clipped_BT > unclipped_BT)
    return 0.5 * torch.maximum(unclipped_BT, clipped_BT), {"critic/vf_clipfrac": clipfrac}


# ----------------------------------------------------------------------------------------------------- aggregation


def loss_normalizer(
    mask_BT: Tensor, mode: str, horizon: int | None = None, trajectory_B: Tensor | None = None
) -> float:
    """Count what `aggregate_loss` divides by in this mode: tokens or episodes of the mask. Raises KeyError for another.

    Rows with one number in `trajectory_B` are one episode; None means that each row is an episode. Only
    seq-mean-token-sum-norm uses `horizon`; None takes T, the padded width, as verl does.
    """
    length_B = mask_BT.bool().sum(dim=1)
    acted_B = length_B > 0
    episodes = float(acted_B.sum() if trajectory_B is None else len(trajectory_B[acted_B].unique()))
    return {
        "token-mean": float(length_B.sum()),
        "seq-mean-token-mean": episodes,
        "seq-mean-token-sum": episodes,
        "seq-mean-token-sum-norm": episodes * (horizon or mask_BT.shape[1]),
    }[mode]


def episode_tokens(mask_BT: Tensor, trajectory_B: Tensor) -> Tensor:
    """[B]: the tokens of the mask in all rows of a row's episode."""
    length_B = mask_BT.bool().sum(dim=1)
    numbers, index_B = trajectory_B.unique(return_inverse=True)
    return length_B.new_zeros(len(numbers)).index_add_(0, index_B, length_B)[index_B]


def aggregate_loss(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    normalizer: float | None = None,
    episode_tokens_B: Tensor | None = None,
) -> Tensor:
    """Per-token losses to one scalar. Rows without any action token count for nothing.

        token-mean               sum over all tokens / number of tokens: long episodes weigh more (DAPO, 2503.14476,
        3.3) seq-mean-token-mean      mean over episodes of the episode's mean: a token of a long one weighs less (GRPO,
        2402.03300) seq-mean-token-sum       mean over episodes of the episode's sum seq-mean-token-sum-norm  the same /
        horizon, a constant: neither bias of length (Dr. GRPO, 2503.20783)

    An episode that rewrote its context has several rows and one vote. So its mean is over the tokens of all of its
    rows: `episode_tokens_B` has their number. None means that each row is an episode.

    Gradient accumulation: a minibatch that is too large for one pass is cut into micro-batches whose gradients add up.
    Each would divide by its own count; the average of such averages is not the average of the whole, and a token's
    weight would depend on who shared its micro-batch. So pass `normalizer`, the count of the *whole minibatch*
    (`loss_normalizer`), to every micro-batch: the losses then sum to the loss of the minibatch. None means that
    `mask_BT` is the whole minibatch.
    """
    if normalizer is None:
        normalizer = loss_normalizer(mask_BT, mode)
    mask_BT = mask_BT.bool()
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    if mode == "seq-mean-token-mean":
        tokens_B = mask_BT.sum(dim=1) if episode_tokens_B is None else episode_tokens_B
        loss_BT = loss_BT / tokens_B.clamp(min=1)[:, None]
    return loss_BT.sum() / (normalizer or 1.0)  # a minibatch without a single action token has loss 0, not 0/0


# --------------------------------------------------------------------------------------------------- regularisation


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # verl's clamps. One outlier would otherwise be worth exp(20). Where k3 exceeds 10 it stays at 10 and has no
    # gradient: the reference finds the token more than 13 times likelier than the policy (d < -2.6), or exp(11) times
    # less (d > 11).
    back = (-log_ratio).clamp(-20.0, 20.0)
    return (torch.expm1(back) - back).clamp(max=10.0)  # expm1: exp(x) - 1 without cancellation


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Estimators of KL(pi || ref) from d = log pi(x) - log ref(x) at tokens x that pi sampled."""


def kl_penalty(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: str) -> Tensor:
    """How far the policy is from the reference, per sampled token, in nats (Schulman, joschu.net/blog/kl-approx.html).

    With d = logprob - ref_logprob and tokens sampled from pi ("right" means that of KL(pi || ref)):

             value            as an estimate                   expected gradient, when it is added to the loss
        k1   d                unbiased, noisy, often negative  zero! E[grad log pi] = 0
        k2   d^2 / 2          biased, calm, >= 0               right
        k3   exp(-d) - 1 + d  unbiased, calm, >= 0             that of KL(ref || pi), the other direction; the two
             (GRPO's eq. 4)                                    agree while pi is near ref

    So k1 belongs into the *reward* (subtract it from each action token's reward), where the policy gradient treats it
    rightly; in the loss it is only noise. k2 and k3 belong into the loss. Entries outside the mask must be finite.
    """
    return KL_ESTIMATORS[estimator](logprobs_BT.float() - ref_logprobs_BT.float())


def reward_less_kl(
    rewards_BT: Tensor, logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, actor: ActorConfig
) -> tuple[Tensor, float]:
    """KL in the reward: `kl_coef` times the penalty is taken from each action token's reward. Also its mean, in
    nats."""
    kl_BT = torch.where(mask_BT.bool(), kl_penalty(logprobs_BT, ref_logprobs_BT, actor.kl_estimator), 0.0)
    return rewards_BT - actor.kl_coef * kl_BT, (kl_BT.sum() / mask_BT.sum()).item()


# --------------------------------------------------------------------------------------------------------- inside


def _masked_means(mask_BT: Tensor, *columns_BT: Tensor) -> list[float]:
    """Mean of each tensor over the mask, for logs. One transfer from the device for all of them."""
    totals = torch.stack([torch.where(mask_BT, x.detach().float(), 0.0).sum() for x in columns_BT])
    return (totals / mask_BT.sum().clamp(min=1)).tolist()
