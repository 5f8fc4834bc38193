"""Run a model on new tokens only; keys and values of earlier tokens are cached.

In: the ids of conversations, each in its slot. Out: the hidden states that predict their next tokens. `sampler.py`
decides what is read when.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1.rollout.decoder import Decoder

READ_TOKENS = 4096
"""Limit for one pass over prompts, padding included."""


class KVCache:
    """A model with keys and values of `slots` conversations: [layer][slot, kv head, position, head_dim]."""

    def __init__(self, model: Decoder, slots: int, length: int):
        s, weight = model.shape, model.embed.weight
        shape = (s.layers, slots, s.kv_heads, length, s.head_dim)
        self.model, self.length = model, length
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=weight.device)  # cached tokens of each slot
        self.ids: list[list[int]] = [[] for _ in range(slots)]  # these tokens

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the conversations of `sources` to `targets`."""
        source, target = torch.tensor([sources, targets], device=self.lengths.device)
        end = int(self.lengths[source].max())
        self.keys[:, target, :, :end] = self.keys[:, source, :, :end]
        self.values[:, target, :, :end] = self.values[:, source, :, :end]
        self.lengths[target] = self.lengths[source]
        for slot, ids in zip(targets, [list(self.ids[slot]) for slot in sources], strict=True):
            self.ids[slot] = ids

    @torch.inference_mode()
    def read(self, slots: list[int], prompts: list[list[int]]) -> tuple[Tensor, int]:
        """Read the tokens of each prompt that its slot lacks.

        Returns the last hidden state of each prompt [B, D], and the number of tokens that were read.
        """
        keeps = [_common_prefix(self.ids[slot], prompt) for slot, prompt in zip(slots, prompts, strict=True)]
        # Samples of one prompt arrive together (GRPO's group): read it once and copy the cache.
        first_with: dict[tuple[int, ...], int] = {}
        leaders = [
            i if keep else first_with.setdefault(tuple(prompt), i)
            for i, (keep, prompt) in enumerate(zip(keeps, prompts, strict=True))
        ]
        # At least one token must be read, because the cache has no hidden states.
        new = {i: prompts[i][min(keeps[i], len(prompts[i]) - 1) :] for i, leader in enumerate(leaders) if i == leader}
        hidden: dict[int, Tensor] = {}
        for rows in _chunks(new):
            starts = [len(prompts[i]) - len(new[i]) for i in rows]
            hidden |= zip(rows, self._extend([slots[i] for i in rows], starts, [new[i] for i in rows]), strict=True)
        for slot, prompt in zip(slots, prompts, strict=True):
            self.ids[slot] = list(prompt)
        if twins := [i for i, leader in enumerate(leaders) if i != leader]:
            self.copy([slots[leaders[i]] for i in twins], [slots[i] for i in twins])
        return torch.stack([hidden[leader] for leader in leaders]), sum(map(len, new.values()))

    def _extend(self, slots: list[int], starts: list[int], new: list[list[int]]) -> Tensor:
        """Read the new tokens of several conversations in one pass. Return each last hidden state [B, D]."""
        device = self.lengths.device
        slots_B, starts_B = torch.tensor([slots, starts], device=device)
        counts = [len(ids) for ids in new]
        T, end = max(counts), max(start + n for start, n in zip(starts, counts, strict=True))
        ids_BT = torch.tensor([ids + [0] * (T - len(ids)) for ids in new], device=device)
        # Padding writes after the row's end, where the next tokens overwrite it; it only has to stay in bounds.
        positions_BT = (starts_B[:, None] + torch.arange(T, device=device)).clamp(max=self.length - 1)
        visible = torch.arange(end, device=device) <= positions_BT[:, :, None]  # [B, T, end]: causal, own slot only
        rows = slots_B[:, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[rows, :, positions_BT] = k.transpose(1, 2)
            values[rows, :, positions_BT] = v.transpose(1, 2)
            return _attend(q, keys[slots_B, :, :end], values[slots_B, :, :end], visible[:, None])

        hidden = self.model(ids_BT, positions_BT, attention)
        last_B = torch.tensor(counts, device=device) - 1
        self.lengths[slots_B] = starts_B + last_B + 1
        return hidden[torch.arange(len(new), device=device), last_B]

    @torch.inference_mode()
    def decode(self, next_ids: dict[int, int]) -> Tensor:
        """Read one token of each given slot, in one pass over slots 0..n-1. Return hidden states [B, D] by slot.

        Slots between them, whose episodes wait for a tool, get a dummy token. Its keys are one position after the
        conversation, where the next real token overwrites them.
        """
        slots = sorted(next_ids)
        n, device = slots[-1] + 1, self.lengths.device
        ids = torch.tensor([[next_ids.get(slot, 0)] for slot in range(n)], device=device)
        positions = self.lengths[:n].clamp(max=self.length - 1)
        end = int(positions.max()) + 1
        visible = torch.arange(end, device=device) <= positions[:, None]
        bias = torch.zeros(visible.shape, device=device, dtype=self.keys.dtype).masked_fill_(~visible, -torch.inf)
        every = torch.arange(n, device=device)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[every, :, positions] = k[:, :, 0]
            values[every, :, positions] = v[:, :, 0]
            return _attend(q, keys[:n, :, :end], values[:n, :, :end], bias[:, None, None])

        hidden = self.model(ids, positions[:, None], attention)[:, 0]
        self.lengths[slots] += 1
        for slot in slots:
            self.ids[slot].append(next_ids[slot])
        return hidden[slots]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that agree. If all of `a` do, one comparison of slices is enough."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _chunks(new: dict[int, list[int]]) -> Iterator[list[int]]:
    """Group prompts of similar length, by number, into passes of at most READ_TOKENS, padding included."""
    chunk: list[int] = []
    for i in sorted(new, key=lambda i: len(new[i])):
        if chunk and (len(chunk) + 1) * len(new[i]) > READ_TOKENS:
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
