"""Run a model on new tokens only; keys and values of earlier tokens are cached.

In: the ids of conversations, each in its slot. Out: the hidden states that predict their next
tokens. `sampler.py` decides what is read when.

Samples of one prompt are often equal for many tokens, the more so the better the agent is trained.
Equal conversations have equal keys, values and hidden states. So only one of them, the *leader*, is
computed, and the others copy its new keys and values. Each samples its next token with its own
noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from agent_r1.model.decoder import Decoder, attend

READ_TOKENS = 4096
"""Limit for one pass over prompts, padding included."""


class KVCache:
    """A model with keys and values of `slots` conversations.

    Shape: [layer][slot, kv head, position, head_dim].
    """

    def __init__(self, model: Decoder, slots: int, length: int):
        s = model.shape
        weight = model.embed.weight
        shape = (s.layers, slots, s.kv_heads, length, s.head_dim)
        self.model = model
        self.length = length
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(
            slots, dtype=torch.long, device=weight.device
        )  # cached tokens of each slot
        self.ids: list[list[int]] = [[] for _ in range(slots)]  # these tokens
        self.hashes = [0] * slots  # of these tokens: equal for equal conversations

    def copy(self, sources: list[int], targets: list[int], begin: int = 0) -> None:
        """Copy the conversations of `sources` to `targets`, equal before position `begin`."""
        source, target = torch.tensor([sources, targets], device=self.lengths.device)
        end = int(self.lengths[source].max())
        for cached in (*self.keys, *self.values):
            part = cached[:, :, begin:end]
            part.index_copy_(0, target, part.index_select(0, source))
        self.lengths[target] = self.lengths[source]
        # All sources are read before any target is written: a slot may be both.
        copies = [(list(self.ids[slot]), self.hashes[slot]) for slot in sources]
        for slot, (ids, ids_hash) in zip(targets, copies, strict=True):
            self.ids[slot] = ids
            self.hashes[slot] = ids_hash

    @torch.inference_mode()
    def read(self, slots: list[int], prompts: list[list[int]]) -> tuple[Tensor, int]:
        """Read the tokens of each prompt that its slot lacks.

        Returns the last hidden state of each prompt [B, D], and the number of tokens that were
        read.
        """
        keeps = [
            _common_prefix(self.ids[slot], prompt)
            for slot, prompt in zip(slots, prompts, strict=True)
        ]
        first_with: dict[tuple[int, tuple[int, ...]], int] = {}
        requests = [(keep, tuple(prompt)) for keep, prompt in zip(keeps, prompts, strict=True)]
        leaders = [first_with.setdefault(request, i) for i, request in enumerate(requests)]
        # At least one token must be read, because the cache has no hidden states.
        new = {
            i: prompts[i][min(keeps[i], len(prompts[i]) - 1) :]
            for i, leader in enumerate(leaders)
            if i == leader
        }
        hidden: dict[int, Tensor] = {}
        for rows in _chunks(new):
            starts = [len(prompts[i]) - len(new[i]) for i in rows]
            hidden |= zip(
                rows,
                self._extend([slots[i] for i in rows], starts, [new[i] for i in rows]),
                strict=True,
            )
        for slot, (_, prompt) in zip(slots, requests, strict=True):
            self.ids[slot] = list(prompt)
            self.hashes[slot] = hash(prompt)
        twins = [i for i, leader in enumerate(leaders) if i != leader]
        if twins:
            begin = min(keeps[i] for i in twins)
            self.copy([slots[leaders[i]] for i in twins], [slots[i] for i in twins], begin)
        tokens = sum(len(ids) for ids in new.values())
        return torch.stack([hidden[leader] for leader in leaders]), tokens

    def _extend(self, slots: list[int], starts: list[int], new: list[list[int]]) -> Tensor:
        """Read the new tokens of several conversations in one pass.

        Return each last hidden state [B, D].
        """
        device = self.lengths.device
        slots_B, starts_B = torch.tensor([slots, starts], device=device)
        counts = [len(ids) for ids in new]
        T = max(counts)
        end = max(start + n for start, n in zip(starts, counts, strict=True))
        ids_BT = torch.tensor([ids + [0] * (T - len(ids)) for ids in new], device=device)
        # Padding writes after the row's end, where the next tokens overwrite it; it only has to
        # stay in bounds.
        positions_BT = (starts_B[:, None] + torch.arange(T, device=device)).clamp(
            max=self.length - 1
        )
        last_B = torch.tensor(counts, device=device) - 1
        bias = self._bias(positions_BT, end)
        bias_of_last = self._bias((starts_B + last_B)[:, None], end)
        rows = slots_B[:, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = self.keys[layer]
            values = self.values[layer]
            keys[rows, :, positions_BT] = k.transpose(1, 2)
            values[rows, :, positions_BT] = v.transpose(1, 2)
            # The last layer has only the last token's query.
            visible = bias if q.shape[2] == T else bias_of_last
            return attend(q, _rows(keys, slots_B, end), _rows(values, slots_B, end), visible)

        self.lengths[slots_B] = starts_B + last_B + 1
        return self.model(ids_BT, positions_BT, attention, last_B[:, None])[:, 0]

    @torch.inference_mode()
    def decode(self, next_ids: dict[int, int]) -> Tensor:
        """Read one token of each given slot, in one pass. Return hidden states [B, D] by slot."""
        slots = sorted(next_ids)
        device = self.lengths.device
        first_with: dict[tuple[int, int], int] = {}
        leaders = [
            first_with.setdefault((self.hashes[slot], next_ids[slot]), slot) for slot in slots
        ]
        rows = sorted(first_with.values())
        # A slice of all slots, also of those that wait for a tool, needs no memory. A copy of 32 MB
        # or more gets new pages from the system each time, in 36 instead of 8 ms (a Xeon).
        few = 2 * len(rows) <= slots[-1] + 1
        if not few:
            rows = range(slots[-1] + 1)
            leaders = slots
        place = {slot: i for i, slot in enumerate(rows)}
        slots_B, from_B = torch.tensor(
            [slots, [place[leader] for leader in leaders]], device=device
        )
        rows_R = torch.tensor(rows, device=device)
        ids_R = torch.tensor([next_ids.get(slot, 0) for slot in rows], device=device)
        positions_R = self.lengths[rows_R].clamp(max=self.length - 1)
        positions_B = self.lengths[slots_B]
        end = int(positions_R.max()) + 1
        bias = self._bias(positions_R[:, None], end)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = self.keys[layer]
            values = self.values[layer]
            keys[slots_B, :, positions_B] = k[from_B, :, 0]
            values[slots_B, :, positions_B] = v[from_B, :, 0]
            if few:
                return attend(q, _rows(keys, rows_R, end), _rows(values, rows_R, end), bias)
            return attend(q, keys[: len(rows), :, :end], values[: len(rows), :, :end], bias)

        hidden = self.model(ids_R[:, None], positions_R[:, None], attention)[:, 0]
        self.lengths[slots_B] += 1
        for slot in slots:
            self.ids[slot].append(next_ids[slot])
            self.hashes[slot] = hash((self.hashes[slot], next_ids[slot]))
        return hidden[from_B]

    def _bias(self, positions_BT: Tensor, end: int) -> Tensor:
        """Return [B, 1, T, end], added to attention scores: -inf after a token's position."""
        later = torch.arange(end, device=positions_BT.device) > positions_BT[:, :, None]
        bias = torch.zeros(later.shape, device=later.device, dtype=self.keys.dtype)
        return bias.masked_fill_(later, -torch.inf)[:, None]


def _rows(cached: Tensor, slots: Tensor, end: int) -> Tensor:
    """Copy keys or values of `slots` before position `end`: [B, kv heads, end, head_dim].

    `cached[slots, :, :end]` gives the same, and takes 3 to 15 times as long on one thread of a CPU.
    """
    return cached[:, :, :end].index_select(0, slots)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that agree. If all of `a` do, one comparison of slices is enough."""
    if b[: len(a)] == a:
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _chunks(new: dict[int, list[int]]) -> Iterator[list[int]]:
    """Group prompts of similar length into passes of at most READ_TOKENS, with padding.

    Prompts are given by number.
    """
    chunk: list[int] = []
    for i in sorted(new, key=lambda i: len(new[i])):
        if chunk and (len(chunk) + 1) * len(new[i]) > READ_TOKENS:
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
