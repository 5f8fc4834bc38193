"""Train on verl without the package flash-attn: `verl.attention=varlen`, or sdpa.

Each verl process imports this module first (`VERL_USE_EXTERNAL_MODULES`), on a GPU where flash-attn
is missing or does not load. On a CPU, `cpu.py` imports it.

    varlen             packed rows by PyTorch's own kernel `varlen_attn`, under a name
                       in transformers' table of attention functions
    imports            verl expects an ImportError; a wheel for another glibc raises OSError
    the critic         verl loads it with flash_attention_2, whatever its configuration says
    log-probabilities  in bfloat16, verl computes them one token at a time: for a pass of 16,384
                       tokens as many launches of each kernel. On an H100 the first update of a 1.5B
                       model had not ended after 47 seconds

Another version of verl is refused, because an outdated patch fails silently.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import verl
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from agent_r1.cluster import VERL
from agent_r1.ground.device import avoid_cudnn_attention

if verl.__version__ != VERL:
    raise ImportError(
        f"agent_r1.cluster.no_flash_attn is for verl {VERL}, and {verl.__version__} is installed"
    )


def refuse_import(modules: dict[str, Any], name: str) -> None:
    """Let a later `import name` raise ImportError, which verl expects."""
    modules.setdefault(name, None)


refuse_import(sys.modules, "flash_attn")

import verl.models.transformers.monkey_patch  # noqa: E402
import verl.utils.model  # noqa: E402
import verl.utils.torch_functional  # noqa: E402

# ------------------------------------------------------------------------------------ packed rows

VARLEN = "agent_r1_varlen"
"""The name of `varlen_attention` in transformers' tables."""
HAS_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether the kernel takes fewer key heads than query heads (from PyTorch 2.13)."""


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each row of a packed batch, causally.

    Args:
        query: [1, H, T, D]; T are the tokens of all rows, one row after the other.
        key: [1, K, T, D], as `value`. H is a multiple of K.
        attention_mask: None, because no row is padded.
        position_ids: [1, T]. Each row starts at 0.

    Returns [1, T, H, D], and no weights, as transformers expects it.
    """
    if attention_mask is not None or position_ids is None or len(query) != 1:
        raise ValueError("verl.attention=varlen is for packed rows (use_remove_padding)")
    starts = (position_ids.flatten() == 0).nonzero().flatten().int()
    ends = torch.cat((starts, starts.new_tensor([query.shape[2]])))
    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    return attend_within(q, k, v, ends, scaling)[None], None


def attend_within(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    """Attend from q [T, H, D] to k and v [T, K, D] within rows.

    Row i is ends[i] to ends[i + 1].
    """
    if q.device.type == "cpu":  # PyTorch has the kernel for GPUs only
        return _row_by_row(q, k, v, ends.tolist(), scale)
    kernel_options: dict[str, Any] = {"enable_gqa": True} if HAS_GROUPED_HEADS else {}
    if not HAS_GROUPED_HEADS:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    longest = int(ends.diff().max())
    causal = (-1, 0)  # any number of tokens back, none ahead
    out = varlen_attn(
        q, k, v, ends, ends, longest, longest, scale=scale, window_size=causal, **kernel_options
    )
    # With `return_aux`, which is not asked for, the kernel returns a pair.
    return out if isinstance(out, Tensor) else out[0]


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, ends: list[int], scale: float | None) -> Tensor:
    parts = []
    for start, end in zip(ends, ends[1:], strict=False):
        out = scaled_dot_product_attention(
            q[None, start:end].transpose(1, 2),
            k[None, start:end].transpose(1, 2),
            v[None, start:end].transpose(1, 2),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


avoid_cudnn_attention()  # verl.attention=sdpa: each padded batch has a shape of its own
AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, flash_attention_mask)

# ------------------------------------------------------------------------------------- the critic


def load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> Any:
    """Load the critic with the attention that its configuration names."""
    from transformers import AutoModelForTokenClassification

    attention = getattr(model_config, "_attn_implementation", None)
    if attention not in (VARLEN, "sdpa"):
        attention = "sdpa"
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=attention,
    )


verl.utils.model.load_valuehead_model = load_value_model
# verl patches trl's class of value models, if trl is installed; trl 1.16 no longer has it. Our
# critic is a class of transformers.
verl.models.transformers.monkey_patch.__dict__["is_trl_available"] = lambda: False

# -------------------------------------------------------------------------------- log-probabilities

TOKENS_AT_A_TIME = 512
"""With 152,000 words a float32 copy of so many tokens' logits takes 0.3 GB."""


class _TokenLogprobs(torch.autograd.Function):
    """Compute log softmax(logits)[label] of [tokens, V] logits, in float32.

    The graph keeps the logits and one number per token, not a second matrix of the vocabulary's
    width.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        parts = [part.float().logsumexp(-1) for part in logits.split(TOKENS_AT_A_TIME)]
        log_sum = torch.cat(parts)
        ctx.save_for_backward(logits, labels, log_sum)
        return logits.gather(-1, labels[:, None])[:, 0].float() - log_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        logits, labels, log_sum = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_logits = torch.empty_like(logits)
        for start in range(0, len(logits), TOKENS_AT_A_TIME):
            rows = slice(start, start + TOKENS_AT_A_TIME)
            # d log softmax(x)[label] / dx = onehot(label) - softmax(x)
            share = (logits[rows].float() - log_sum[rows, None]).exp_().neg_()
            share.scatter_add_(1, labels[rows, None], torch.ones_like(share[:, :1]))
            grad_logits[rows] = share.mul_(grad[rows, None])
        return grad_logits, None


logprobs_in_float32: Any = verl.utils.torch_functional.logprobs_from_logits_v2


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Replace verl's `logprobs_from_logits_v2` for bfloat16; verl's serves float32 well."""
    if logits.dtype in (torch.float32, torch.float64):
        return logprobs_in_float32(logits, labels)
    flat = _TokenLogprobs.apply(logits.flatten(0, -2), labels.flatten())
    return flat.view(labels.shape)


verl.utils.torch_functional.logprobs_from_logits_v2 = token_logprobs
