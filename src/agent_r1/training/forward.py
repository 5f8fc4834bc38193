"""The forward pass of learning: log-probabilities, entropies and values at the action tokens of a batch.

Cold start, policy loss, reference model and critic all read a batch through these functions. Three savings, all exact:
logits are computed at action positions only (the vocabulary projection is the widest product of a small model), those
of a large vocabulary in chunks, and rows are cut into micro-batches of similar length, so that little is padding. Next:
`loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_r1.ground.device import LOGITS
from agent_r1.rollout.decoder import Decoder, causal_attention
from agent_r1.rollout.rows import Batch, scatter


class Critic(nn.Module):
    """PPO's value model: a transformer of the policy's shape with one number on top instead of a vocabulary."""

    def __init__(self, trunk: Decoder):
        super().__init__()
        self.trunk = trunk
        self.value = nn.Linear(trunk.shape.hidden_size, 1)
        nn.init.zeros_(self.value.weight)  # every value is 0 at first, and not noise
        nn.init.zeros_(self.value.bias)


def action_logprobs(
    model: Decoder, batch: Batch, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log pi(token | prefix) and the entropy of pi(. | prefix), both float32 [B, T] at action tokens, 0 elsewhere.

    With the sampling temperature, the first is what the sampler recorded, computed again. The entropy is None unless
    asked for: it takes as much memory as the logits, and the sampler has it for free.
    """
    hidden_AD, where = _before_actions(model, batch)
    chosen_A = batch.ids_BT[where]

    def read_off(hidden_CD: Tensor, chosen_C: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs_CV = F.log_softmax(model.logits(hidden_CD).float() / temperature, dim=-1)
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1) if entropy else None
        return logprobs_CV.gather(1, chosen_C[:, None])[:, 0], entropy_C

    chunk = max(1, LOGITS // model.shape.vocab_size)
    if len(chosen_A) <= chunk:
        parts = [read_off(hidden_AD, chosen_A)]
    else:  # the logits of one chunk at a time, in the backward pass again
        chunks = zip(hidden_AD.split(chunk), chosen_A.split(chunk), strict=True)
        parts = [checkpoint(read_off, *pair, use_reentrant=False) for pair in chunks]
    logprobs_A, entropy_A = (
        torch.cat(column) if column[0] is not None else None for column in zip(*parts, strict=True)
    )
    return scatter(logprobs_A, where), None if entropy_A is None else scatter(entropy_A, where)


def action_values(critic: Critic, batch: Batch) -> Tensor:
    """V(s_t) [B, T] float32 at action tokens, 0 elsewhere: the value of the state *before* the token was chosen."""
    hidden_AD, where = _before_actions(critic.trunk, batch)
    return scatter(critic.value(hidden_AD)[:, 0].float(), where)


def _before_actions(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states [A, D] from which the A action tokens are predicted, and the tokens' mask [B, T] (bool).

    The state that predicts token t stands at position t - 1, hence the shift. Position 0 is never an action.
    """
    B, T = batch.ids_BT.shape
    positions = torch.arange(T, device=batch.ids_BT.device).expand(B, T)
    hidden = model(batch.ids_BT, positions, causal_attention)
    where = batch.mask_BT.bool()
    return hidden[:, :-1][where[:, 1:]], where


def micro_batches(lengths_B: Tensor, max_tokens: int, rows: Tensor | None = None) -> Iterator[Tensor]:
    """Indices of (some) rows, by length, in groups whose padded size (rows x longest) stays below `max_tokens`."""
    rows = torch.arange(len(lengths_B), device=lengths_B.device) if rows is None else rows
    order = rows[lengths_B[rows].argsort(descending=True, stable=True)]
    start = 0
    while start < len(order):
        count = max(1, max_tokens // int(lengths_B[order[start]]))
        yield order[start : start + count]
        start += count


def batch_logprobs(model: Decoder, batch: Batch, temperature: float, max_tokens: int, dtype: torch.dtype) -> Tensor:
    """log pi [B, T] of the whole batch's action tokens, without gradients."""
    return in_micro_batches(lambda part: action_logprobs(model, part, temperature)[0], batch, max_tokens, dtype)


@torch.no_grad()
def in_micro_batches(forward: Callable[[Batch], Tensor], batch: Batch, max_tokens: int, dtype: torch.dtype) -> Tensor:
    """`forward` over the whole batch, [B, T], a micro-batch at a time and without gradients."""
    out = torch.zeros_like(batch.rewards_BT)
    for index in micro_batches(batch.lengths_B, max_tokens):
        part = batch[index]
        with autocast(dtype, out.device):
            out[index, : part.ids_BT.shape[1]] = forward(part)
    return out


def autocast(dtype: torch.dtype, device: torch.device):
    """Mixed precision: weights and optimiser stay in float32, products run in `dtype`."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)
