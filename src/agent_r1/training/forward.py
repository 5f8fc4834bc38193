"""Compute log-probabilities, entropies and values at the action tokens of a batch.

Cold start, policy loss, reference model and critic use these functions. They save time and memory
exactly: logits only at action positions, in chunks for a large vocabulary, and rows of similar
length in a micro-batch. Next: `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_r1.ground.device import LOGITS
from agent_r1.rollout.decoder import Decoder
from agent_r1.rollout.training_rows import Batch, scatter
from agent_r1.training.prefix_tree import micro_batches_of


class Critic(nn.Module):
    """PPO's value model: the policy's transformer with one output instead of a vocabulary."""

    def __init__(self, trunk: Decoder):
        super().__init__()
        self.trunk = trunk
        self.value = nn.Linear(trunk.shape.hidden_size, 1)
        nn.init.zeros_(self.value.weight)  # all values start at 0
        nn.init.zeros_(self.value.bias)


def action_logprobs(
    model: Decoder, batch: Batch, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute log pi(token | prefix) and the entropy of pi(. | prefix).

    Both are float32 [B, T], 0 outside action tokens. At the sampling temperature, the first
    recomputes what the sampler recorded. The entropy is None unless requested: it needs as much
    memory as the logits, and the sampler records it.
    """
    hidden_AD, chosen_A, action_A = batch.before_actions(model)

    def chunk_logprobs(hidden_CD: Tensor, chosen_C: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs_CV = F.log_softmax(model.logits(hidden_CD).float() / temperature, dim=-1)
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1) if entropy else None
        return logprobs_CV.gather(1, chosen_C[:, None])[:, 0], entropy_C

    chunk = max(1, LOGITS // model.shape.vocab_size)
    if len(chosen_A) <= chunk:
        parts = [chunk_logprobs(hidden_AD, chosen_A)]
    else:  # only one chunk's logits exist at a time; the backward pass computes them again
        chunks = zip(hidden_AD.split(chunk), chosen_A.split(chunk), strict=True)
        parts = [checkpoint(chunk_logprobs, *pair, use_reentrant=False) for pair in chunks]
    logprobs_A, entropy_A = (
        torch.cat(column) if column[0] is not None else None for column in zip(*parts, strict=True)
    )
    where_BT = batch.mask_BT.bool()
    return scatter(logprobs_A[action_A], where_BT), None if entropy_A is None else scatter(
        entropy_A[action_A], where_BT
    )


def action_values(critic: Critic, batch: Batch) -> Tensor:
    """Compute V(s_t), the value *before* token t is chosen: [B, T], 0 outside action tokens."""
    hidden_AD, _, action_A = batch.before_actions(critic.trunk)
    return scatter(critic.value(hidden_AD)[action_A, 0].float(), batch.mask_BT.bool())


def batch_logprobs(
    model: Decoder, batch: Batch, temperature: float, max_tokens: int, dtype: torch.dtype
) -> Tensor:
    """Compute log pi [B, T] of the batch's action tokens, without gradients."""
    return in_micro_batches(
        lambda part: action_logprobs(model, part, temperature)[0], batch, max_tokens, dtype
    )


@torch.no_grad()
def in_micro_batches(
    forward: Callable[[Batch], Tensor], batch: Batch, max_tokens: int, dtype: torch.dtype
) -> Tensor:
    """Apply `forward` to the whole batch in micro-batches, without gradients; returns [B, T]."""
    out = torch.zeros_like(batch.rewards_BT)
    for index, part in micro_batches_of(batch, max_tokens):
        with autocast(dtype, out.device):
            out[index, : part.ids_BT.shape[1]] = forward(part)
    return out


def autocast(dtype: torch.dtype, device: torch.device):
    """Compute products in `dtype`; weights and optimiser stay in float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)
