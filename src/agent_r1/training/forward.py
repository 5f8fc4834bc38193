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
from agent_r1.model.decoder import Decoder, causal_attention_at
from agent_r1.rollout.training_rows import Batch, scatter
from agent_r1.training.prefix_tree import SharedRows, micro_batches_of, places_of, select_rows


class Critic(nn.Module):
    """PPO's value model: the policy's transformer with one output instead of a vocabulary."""

    def __init__(self, trunk: Decoder):
        super().__init__()
        self.trunk = trunk
        self.value = nn.Linear(trunk.shape.hidden_size, 1)
        # All values start at 0, within the range of rewards; random ones could be far outside it.
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)


def states_before_actions(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states that predict the actions [A, D], the actions [A], and their numbers.

    In plain rows A are all action tokens, row by row, and their numbers are 0, 1, 2, ... Rows that
    share beginnings share actions too (prefix_tree.py). Then A are the distinct ones, and the
    numbers say for each action of each row which of the A it is.
    """
    action_BT = batch.mask_BT.bool()
    if isinstance(batch, SharedRows):
        return batch.tree.before_actions(model, action_BT)
    ids_BT = batch.ids_BT
    assert ids_BT is not None  # only verl's batches have none, and they serve the estimators alone
    B, T = ids_BT.shape
    positions_BT = torch.arange(T, device=ids_BT.device).expand(B, T)
    # The state at position t - 1 predicts token t. The mask without its first column, read from
    # position 0, is true exactly there. Position 0 itself is never an action.
    before_BA, real_BA = places_of(action_BT[:, 1:])
    # Only at these positions: in the eight episodes of lesson 3, that is 174 of 764.
    hidden_BAD = model(ids_BT, positions_BT, causal_attention_at(before_BA), before_BA)
    tokens_A = ids_BT[action_BT]
    return hidden_BAD[real_BA], tokens_A, torch.arange(len(tokens_A), device=tokens_A.device)


def action_logprobs(
    model: Decoder, batch: Batch, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute log pi(token | prefix) and the entropy of pi(. | prefix).

    Both are float32 [B, T], 0 outside action tokens. At the sampling temperature, the first
    recomputes what the sampler recorded. The entropy is None unless requested: it needs as much
    memory as the logits, and the sampler records it.
    """
    hidden_AD, tokens_A, number_A = states_before_actions(model, batch)

    def chunk_logprobs(hidden_CD: Tensor, tokens_C: Tensor) -> tuple[Tensor, Tensor | None]:
        # float32 before the softmax: bfloat16 keeps 8 bits, too few to compare two policies.
        logprobs_CV = F.log_softmax(model.logits(hidden_CD).float() / temperature, dim=-1)
        entropy_C = None
        if entropy:
            entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
        # Of V probabilities, only that of the token that was really sampled.
        return logprobs_CV.gather(1, tokens_C[:, None])[:, 0], entropy_C

    # Logits are the largest tensor of training. In Qwen's vocabulary of 151,936 tokens, those of
    # 1,000 action tokens take 0.6 GB. So only one chunk's logits exist at a time (110 tokens), and
    # the backward pass computes them again.
    chunk = max(1, LOGITS // model.shape.vocab_size)
    if len(tokens_A) <= chunk:
        logprobs_A, entropy_A = chunk_logprobs(hidden_AD, tokens_A)
    else:
        logprobs = []
        entropies = []
        for hidden_CD, tokens_C in zip(hidden_AD.split(chunk), tokens_A.split(chunk), strict=True):
            logprobs_C, entropy_C = checkpoint(
                chunk_logprobs, hidden_CD, tokens_C, use_reentrant=False
            )
            logprobs.append(logprobs_C)
            entropies.append(entropy_C)
        logprobs_A = torch.cat(logprobs)
        entropy_A = torch.cat(entropies) if entropy else None
    where_BT = batch.mask_BT.bool()
    # Back to the rows: each of their actions reads the entry that it shares.
    logprobs_BT = scatter(select_rows(logprobs_A, number_A), where_BT)
    entropy_BT = None
    if entropy_A is not None:
        entropy_BT = scatter(select_rows(entropy_A, number_A), where_BT)
    return logprobs_BT, entropy_BT


def action_values(critic: Critic, batch: Batch) -> Tensor:
    """Compute V(s_t), the value *before* token t is chosen: [B, T], 0 outside action tokens."""
    # The state at t - 1 has not read token t: V must not know the action that it is a baseline for.
    hidden_AD, _, number_A = states_before_actions(critic.trunk, batch)
    values_A = select_rows(critic.value(hidden_AD)[:, 0], number_A)
    return scatter(values_A.float(), batch.mask_BT.bool())


def batch_logprobs(
    model: Decoder, batch: Batch, temperature: float, max_tokens: int, dtype: torch.dtype
) -> Tensor:
    """Compute log pi [B, T] of the batch's action tokens, without gradients."""

    def logprobs_of(part: Batch) -> Tensor:
        return action_logprobs(model, part, temperature)[0]

    return in_micro_batches(logprobs_of, batch, max_tokens, dtype)


@torch.no_grad()
def in_micro_batches(
    forward: Callable[[Batch], Tensor], batch: Batch, max_tokens: int, dtype: torch.dtype
) -> Tensor:
    """Apply `forward` to the whole batch in micro-batches, without gradients; returns [B, T]."""
    # float32 [B, T], as the rewards are; zero wherever no action is.
    out = torch.zeros_like(batch.rewards_BT)
    for index, part in micro_batches_of(batch, max_tokens):
        with autocast(dtype, out.device):
            # A micro-batch is cut to its own longest row; what is right of it stays 0.
            out[index, : part.ids_BT.shape[1]] = forward(part)
    return out


def autocast(dtype: torch.dtype, device: torch.device):
    """Compute products in `dtype`; weights and optimiser stay in float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)
