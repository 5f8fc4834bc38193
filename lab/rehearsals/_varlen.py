"""Replace flash-attn's kernels by plain PyTorch, to run a GPU's packed rows on a CPU.

`install` provides a module named `flash_attn` and tells transformers that it works on a CPU.
Packing (`use_remove_padding`), position ids, transformers' dispatch and the unpacking of
log-probabilities are then the GPU's code. Only the kernel differs. A test compares it with padded
rows (tests/test_varlen.py).

Only _gpu_worker.py, which each verl process imports in a rehearsal, calls `install`.
"""

# transformers has no public way to say that flash-attn is there, and PyTorch declares `backward`
# for any number of gradients.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention of [B, T, H, D] queries over [B, T, K, D] keys.

    H is a multiple of K.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute attention over concatenated rows: [tokens, H, D].

    Row i is tokens cu_seqlens[i] to cu_seqlens[i + 1].
    """
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError("queries and keys of different lengths: training never has them")
    ends = cu_seqlens_q.tolist()
    rows = [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    parts = [
        flash_attn_func(q[None, r], k[None, r], v[None, r], dropout_p, softmax_scale, causal)[0]
        for r in rows
    ]
    return torch.cat(parts)


class _CrossEntropy(torch.autograd.Function):
    """Compute -log softmax(logits)[label] of each row, in float32.

    Like the kernel, it keeps the logits and one number per row, and backward may overwrite the
    logits by the gradient. So there is no second matrix of the vocabulary's width.
    """

    ROWS = 64

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, in_place: bool) -> Tensor:
        log_sum = torch.cat(
            [part.float().logsumexp(-1) for part in logits.split(_CrossEntropy.ROWS)]
        )
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.in_place = in_place
        return log_sum - logits.gather(-1, labels[:, None])[:, 0].float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_sum = ctx.saved_tensors
        out = logits if ctx.in_place else torch.empty_like(logits)
        for start in range(0, len(logits), _CrossEntropy.ROWS):
            rows = slice(start, start + _CrossEntropy.ROWS)
            share = (logits[rows].float() - log_sum[rows, None]).exp_()
            share.scatter_add_(
                1, labels[rows, None], torch.full_like(labels[rows, None], -1, dtype=share.dtype)
            )
            out[rows] = share * grad[rows, None]
        return out, None, None


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, inplace_backward: bool = False
) -> tuple[Tensor, None]:
    """Compute the loss of [tokens, V] logits, as `flash_attn.ops.triton.cross_entropy` does."""
    return _CrossEntropy.apply(logits, labels, inplace_backward), None


def _never(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("packed rows need no padding, and training no cache of keys")


def install() -> None:
    """Make `attn_implementation="flash_attention_2"` work in this process, on a CPU."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    triton = "flash_attn.ops.triton"
    names = (
        "flash_attn",
        "flash_attn.bert_padding",
        "flash_attn.ops",
        triton,
        f"{triton}.cross_entropy",
    )
    package, padding, *_, entropy = modules = [ModuleType(name) for name in names]
    vars(package).update(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=_never,
    )
    vars(padding).update(pad_input=_never, unpad_input=_never)
    vars(entropy).update(cross_entropy_loss=cross_entropy_loss)
    sys.modules |= dict(zip(names, modules, strict=True))
    modeling_flash_attention_utils.is_flash_attn_2_available = lambda: True
    PreTrainedModel._flash_attn_can_dispatch = (
        lambda self, flash_attn_version, is_init_check=False: True
    )
