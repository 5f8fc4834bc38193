"""Compute ratios of whole spans for the policy loss (GSPO, 2507.18071, eq. 7 and 14).

In: the tokens' log-ratios. Out: what `losses.policy_loss` uses instead of their ratios
(`actor.ratio_level=step` and `sequence`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def step_ratios(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Average over each run of sampled tokens; a token of the environment ends a run."""
    return _means(log_ratio_BT, (mask_BT & ~F.pad(mask_BT, (1, -1))).cumsum(dim=1) * mask_BT)


def sequence_ratios(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Average over each token's row."""
    return _means(log_ratio_BT, mask_BT.long())


def _means(log_ratio_BT: Tensor, run_BT: Tensor) -> Tensor:
    """Return the geometric mean of the ratios of a token's run.

    Run 0 has the unsampled tokens. A long turn of slightly likelier tokens is one small move, which
    is clipped as a whole or not at all. Each token keeps the gradient of its own log-probability,
    and takes only the value from its span.
    """
    own_BT = log_ratio_BT.detach()
    rows, tokens = own_BT.shape
    # A row of T tokens has at most T runs, and run 0: column r of the sums is run r.
    sums_BR = own_BT.new_zeros(rows, tokens + 1).scatter_add_(1, run_BT, own_BT)
    lengths_BR = own_BT.new_zeros(rows, tokens + 1).scatter_add_(1, run_BT, torch.ones_like(own_BT))
    mean_BT = (sums_BR / lengths_BR.clamp(min=1)).gather(1, run_BT)
    # The difference is 0, with the gradient of the token's own log-probability.
    return (log_ratio_BT - own_BT + mean_BT).exp()
