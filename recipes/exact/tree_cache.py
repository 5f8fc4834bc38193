"""Run a model on a tree of tokens, each token once.

In: histories that grow from one another. Out: log-probabilities of their next tokens. Next:
`tree.py` decides which histories grow.

The sampler's cache (src/agent_r1) has a slot per conversation, so two plays that part would copy
their common beginning. Here a token's keys and values are stored once, and a history is the list of
their places. A branch costs nothing, and a history that waits for a lower threshold is not read
again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1 import Decoder, attend

READ_TOKENS = 4096
"""Tokens that the histories of one pass have in all, padding included.

With a width of 128, the keys or values of a layer are then 2 MB. With four times as many, 18 of 41
CPU seconds went to memory that the allocator gave back to the system after each pass.
"""


class TreeCache:
    """A model with the keys and values of many histories that share their beginnings."""

    def __init__(self, model: Decoder, context: int):
        shape = model.shape
        self.model = model
        self.context = context
        # Place 0 takes what padding writes. It is never visible.
        self.keys = torch.zeros(shape.layers, 1, shape.kv_heads, shape.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.tokens = 1
        self.paths = torch.zeros(1, context, dtype=torch.int32)
        self.lengths = [0]  # history 0 has no tokens
        self.tokens_read = 0

    @torch.inference_mode()
    def extend(
        self, parents: list[int], prefixes: list[int], new: list[list[int]], temperature: float
    ) -> tuple[list[int], Tensor]:
        """Append `new` tokens to the first tokens of other histories.

        Returns the numbers of the new histories, and the log-probabilities [B, V] of their next
        tokens at this temperature.
        """
        numbers: list[int] = [0] * len(new)
        logprobs: dict[int, Tensor] = {}
        # Similar lengths together: padding is computed, too.
        order = sorted(range(len(new)), key=lambda i: (len(new[i]), prefixes[i]))
        while order:
            size = max(1, READ_TOKENS // (prefixes[order[0]] + len(new[order[0]])))
            chunk = [i for i in order[:size] if len(new[i]) <= 2 * len(new[order[0]])]
            order = order[len(chunk) :]
            hidden_BD = self._read(
                [parents[i] for i in chunk], [prefixes[i] for i in chunk], [new[i] for i in chunk]
            )
            logits_BV = self.model.logits(hidden_BD).float() / temperature
            first = len(self.lengths) - len(chunk)
            for place, (i, row_V) in enumerate(zip(chunk, logits_BV.log_softmax(-1), strict=True)):
                numbers[i] = first + place
                logprobs[i] = row_V
        return numbers, torch.stack([logprobs[i] for i in range(len(new))])

    def _read(self, parents: list[int], prefixes: list[int], new: list[list[int]]) -> Tensor:
        """Read the new tokens in one pass. Return each last hidden state: [B, D]."""
        counts = [len(ids) for ids in new]
        B = len(new)
        T = max(counts)
        prefix_B = torch.tensor(prefixes)
        count_B = torch.tensor(counts)
        first = self._make_room(sum(counts), B)
        real_BT = torch.arange(T) < count_B[:, None]
        places_BT = torch.zeros(B, T, dtype=torch.long)
        places_BT[real_BT] = torch.arange(sum(counts)) + self.tokens - sum(counts)
        positions_BT = (prefix_B[:, None] + torch.arange(T)).clamp(max=self.context - 1)
        L = int((prefix_B + count_B).max())
        # The path of a history is its parent's, cut after the prefix, and its new places.
        path_BL = self.paths[torch.tensor(parents), :L].long()
        path_BL[torch.arange(L) >= prefix_B[:, None]] = 0
        rows_BT = torch.arange(B)[:, None].expand(B, T)
        path_BL[rows_BT[real_BT], positions_BT[real_BT]] = places_BT[real_BT]
        self.paths[first : first + B, :L] = path_BL.int()
        self.lengths += (prefix_B + count_B).tolist()
        visible_B1TL = (torch.arange(L) <= positions_BT[:, :, None])[:, None]
        last_B = count_B - 1
        visible_of_last = visible_B1TL[torch.arange(B), :, last_B][:, :, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = self.keys[layer]
            values = self.values[layer]
            keys[places_BT] = k.transpose(1, 2)
            values[places_BT] = v.transpose(1, 2)
            visible = visible_B1TL if q.shape[2] == T else visible_of_last
            return attend(q, _along(keys, path_BL), _along(values, path_BL), visible)

        ids_BT = torch.zeros(B, T, dtype=torch.long)
        ids_BT[real_BT] = torch.tensor([token for ids in new for token in ids])
        self.tokens_read += sum(counts)
        return self.model(ids_BT, positions_BT, attention, last_B[:, None])[:, 0]

    def _make_room(self, tokens: int, histories: int) -> int:
        """Make room for more tokens and histories. Return the number of the first history."""
        while self.tokens + tokens > self.keys.shape[1]:
            self.keys = torch.cat((self.keys, torch.zeros_like(self.keys)), dim=1)
            self.values = torch.cat((self.values, torch.zeros_like(self.values)), dim=1)
        first = len(self.lengths)
        while first + histories > len(self.paths):
            self.paths = torch.cat((self.paths, torch.zeros_like(self.paths)))
        self.tokens += tokens
        return first


def _along(cached: Tensor, path_BL: Tensor) -> Tensor:
    """Copy keys or values of the tokens along each path: [B, kv heads, L, head_dim].

    `cached[path_BL].transpose(1, 2)` has the same numbers. On one thread of a CPU, index_select
    takes a quarter of its time or less, and a product of what lies in order an eighth.
    """
    rows = cached.index_select(0, path_BL.flatten())
    return rows.unflatten(0, path_BL.shape).transpose(1, 2).contiguous()
