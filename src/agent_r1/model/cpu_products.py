"""Multiply matrices, and attend, in the ways that are fastest on a CPU.

In: the operands of a linear layer or of attention. Out: the results of PyTorch's own functions, up
to the last bits. `decoder.py` calls `product`, through `Linear`, and `attend_by_products`; nothing
else depends on what a CPU does well. On a GPU the first is `F.linear`, and the second is not used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` through `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
FEWEST_ROWS = 16
"""Smallest product for oneDNN.

With fewer rows, reading the weights takes longer than multiplying.
"""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear(x, weight, bias)`; on a CPU, in float32, with oneDNN's kernels.

    PyTorch's own product calls MKL, which does not use AVX-512 on AMD. On one core of an EPYC,
    [1500, 128] x [128, 384] ran at 85 GFLOP/s with MKL, and at 176 to 222 with oneDNN. PyTorch's
    compiler calls the same operator of oneDNN.
    """
    on_cpu_in_float32 = x.device.type == "cpu" and x.dtype is torch.float32
    if not ONEDNN or not on_cpu_in_float32 or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if rows < FEWEST_ROWS:
        return F.linear(x, weight, bias)
    return _OneDNNProduct.apply(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)


class _OneDNNProduct(torch.autograd.Function):
    """y = x W^T + b, and its gradients, for x [N, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x_blocks = _whole_blocks(x)
        ctx.save_for_backward(x_blocks, weight)
        ctx.has_bias = bias is not None
        return _onednn(x_blocks, weight, bias)[: len(x)]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = len(grad_outputs[0])
        grad = _whole_blocks(grad_outputs[0])
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


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Compute `decoder.attend` with two plain products.

    On a CPU this is faster than PyTorch's attention for one query, and three times as fast in
    bfloat16.
    """
    H = q.shape[1]
    K = k.shape[1]
    A = q.shape[2]
    T = k.shape[2]
    if visible is None:
        visible = torch.ones(A, T, dtype=torch.bool, device=q.device).tril()
    if visible.dtype is torch.bool:
        visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
    # The heads that share a key head are the rows of one matrix.
    scores = (q * q.shape[3] ** -0.5).reshape(len(q), K, -1, q.shape[3]) @ k.transpose(2, 3)
    weights = (scores.unflatten(2, (H // K, A)) + visible[..., None, :, :]).softmax(dim=-1)
    return (weights.flatten(2, 3).to(v.dtype) @ v).view(q.shape)
