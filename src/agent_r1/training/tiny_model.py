"""Make a small language model from scratch: tokenizer, chat template, initial weights.

In: texts of throw-away worlds and a shape. Out: a folder in Hugging Face's format (Qwen2
architecture), in a second and without a download. Next: `app/cold_start.py` teaches it the format
of the task.

Using a search result means *copying an unknown name*. Three choices let half a million parameters
learn it:

1. **One spelling per name.** GPT-2's pre-tokenizer joins a blank to the next word, so `"Sosnum` and
   ` Sosnum` are different tokens. Copying from a sentence into a query would then be translation.
   This tokenizer splits text into capitalised words and everything between them. Phrases between
   names may become single tokens across blanks (as in SuperBPE, 2503.13423), which shortens
   sequences. A name of several words (Oscar Wilde) is one stretch: with a blank of its own between
   them, the copy would lose its place.
2. **Syllables, not names.** BPE sees each throw-away name about once, so it learns syllables.
   Trained on the training world, it would make that world's names single tokens, unlike the test
   world's.
3. **An initialisation that copies.** See `init_weights`.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.decoder import Block, Decoder, DecoderShape, rotate
from agent_r1.rollout.template import KNOWN_FACTS, Facts, template_key
from agent_r1.rollout.template_facts import check_tools, make_studied_chat
from agent_r1.training.settings import TinyModelConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
)
"""Control tokens that are not flagged special, as in Qwen3: decoding keeps them for parsers."""

# Qwen's layout, with tools as signatures instead of JSON schemas: a tiny model has no use for
# prose.
CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}
        {{- 'tools:' }}
        {%- for tool in tools %}
            {%- set f = tool.function if tool.function else tool %}
            {{- ' ' + f.name + '(' + (f.parameters.properties.keys() | join(', ')) + ')' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}\
{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}\
{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set c = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + c.name + '", "arguments": ' }}
            {{- c.arguments if c.arguments is string else (c.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


# A test studies it; each other template is studied when its model is loaded.
KNOWN_FACTS[template_key(CHAT_TEMPLATE, (*SPECIAL, *TAG_TOKENS))] = Facts(copies=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` tokens, including control tokens and the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex("[A-Z][a-z]*(?:[ '-][A-Z][a-z]*)*|[^A-Z]+"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [AddedToken(t, special=True, normalized=False) for t in SPECIAL]
    controls += [AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(controls)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_chat() -> ChatFormat:
    """Make the tiny model's chat format without a trained tokenizer: a byte is a token."""
    return ChatFormat(train_tokenizer([], 256 + len(SPECIAL) + len(TAG_TOKENS)))


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a tokenizer so that `AutoTokenizer`, vLLM and verl read the same one.

    The trap: if config.json says `qwen2`, transformers 5 ignores `tokenizer_class` and rebuilds a
    `Qwen2Tokenizer`. It takes vocabulary and merges from tokenizer.json but splits text by Qwen's
    regular expression: no warning, other ids. A folder with an `auto_map` entry is exempt and gets
    the class it names, here the plain one. The entry's custom code is not run, because the folder
    is not trusted.

    Raises OSError if the folder cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(
            errno.EIO, str(error)
        ) from None  # the tokenizers library raises Exception for a full disk
    config = folder / "config.json"
    family = json.loads(config.read_text()).get("model_type") if config.is_file() else "qwen2"
    # A real Qwen tokenizer needs, and has, its own class. For a Llama, transformers takes the named
    # class.
    if type(tokenizer) is PreTrainedTokenizerFast and family == "qwen2":
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "auto_map": [None, None],
        }
        path.write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a folder's tokenizer exactly as in tokenizer.json, without the hub and without running
    code."""
    if not (folder / "tokenizer.json").is_file():
        raise AgentR1Error(
            f"{folder} has no tokenizer.json; make or download the model again",
            code="damaged_tokenizer",
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (
        Exception
    ) as error:  # the tokenizers library raises a bare Exception, transformers many others
        why = f"{type(error).__name__}: {first_line(error)}"
        raise AgentR1Error(
            f"the tokenizer of {folder} cannot be read ({why}); make or download the model again",
            code="damaged_tokenizer",
        ) from None


def load_chat(folder: Path) -> ChatFormat:
    """Load the chat format of a model folder.

    Turns end as on any server of the model. vLLM and `transformers` read `eos_token_id` (one id or
    several) from generation_config.json, else from config.json.
    """
    path = next(
        (p for name in ("generation_config", "config") if (p := folder / f"{name}.json").is_file()),
        None,
    )
    try:
        ends = bounds.read_json(path).get("eos_token_id") if path else None
    except (OSError, ValueError, AttributeError) as error:
        raise AgentR1Error(
            f"{path} cannot be read ({first_line(error)}); make or download the model again",
            code="damaged_model",
        ) from None
    return make_studied_chat(load_tokenizer(folder), ends if isinstance(ends, list) else [ends])


def shape_of(config: TinyModelConfig, vocab_size: int) -> DecoderShape:
    """Return the tiny model's shape."""
    sizes: dict[str, Any] = config.model_dump(exclude={"path", "induction"})
    sizes["vocab_size"] = vocab_size
    return DecoderShape(**sizes)


