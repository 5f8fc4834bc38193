"""Compute the losses of the policy and the critic.

In: log-probabilities of the action tokens, now and before the batch's first update, advantages and
values. Out: a loss per token and, from `aggregate_loss`, the scalar for `backward`. Next:
`forward.py` computes the log-probabilities and values. The loop, or verl, steps the optimiser.

Per-token functions accept any shape (written BT) and compute in float32. In functions with a mask,
masked entries, even NaN, reach neither loss nor gradient. Metric names are verl's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Ratios = Callable[[Tensor, Tensor], Tensor]
"""Maps log-ratios [B, T] and the action mask to the ratios that are clipped."""

# ------------------------------------------------------------------------------------------- policy


def token_ratios(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute pi / pi_old of each token."""
    return log_ratio_BT.exp()


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
    ratios: Ratios = token_ratios,
) -> tuple[Tensor, dict[str, float]]:
    """Compute PPO's clipped surrogate (1707.06347, eq. 7), negated for a minimiser.

        ratio = exp(logprob - old_logprob)         pi / pi_old of the token
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))

    The maximum is pessimistic: a token that has moved beyond the clip in the direction of A gets no
    gradient. So the same samples can be used for several updates. On a move in the wrong direction
    only dual clip acts.

    `clip_high > clip_low` is clip-higher (DAPO, 2503.14476, section 3.1). With 0.2, a token of
    probability 0.01 gets no gradient of its own beyond 0.012.

    Dual clip (1912.09729): for A < 0, loss = min(loss, -A * clip_dual). Otherwise the loss grows
    without bound with the ratio, and one token could dominate a batch. `clip_dual <= 1` disables
    it.

    `ratios` maps log-ratios of tokens to ratios, e.g. one per step or sequence (actor.ratio_level).

    Returns the loss per token and three means over action tokens. `actor/pg_clipfrac` is the share
    where the clip is active, `actor/pg_clipfrac_lower` the share where dual clip is, and
    `actor/ppo_kl` the k1 estimate of KL(old || new).
    """
    mask_BT = mask_BT.bool()
    # where() comes first: a NaN that is masked out only at the end still has the gradient 0 * NaN,
    # which is NaN.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT.float() - old_logprobs_BT.float(), 0.0)
    log_ratio_BT = log_ratio_BT.clamp(-20.0, 20.0)  # exp(20) = 5e8: finite, and far beyond any clip
    advantages_BT = torch.where(mask_BT, advantages_BT.float(), 0.0)
    # 1 in the first minibatch of a step, up to rounding: no update has happened yet (lesson 6).
    ratio_BT = ratios(log_ratio_BT, mask_BT)

    # Two losses per token; the maximum is taken per token, never of the sums.
    unclipped_loss_BT = -advantages_BT * ratio_BT
    clipped_loss_BT = -advantages_BT * ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_BT = torch.maximum(unclipped_loss_BT, clipped_loss_BT)
    is_bounded_BT = torch.zeros_like(mask_BT)
    if clip_dual > 1.0:
        # With A = -1 and a ratio of 50, the loss would be 50: as much as 50 tokens have together.
        bound_BT = -advantages_BT * clip_dual
        is_bounded_BT = (advantages_BT < 0) & (loss_BT > bound_BT)
        loss_BT = torch.where(is_bounded_BT, bound_BT, loss_BT)

    means = _average_over_mask(
        mask_BT, clipped_loss_BT > unclipped_loss_BT, is_bounded_BT, -log_ratio_BT
    )
    names = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")
    return loss_BT, dict(zip(names, means, strict=True))


# ------------------------------------------------------------------------------------------- critic


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, value_clip: float
) -> tuple[Tensor, dict[str, float]]:
    """Compute the critic's squared error with a value clip.

        V_clip = clip(V, V_old - value_clip, V_old + value_clip)
        loss   = 0.5 * max((V - R)^2, (V_clip - R)^2)

    The clip is from PPO's reference implementation, not the paper. A value that has moved by more
    than value_clip towards the return gets no gradient. value_clip is in units of reward.

    Returns the loss per token and `critic/vf_clipfrac`, the share of action tokens where the clip
    is active.
    """
    mask_BT = mask_BT.bool()
    values_BT = torch.where(mask_BT, values_BT.float(), 0.0)
    old_values_BT = torch.where(mask_BT, old_values_BT.float(), 0.0)
    returns_BT = torch.where(mask_BT, returns_BT.float(), 0.0)
    # The value before any update of this step is the centre, as the ratio's denominator is for the
    # policy: several minibatches may then use the same returns.
    clipped_values_BT = values_BT.clamp(old_values_BT - value_clip, old_values_BT + value_clip)
    unclipped_loss_BT = (values_BT - returns_BT).square()
    clipped_loss_BT = (clipped_values_BT - returns_BT).square()
    loss_BT = 0.5 * torch.maximum(unclipped_loss_BT, clipped_loss_BT)
    [clipfrac] = _average_over_mask(mask_BT, clipped_loss_BT > unclipped_loss_BT)
    return loss_BT, {"critic/vf_clipfrac": clipfrac}


# -------------------------------------------------------------------------------------- aggregation


