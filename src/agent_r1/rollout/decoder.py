"""Compute Llama, Qwen2 and Qwen3 decoders in plain PyTorch.

In: token ids and their positions. Out: hidden states and logits. Next: `sampler.py` samples from
it, `training/` trains it.

Why not a class of `transformers`? Sampler and trainer need the *same* arithmetic with different
attention: a cache that lives across turns, and a plain causal pass. At half a million parameters
the per-call overhead of `transformers` also exceeds the arithmetic. `model_files.py` reads and
writes Hugging Face's format; a test compares the logits with `transformers`.

Three methods save time, and change only the last bits of results. The last block runs only at
positions whose output is requested (`at_BA`). On a CPU, products in float32 use oneDNN (`product`),
and attention may use plain products (`attend`).

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q [B, H, T, head_dim], k and v [B, K, T, head_dim]) -> shape of q. The caller
decides what is visible.

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

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden_size // self.heads


class Linear(nn.Linear):
    """`nn.Linear` through `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
FEWEST_ROWS = 16
"""Smallest product for oneDNN. With fewer rows, reading the weights takes longer than
multiplying."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear(x, weight, bias)`; on a CPU, in float32, with oneDNN's kernels.

    PyTorch's own product calls MKL, which does not use AVX-512 on AMD. On one core of an EPYC,
    [1500, 128] x [128, 384] ran at 85 GFLOP/s with MKL, and at 176 to 222 with oneDNN. PyTorch's
    compiler calls the same operator of oneDNN.
    """
    plain = (
        x.device.type != "cpu" or x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu")
    )
    if plain or not ONEDNN or x.numel() < FEWEST_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return _OneDNNProduct.apply(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)


class _OneDNNProduct(torch.autograd.Function):
    """y = x W^T + b, and its gradients, for x [N, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padded = _whole_blocks(x)
        ctx.save_for_backward(padded, weight)
        ctx.has_bias = bias is not None
        return _onednn(padded, weight, bias)[: len(x)]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad = len(grad_outputs[0]), _whole_blocks(grad_outputs[0])
        grad_x = _onednn(grad, weight.t())[:rows] if ctx.needs_input_grad[0] else None
        # oneDNN copies its first factor if it is transposed: let that be the smaller one.
        narrow = x.shape[1] < grad.shape[1]
        grad_weight = _onednn(x.t(), grad.t()).t() if narrow else _onednn(grad.t(), x.t())
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None


def _whole_blocks(x: Tensor) -> Tensor:
    """Pad with rows of zeros, because oneDNN compiles a kernel for each shape, in milliseconds."""
    missing = -len(x) % (16 if len(x) <= 256 else 64)
    return F.pad(x, (0, 0, 0, missing)) if missing else x  # F.pad copies even if nothing is missing


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Block(nn.Module):
    """One transformer layer.

    q, k, v share a matrix, and so do gate and up: fewer, larger products.
    """

    def __init__(self, shape: DecoderShape):
        super().__init__()
        d, head_dim = shape.hidden_size, shape.head_dim
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
        H, K, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
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
        # (`model_files.py`): one second.
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
        """Return hidden states [B, T, D] after the last norm. `positions_BT` start at 0 in each
        sequence.

        With `at_BA` (int64, indices into T), return only the states at these positions: [B, A, D].
        """
        x = self.embed(ids_BT)
        rope = self.cos[positions_BT].unsqueeze(1), self.sin[positions_BT].unsqueeze(1)
        again = self.recompute and torch.is_grad_enabled()
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            at = at_BA if layer == last else None
            if again:
                x = checkpoint(block, x, rope, layer, attention, at, use_reentrant=False)
            else:
                x = block(x, rope, layer, attention, at)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project [..., D] to [..., V]. Separate from `forward`, because most positions need no
        logits."""
        return product(hidden, self.embed.weight if self.head is None else self.head.weight)

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """Attend from q [B, H, A, head_dim] to k and v [B, K, T, head_dim].

    `visible` [B or 1, 1, A, T] is bool, or added to the scores. Without it, each token sees itself
    and all before it.
    """
    H, K, A, T = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    if q.device.type != "cpu" or (A > 1 and q.dtype is not torch.bfloat16):
        return F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=visible is None, enable_gqa=H != K
        )
    # On a CPU, plain products are faster for one query, and three times as fast in bfloat16. The
    # heads that share a key head are the rows of one matrix.
    visible = (
        torch.ones(A, T, dtype=torch.bool, device=q.device).tril() if visible is None else visible
    )
    if visible.dtype is torch.bool:
        visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    scores = (q * q.shape[3] ** -0.5).reshape(len(q), K, -1, q.shape[3]) @ k.transpose(2, 3)
    weights = (scores.unflatten(2, (H // K, A)) + visible[..., None, :, :]).softmax(dim=-1)
    return (weights.flatten(2, 3).to(v.dtype) @ v).view(q.shape)


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to a token itself and all before it. Rows are padded on the *right*, so no real token
    sees padding."""
    return attend(q, k, v)


def causal_attention_at(at_BA: Tensor) -> Attention:
    """Attend as `causal_attention`; in the last layer, only from `at_BA`, fewer than T
    positions."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == k.shape[2]:
            return attend(q, k, v)
        return attend(q, k, v, torch.arange(k.shape[2], device=k.device) <= at_BA[:, None, :, None])

    return attention


def rope_tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    """Tabulate cos and signed sin of position x frequency in Hugging Face's layout: [max_position,
    head_dim]."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = torch.outer(torch.arange(shape.max_position).float(), frequency)
    return angle.cos().repeat(1, 2), torch.cat((-angle.sin(), angle.sin()), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + head_dim/2}) by its position's angle. Then q.k depends on the
    distance only."""
    # (a, b) -> (a cos - b sin, b cos + a sin). Rolling by half swaps a and b; the table of sines
    # has the sign.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