def new_model(config: TinyModelConfig, vocab_size: int, seed: int) -> Decoder:
    """Make the tiny model, with initial weights that only depend on `seed`."""
    model = Decoder(shape_of(config, vocab_size))
    init_weights(model, seed, bigram=config.induction == "bigram")
    return model


@torch.no_grad()
def init_weights(model: Decoder, seed: int, bigram: bool) -> None:
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

    In `Sosnum` and `Sosvel` the first syllable has two continuations. With `bigram` a second pair
    of heads compares the token before it, too, as n-gram heads do (2401.12973): see
    `_compare_token_before`.
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
    if bigram:
        _compare_token_before(model, subspace, g)


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


def _compare_token_before(model: Decoder, subspace: Tensor, g: torch.Generator) -> None:
    """Lay out the second pair of heads. `subspace` (head_dim x hidden): S of the first pair.

    Layer 0, head 1 attends two positions back. It has the values of head 0, and writes them into a
    subspace S2 of its own. So position j has W_v e of token j - 1 in S, and of token j - 2 in S2.
    Layer 1, head 1 has a query that reads S, and a key that reads S2. So it attends to positions
    whose token two back equals the token before the current one. It copies what it attends to.
    Head 0 could compare both tokens, but in the same 32 dimensions: it learned later.
    """
    s = model.shape
    hd = s.head_dim
    second = slice(hd, 2 * hd)
    first_key = s.heads * hd
    first_value = first_key + s.kv_heads * hd
    two_back = block_of(model, 0)
    _look_back(two_back, model, head=1, distance=2)
    values = two_back.qkv.weight[first_value : first_value + hd]
    two_back.qkv.weight[first_value + hd : first_value + 2 * hd] = values
    second_subspace = torch.empty_like(subspace).normal_(
        0, 1 / math.sqrt(s.hidden_size), generator=g
    )
    two_back.o.weight[:, second] = OUTPUT_SCALE * second_subspace.T
    compare = block_of(model, 1).qkv.weight
    # S holds a token twice as long as its embedding does: OUTPUT_SCALE against the embeddings' std
    # of 0.1. So a half would give both pairs scores of one size. A quarter is learned sooner: the
    # second pair matters at rare places only, and disturbs the first one elsewhere.
    compare[second] = INDUCTION_STRENGTH / 4 * subspace
    compare[first_key + hd : first_key + 2 * hd] = INDUCTION_STRENGTH * second_subspace


OUTPUT_SCALE = 0.2
"""Scales a head's output to the length of an embedding (std 0.1). A longer one would drown the
token in later layers."""
INDUCTION_STRENGTH = 2.0
PREVIOUS_TOKEN_STRENGTH = 6.0
"""Raises the previous token's attention score about 4 above its neighbours' (head_dim 32)."""


def chat_with_tools(folder: Path) -> ChatFormat:
    """Load a pretrained model's chat format, or chat_tools.j2 if its template shows no tools.

    Raises ConfigError if the model lacks ChatML's control tokens.
    """
    try:
        chat = load_chat(folder)
        check_tools(chat.template)
        return chat
    except ConfigError as error:
        tokenizer = load_tokenizer(folder)
        if missing := {"<|im_start|>", "<|im_end|>"} - {
            token.content for token in tokenizer.added_tokens_decoder.values()
        }:
            raise ConfigError(
                f"{error}; our template does not fit either, because it has no token "
                f"{min(missing)}",
                code="missing_control_tokens",
            ) from None
    from agent_r1.training.chat_tools import tools_template

    tokenizer.chat_template = tools_template()
    return make_studied_chat(tokenizer)
