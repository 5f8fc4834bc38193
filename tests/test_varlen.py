"""lab/rehearsals/_varlen.py, the stand-in for flash-attn's kernels, against padded rows and
against a plain softmax."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    modeling_flash_attention_utils,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from lab.rehearsals import _varlen as varlen


@pytest.fixture
def installed(monkeypatch):
    """`install`, undone afterwards."""
    utils = modeling_flash_attention_utils
    monkeypatch.setattr(utils, "is_flash_attn_2_available", utils.is_flash_attn_2_available)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(
        PreTrainedModel, "_flash_attn_can_dispatch", PreTrainedModel._flash_attn_can_dispatch
    )
    for name in ("", ".bert_padding", ".ops", ".ops.triton", ".ops.triton.cross_entropy"):
        monkeypatch.setitem(sys.modules, f"flash_attn{name}", None)
    varlen.install()


def test_one_row_is_a_causal_softmax():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, heads, 4, generator=g) for heads in (4, 2, 2))
    out = varlen.flash_attn_func(q, k, v, causal=True)
    for head in range(4):
        scores = q[0, :, head] @ k[0, :, head // 2].T / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(out[0, :, head], scores.softmax(-1) @ v[0, :, head // 2])


@pytest.mark.parametrize("lengths", [[7, 1, 12, 3], [9]])
def test_packed_rows_are_padded_rows(installed, lengths):
    """Values and gradients of a whole Qwen2, called as verl calls it: one row of tokens, positions
    that start again."""
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2))
    rows = [torch.randint(0, 50, (n,)) for n in lengths]
    weights = torch.randn(sum(lengths), 50)

    model.set_attn_implementation("sdpa")
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    inside = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    padded = model(ids, attention_mask=inside.long()).logits[inside]
    (padded * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation("flash_attention_2")
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(
        torch.cat(rows)[None], attention_mask=None, position_ids=positions, use_cache=False
    ).logits[0]
    assert modeling_flash_attention_utils._flash_varlen_fn is varlen.flash_attn_varlen_func
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-4)
    (packed * weights).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_cross_entropy_is_a_log_softmax(installed, in_place):
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    g = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(150, 7, generator=g), torch.randint(7, (150,), generator=g)
    weights = torch.randn(150, generator=g)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    kept = ours * 1.0  # a leaf may not be written over
    losses, _ = cross_entropy_loss(kept, labels, inplace_backward=in_place)
    expected = -theirs.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(losses, expected)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert torch.equal(kept, logits) != in_place
