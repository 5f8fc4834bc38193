"""flash-attn's two kernels in plain PyTorch, so that the packed rows of a GPU run (`use_remove_padding`) run on a CPU.

`install` puts a module named `flash_attn` in place and tells transformers that it works on a CPU. verl's packing, its
position ids, transformers' dispatch and the unpacking of log-probabilities are then the code that a GPU runs; only the
kernel is another one. tests/test_varlen.py holds it against padded rows.

_gpu_worker.py, which each process of verl imports in a rehearsal, calls `install`. Nothing else does.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p=0.0, softmax_scale=None, causal=False) -> Tensor:
    """Attention of [B, T, H, D] queries over [B, T, K, D] keys and values, H a multiple of K."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
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
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
) -> Tensor:
    """The same over rows laid end to end: [tokens, H, D], where row i is tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError("queries and keys of different lengths: training never has them")
    ends = cu_seqlens_q.tolist()
    rows = [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    parts = [flash_attn_func(q[None, r], k[None, r], v[None, r], dropout_p, softmax_scale, causal)[0] for r in rows]
    return torch.cat(parts)


def _never(*args, **kwargs):
    raise RuntimeError("packed rows need no padding, and training no cache of keys")


def install() -> None:
    """Make `attn_implementation="flash_attention_2"` work in this process, on a CPU."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    package.flash_attn_with_kvcache = padding.pad_input = padding.unpad_input = _never
    sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
    modeling_flash_attention_utils.is_flash_attn_2_available = lambda: True
    PreTrainedModel._flash_attn_can_dispatch = lambda self, flash_attn_version, is_init_check=False: True