def loss_normalizer(
    mask_BT: Tensor, mode: str, horizon: int | None = None, trajectory_B: Tensor | None = None
) -> float:
    """Return the divisor of `aggregate_loss`: tokens, episodes or episodes x horizon. Raise
    KeyError for an unknown mode.

    Rows with equal `trajectory_B` are one episode; if it is None, each row is an episode. `horizon`
    is for seq-mean-token-sum-norm; if it is None, T, the padded width, is used, as in verl.
    """
    length_B = mask_BT.bool().sum(dim=1)
    # A row in which nothing was sampled has no loss, so it must not count as an episode either.
    has_action_B = length_B > 0
    if trajectory_B is None:
        episodes = float(has_action_B.sum())
    else:
        episodes = float(len(trajectory_B[has_action_B].unique()))
    return {
        "token-mean": float(length_B.sum()),
        "seq-mean-token-mean": episodes,
        "seq-mean-token-sum": episodes,
        "seq-mean-token-sum-norm": episodes * (horizon or mask_BT.shape[1]),
    }[mode]


def episode_tokens(mask_BT: Tensor, trajectory_B: Tensor) -> Tensor:
    """Count the action tokens in all rows of each row's episode: [B]."""
    length_B = mask_BT.bool().sum(dim=1)
    numbers, index_B = trajectory_B.unique(return_inverse=True)
    # Add the rows up per trajectory, then give each row its trajectory's sum.
    return length_B.new_zeros(len(numbers)).index_add_(0, index_B, length_B)[index_B]


def aggregate_loss(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    normalizer: float | None = None,
    episode_tokens_B: Tensor | None = None,
) -> Tensor:
    """Reduce per-token losses to a scalar. Rows without action tokens do not count.

        token-mean               sum over all tokens / number of tokens: long episodes weigh more
                                 (DAPO, 2503.14476, 3.3)
        seq-mean-token-mean      mean over episodes of the episode's mean: a token of a long one
                                 weighs less (GRPO, 2402.03300)
        seq-mean-token-sum       mean over episodes of the episode's sum
        seq-mean-token-sum-norm  the same / horizon, a constant: no length changes a token's weight
                                 (Dr. GRPO, 2503.20783)

    An episode with several rows (a rewritten context) counts once: `episode_tokens_B` has the
    number of tokens in all of its rows. If it is None, each row is an episode.

    A minibatch too large for one pass is cut into micro-batches whose gradients add up. Each must
    divide by the count of the *whole minibatch*, so pass that as `normalizer` (`loss_normalizer`).
    With its own count, a token's weight would depend on the rest of its micro-batch. If it is None,
    `mask_BT` is the whole minibatch.
    """
    if normalizer is None:
        normalizer = loss_normalizer(mask_BT, mode)
    mask_BT = mask_BT.bool()
    # The action mask at work: 590 of the 764 tokens of lesson 3's group get no gradient here.
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    if mode == "seq-mean-token-mean":
        # Divide by the tokens of the whole episode: a row of an episode that rewrote its context
        # must not count as much as an episode.
        tokens_B = mask_BT.sum(dim=1) if episode_tokens_B is None else episode_tokens_B
        loss_BT = loss_BT / tokens_B.clamp(min=1)[:, None]
    return loss_BT.sum() / (normalizer or 1.0)  # without any action token the loss is 0, not 0/0


# ----------------------------------------------------------------------------------- regularisation


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    # verl's clamps: one outlier could otherwise reach exp(20). Above 10, k3 is constant and has no
    # gradient. There the reference gives the token over 13 times the policy's probability (d <
    # -2.6), or exp(11) times less likely (d > 11).
    back = (-log_ratio).clamp(-20.0, 20.0)
    return (torch.expm1(back) - back).clamp(max=10.0)  # expm1: exp(x) - 1 without cancellation


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Estimators of KL(pi || ref) from d = log pi(x) - log ref(x) at tokens x that pi sampled."""


def kl_penalty(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: str) -> Tensor:
    """Estimate the KL of the policy from the reference per sampled token, in nats.

    From Schulman (joschu.net/blog/kl-approx.html), with d = logprob - ref_logprob at tokens sampled
    from pi. "Exact" is the gradient of KL(pi || ref):

             value            as an estimate                expected gradient, if in the loss
        k1   d                unbiased, noisy, often < 0    zero: E[grad log pi] = 0
        k2   d^2 / 2          biased, low variance, >= 0    exact
        k3   exp(-d) - 1 + d  unbiased below the clamp,     that of KL(ref || pi), the other
             (GRPO's eq. 4)   low variance near ref, >= 0   direction; both agree while pi is near

    So subtract k1 from each action token's *reward*; in the loss it is only noise. k2 and k3 belong
    in the loss. Masked entries must be finite.
    """
    return KL_ESTIMATORS[estimator](logprobs_BT.float() - ref_logprobs_BT.float())


# ------------------------------------------------------------------------------------------- inside


def _average_over_mask(mask_BT: Tensor, *columns_BT: Tensor) -> list[float]:
    """Average each tensor over the mask, for logs, with one transfer from the device."""
    totals = torch.stack([torch.where(mask_BT, x.detach().float(), 0.0).sum() for x in columns_BT])
    return (totals / mask_BT.sum().clamp(min=1)).tolist()
