"""Compute Llama, Qwen2 and Qwen3 decoders in plain PyTorch.

In: token ids and their positions. Out: hidden states and logits. Next: `sampler.py` samples from
it, `training/` trains it.

Why not a class of `transformers`? Sampler and trainer need the *same* arithmetic with different
attention: a cache that lives across turns, and a plain causal pass. At half a million parameters
the per-call overhead of `transformers` also exceeds the arithmetic. `files.py` reads and
writes Hugging Face's format; a test compares the logits with `transformers`.

The last block runs only at positions whose output is requested (`at_BA`). `cpu_products.py` has the
two products that are faster on a CPU. Both save time, and change only the last bits of results.

The block (pre-norm; RMSNorm 1910.07467, rotary positions 2104.09864, SwiGLU 2002.05202, grouped
queries 2305.13245):

    x = x + W_o . attention(rope(q), rope(k), v)    with q, k, v = W_qkv . norm(x) + b_qkv
    x = x + W_down . (silu(W_gate . norm(x)) * (W_up . norm(x)))

Only Qwen2 has the bias b_qkv. Only Qwen3 normalises each head's q and k before the rotation
(2302.05442).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_r1.model.cpu_products import Linear, attend_by_products, product

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q [B, H, T, head_dim], k and v [B, K, T, head_dim]) -> shape of q.

The caller decides what is visible.

In the last layer, q has only the positions `at`: [B, H, A, head_dim]."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes in a config.json that determine the arithmetic."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_position: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tied: bool = True  # one matrix is both the embedding and the output projection
    family: str = "qwen2"
    head_width: int | None = None  # width of a head; None: hidden_size / heads
    rope_scaling: Callable[[Tensor], Tensor] | None = None
    """Changes the rotary frequencies of Llama 3.1 and 3.2 (`rope_scaling.py`)."""

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden_size // self.heads


class Block(nn.Module):
    """One transformer layer.

    q, k, v share a matrix, and so do gate and up: fewer, larger products.
    """

    def __init__(self, shape: DecoderShape):
        super().__init__()
        d = shape.hidden_size
        head_dim = shape.head_dim
        self.shape = shape
        self.input_norm = nn.RMSNorm(d, eps=shape.rms_norm_eps)
        self.qkv = Linear(
            d, (shape.heads + 2 * shape.kv_heads) * head_dim, bias=shape.family == "qwen2"
        )
        if shape.family == "qwen3":
            self.q_norm, self.k_norm = (
                nn.RMSNorm(head_dim, eps=shape.rms_norm_eps) for _ in range(2)
            )
        self.o = Linear(shape.heads * head_dim, d, bias=False)
        self.post_norm = nn.RMSNorm(d, eps=shape.rms_norm_eps)
        self.gate_up = Linear(d, 2 * shape.intermediate_size, bias=False)
        self.down = Linear(shape.intermediate_size, d, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor],
        layer: int,
        attention: Attention,
        at_BA: Tensor | None,
    ) -> Tensor:
        B, T, _ = x_BTD.shape
        H = self.shape.heads
        K = self.shape.kv_heads
        head_dim = self.shape.head_dim
        qkv = self.qkv(self.input_norm(x_BTD)).view(B, T, H + 2 * K, head_dim).transpose(1, 2)
        # Queries and keys have equal angles, so they are rotated together. `split` beats slices,
        # whose gradients are matrices of zeros to fill and add.
        qk, v = qkv.split([H + K, K], dim=1)
        if self.shape.family == "qwen3":
            q, k = qk.split([H, K], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotate(qk, *rope).split([H, K], dim=1)
        if at_BA is not None:  # other positions are read as keys and values only
            q = q.gather(2, at_BA[:, None, :, None].expand(-1, H, -1, head_dim))
            x_BTD = x_BTD.gather(1, at_BA[:, :, None].expand(-1, -1, x_BTD.shape[2]))
        out = attention(layer, q, k, v)
        x_BTD = x_BTD + self.o(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A decoder whose caller provides the attention."""

    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.shape = shape
        self.recompute = False  # gradient checkpointing: see `trainer.recompute`
        # `nn.Embedding(V, D)` would import PyTorch's compiler on the device "meta"
        # (`files.py`): one second.
        self.embed = nn.Embedding.from_pretrained(
            torch.randn(shape.vocab_size, shape.hidden_size), freeze=False
        )
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.head = (
            None if shape.tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        )
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        attention: Attention,
        at_BA: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [B, T, D] after the last norm.

        `positions_BT` start at 0 in each sequence.

        With `at_BA` (int64, indices into T), return only the states at these positions: [B, A, D].
        """
        x = self.embed(ids_BT)
        rope = self.cos[positions_BT].unsqueeze(1), self.sin[positions_BT].unsqueeze(1)
        recompute = self.recompute and torch.is_grad_enabled()
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            at = at_BA if layer == last else None
            if recompute:
                x = checkpoint(block, x, rope, layer, attention, at, use_reentrant=False)
            else:
                x = block(x, rope, layer, attention, at)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project [..., D] to [..., V].

        Separate from `forward`, because most positions need no logits.
        """
        return product(hidden, self.embed.weight if self.head is None else self.head.weight)

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attend from q [B, H, A, head_dim] to k and v [B, K, T, head_dim].

    `visible` [B or 1, 1, A, T] is bool, or added to the scores. Without it, each token sees itself
    and all before it.
    """
    one_query = q.shape[2] == 1
    if q.device.type == "cpu" and (one_query or q.dtype is torch.bfloat16):
        return attend_by_products(q, k, v, visible)
    shares_heads = q.shape[1] != k.shape[1]  # several query heads share a key-value head
    return F.scaled_dot_product_attention(
        q, k, v, visible, is_causal=visible is None, enable_gqa=shares_heads
    )


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to a token itself and all before it.

    Rows are padded on the *right*, so no real token sees padding.
    """
    return attend(q, k, v)


def causal_attention_at(at_BA: Tensor) -> Attention:
    """Attend as `causal_attention`; in the last layer, only from `at_BA`.

    These are fewer than T positions.
    """

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == k.shape[2]:
            return attend(q, k, v)
        return attend(q, k, v, torch.arange(k.shape[2], device=k.device) <= at_BA[:, None, :, None])

    return attention


def rope_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Tabulate cos and signed sin of position x frequency: [max_position, head_dim].

    The layout is Hugging Face's.
    """
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    if shape.rope_scaling is not None:
        frequency = shape.rope_scaling(frequency)
    angle = torch.outer(torch.arange(shape.max_position).float(), frequency)
    return angle.cos().repeat(1, 2), torch.cat((-angle.sin(), angle.sin()), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + head_dim/2}) by its position's angle.

    Then q.k depends on the distance only.
    """
    # (a, b) -> (a cos - b sin, b cos + a sin). Rolling by half swaps a and b; the table of sines
    # has the sign.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
