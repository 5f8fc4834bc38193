"""Train, save and load tokenizers, and open the chat format of a model folder.

In: texts of throw-away worlds, or a model folder. Out: a tokenizer with a chat template, or a
`ChatFormat`. Next: `format.py` turns messages into ids with it.

Using a search result means *copying an unknown name*. Two choices of the tiny model's tokenizer
make that possible for half a million parameters:

1. **One spelling per name.** GPT-2's pre-tokenizer joins a blank to the next word, so `"Sosnum` and
   ` Sosnum` are different tokens. Copying from a sentence into a query would then be translation.
   This tokenizer splits text into capitalised words and everything between them. Phrases between
   names may become single tokens across blanks (as in SuperBPE, 2503.13423), which shortens
   sequences. A name of several words (Oscar Wilde) is one stretch: with a blank of its own between
   them, the copy would lose its place.
2. **Syllables, not names.** BPE sees each throw-away name about once, so it learns syllables.
   Trained on the training world, it would make that world's names single tokens, unlike the test
   world's.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.study import StudiedTemplate, check_tools
from agent_r1.chat.template import OUR_SOURCES
from agent_r1.chat.tools_template import tools_template
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line

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


# A test shows that they only copy contents.
OUR_SOURCES.update((CHAT_TEMPLATE, tools_template()))


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
    return make_studied_chat(train_tokenizer([], 256 + len(SPECIAL) + len(TAG_TOKENS)))


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
    """Load a folder's tokenizer exactly as in tokenizer.json.

    The hub is not asked, and no code of the folder runs.
    """
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
    tokenizer = load_tokenizer(folder)
    # A None in it, where no file names an id, is no stop (`ChatFormat`).
    end_ids: list[Any] = ends if isinstance(ends, list) else [ends]
    return make_studied_chat(tokenizer, end_ids)


def make_studied_chat(tokenizer: Any, end_ids: Iterable[int] = ()) -> ChatFormat:
    """Make a chat format whose template is studied. Raises ConfigError for an unusable one."""
    return ChatFormat(tokenizer, end_ids, StudiedTemplate)


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
    tokenizer.chat_template = tools_template()
    return make_studied_chat(tokenizer)
