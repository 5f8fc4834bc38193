"""Make the initial weights of a small language model.

In: a shape and the size of a vocabulary. Out: a `Decoder` (Qwen2 architecture), in a second and
without a download. Next: `stage.py` teaches it the format of the task.

Using a search result means *copying an unknown name*. The tokenizer gives every name one spelling
(`tokenizer.py`), and `init_weights` lays out the heads that copy.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from agent_r1.model.decoder import Block, Decoder, DecoderShape, rotate
from agent_r1.training.settings import INDUCTION_PAIRS, TinyModelConfig


def shape_of(config: TinyModelConfig, vocab_size: int) -> DecoderShape:
    """Return the tiny model's shape."""
    sizes: dict[str, Any] = config.model_dump(exclude={"path", "induction"})
    sizes["vocab_size"] = vocab_size
    return DecoderShape(**sizes)


def new_model(config: TinyModelConfig, vocab_size: int, seed: int) -> Decoder:
    """Make the tiny model, with initial weights that only depend on `seed`."""
    model = Decoder(shape_of(config, vocab_size))
    init_weights(model, seed, INDUCTION_PAIRS[config.induction])
    return model


@torch.no_grad()
def init_weights(model: Decoder, seed: int, pairs: int) -> None:
    """Initialise the weights so that the model soon learns to copy.

    A transformer copies with an *induction* circuit of two heads (Olsson et al., 2209.11895). A
    head in an early layer writes into each position the token *before* it. A head in a later layer
    finds positions whose "token before" equals the current token, and copies their token. From a
    standard initialisation, a model of this size does not find the pair within minutes; it
    memorises the training names. So the circuit is laid out, and training learns its use:

    * embeddings of std 0.1 (not 0.02): tied to the output, they let a copied embedding win the
      softmax at once;
    * W_o = W_v^T per head: attention starts by copying the attended token instead of noise;
    * the *previous-token head* (layer 0, head 0) attends one position back, by its biases alone.
      With q_t = R(t - 1) b and k_s = R(s) b (R: rotary rotation) its score is |.|^2 sum_i cos((t -
      1 - s) theta_i). The peak is at s = t - 1. It writes W_v e of that token into a separate
      subspace: W_o = S^T instead of W_v^T;
    * the *induction head* (layer 1, head 0) compares in these coordinates. Its query is W_v e of
      the current token, its key reads S, which has the token before.

    In `Sosnum` and `Sosvel` the first syllable has two continuations. With `pairs` of 2 and more,
    further pairs of heads compare the tokens before it, too, as n-gram heads do (2401.12973): see
    `_compare_tokens_before`.
    """
    g = torch.Generator().manual_seed(seed)
    s = model.shape
    d = s.hidden_size
    hd = s.head_dim
    group = s.heads // s.kv_heads
    model.embed.weight.normal_(0, 0.1, generator=g)
    for block in model.blocks:
        block.qkv.weight.normal_(0, 1 / math.sqrt(d), generator=g)
        block.gate_up.weight.normal_(0, 1 / math.sqrt(d), generator=g)
        block.down.weight.normal_(0, OUTPUT_SCALE / math.sqrt(s.intermediate_size), generator=g)
        block.qkv.bias.zero_()
        v = block.qkv.weight[-s.kv_heads * hd :].view(s.kv_heads, hd, d)
        block.o.weight.copy_(
            OUTPUT_SCALE * v.repeat_interleave(group, 0).reshape(s.heads * hd, d).T
        )
    first_key = s.heads * hd  # the fused matrix has all queries, then all keys, then all values
    previous = block_of(model, 0)
    induction = block_of(model, 1)
    _look_back(previous, model, head=0, distance=1)
    subspace = torch.empty(hd, d).normal_(0, 1 / math.sqrt(d), generator=g)
    previous.o.weight[:, :hd] = OUTPUT_SCALE * subspace.T
    induction.qkv.weight[:hd] = (
        INDUCTION_STRENGTH * previous.qkv.weight[first_key + s.kv_heads * hd :][:hd]
    )
    induction.qkv.weight[first_key : first_key + hd] = INDUCTION_STRENGTH * subspace
    _compare_tokens_before(model, subspace, pairs, g)


def block_of(model: Decoder, layer: int) -> Block:
    """Return a layer with its type, which PyTorch's lists forget."""
    return cast(Block, model.blocks[layer])


def _look_back(block: Block, model: Decoder, head: int, distance: int) -> None:
    """Let a head attend to the position `distance` tokens back, by its biases alone."""
    hd = model.shape.head_dim
    query = slice(head * hd, (head + 1) * hd)
    first_key = (model.shape.heads + head) * hd
    key = torch.zeros(hd)
    key[: hd // 2] = PREVIOUS_TOKEN_STRENGTH
    cos = cast(Tensor, model.cos)
    sin = cast(Tensor, model.sin)
    block.qkv.bias[query] = rotate(key, cos[distance], -sin[distance])  # R(-distance)
    block.qkv.bias[first_key : first_key + hd] = key
    block.qkv.weight[query] *= 0.1
    block.qkv.weight[first_key : first_key + hd] *= 0.1


def _compare_tokens_before(
    model: Decoder, subspace: Tensor, pairs: int, g: torch.Generator
) -> None:
    """Lay out the further pairs of heads. `subspace` (head_dim x hidden): S of the first pair.

    Take the second pair. Layer 0, head 1 attends two positions back. It has the values of head 0,
    and writes them into a subspace S2 of its own. So position j has W_v e of token j - 1 in S, and
    of token j - 2 in S2. Layer 1, head 1 has a query that reads S, and a key that reads S2. So it
    attends to positions whose token two back equals the token before the current one. It copies
    what it attends to. Head 0 could compare both tokens, but in the same 32 dimensions: it learned
    later. The third pair does the same with S2, and with a subspace S3 for token j - 3.
    """
    s = model.shape
    hd = s.head_dim
    first_key = s.heads * hd
    first_value = first_key + s.kv_heads * hd
    look_back = block_of(model, 0)
    compare = block_of(model, 1).qkv.weight
    values = look_back.qkv.weight[first_value : first_value + hd].clone()
    for head in range(1, pairs):
        start = head * hd
        end = start + hd
        _look_back(look_back, model, head=head, distance=head + 1)
        look_back.qkv.weight[first_value + start : first_value + end] = values
        next_subspace = torch.empty_like(subspace).normal_(
            0, 1 / math.sqrt(s.hidden_size), generator=g
        )
        look_back.o.weight[:, start:end] = OUTPUT_SCALE * next_subspace.T
        # A subspace holds a token twice as long as its embedding does: OUTPUT_SCALE against the
        # embeddings' std of 0.1. So a half would give all pairs scores of one size. A quarter is
        # learned sooner: the further pairs matter at rare places only, and disturb the first one
        # elsewhere.
        compare[start:end] = INDUCTION_STRENGTH / 4 * subspace
        compare[first_key + start : first_key + end] = INDUCTION_STRENGTH * next_subspace
        subspace = next_subspace


OUTPUT_SCALE = 0.2
"""Scales a head's output to the length of an embedding (std 0.1).

A longer one would drown the token in later layers.
"""
INDUCTION_STRENGTH = 2.0
PREVIOUS_TOKEN_STRENGTH = 6.0
"""Raises the previous token's attention score about 4 above its neighbours' (head_dim 32)."""
