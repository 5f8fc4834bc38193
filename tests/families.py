"""Tiny tokenizers of each family's kind, with its control tokens, and the templates of packages.

No model hub is needed: templates come from the wheels of `trl` and vLLM, which are not imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "system user assistant tool function parameter name arguments search query value",
    "You may call one or more functions to assist with the user query. Think first, then answer.",
    "Who founded Vexlor, in 1930? <tool_response> Rome is the answer. </tool_response>",
    '{"name": "look", "parameters": {"city": "Oslo", "days": 3}}\n\n\n    \t<b>bold</b> [1] \\n',
    "Größe, Ελλάδα, Москва, 東京, مرحبا, שלום, ไทย, 🙂",
]


@dataclass(frozen=True)
class Family:
    """What a tiny tokenizer needs to stand for a family's."""

    kind: str = "bytes"
    """bytes (byte-level BPE) | metaspace (BPE, blank before the first word) | unigram."""
    special: str = ""
    """Control tokens that are flagged special, separated by blanks."""
    words: str = ""
    """Added tokens that are not flagged special."""
    eos: str = ""
    bos: str | None = None
    rstrip: frozenset[str] = field(default_factory=frozenset)
    """Control tokens that take the blanks after them."""
    text: tuple[str, ...] = ()
    """Added tokens that are words of a text, as in Gemma's vocabulary."""


GEMMA_TEXT = (
    *("\n" * count for count in range(1, 32)),
    *("▁" * count for count in range(2, 32)),
    *("\t" * count for count in range(1, 5)),
    "  ",
    *(f"<{slash}{tag}>" for tag in ("b", "i", "table", "tr", "td", "h1") for slash in ("", "/")),
)
"""Of the kinds of Gemma 3's published vocabulary, which has 6,415 added tokens."""
CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
VISION = "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
CALLS = "<tool_call> </tool_call>"
QWEN3 = f"{CALLS} <tool_response> </tool_response> <think> </think>"
LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> "
    "<|python_tag|> <|finetune_right_pad_id|>"
)
FAMILIES = {
    "qwen2_5_vl": Family("bytes", f"{CHATML} {VISION}", CALLS, "<|im_end|>"),
    "qwen2_5": Family("bytes", CHATML, CALLS, "<|im_end|>"),
    "qwen3": Family("bytes", f"{CHATML} {VISION}", QWEN3, "<|im_end|>"),
    "llama3": Family("bytes", LLAMA, "", "<|eot_id|>", "<|begin_of_text|>"),
    "idefics3": Family(
        "bytes", f"{LLAMA} <end_of_utterance> <image>", "", "<end_of_utterance>",
        "<|begin_of_text|>",
    ),
    "glm4moe": Family(
        "bytes",
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> /nothink",
        f"{QWEN3} <arg_key> </arg_key> <arg_value> </arg_value>", "<|user|>",
    ),
    "gptoss": Family(
        "bytes",
        "<|startoftext|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> "
        "<|return|> <|call|>", "", "<|return|>",
    ),
    "cohere": Family(
        "bytes",
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> "
        "<|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>", "", "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    "deepseek": Family(
        "bytes",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>",
        "<think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
        "<｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜>",
        "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>",
    ),
    "diffusion_gemma": Family(
        "unigram",
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> "
        "<tool_call|> "
        "<|tool_response> <tool_response|> <|think|> <|image|> <|audio|> <|video|>", "", "<turn|>",
        "<bos>", text=GEMMA_TEXT,
    ),
    "gemma4": Family(
        "unigram",
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> "
        "<tool_call|> "
        "<|tool_response> <tool_response|> <|think|> <|image|> <|audio|> <|video|>", "", "<turn|>",
        "<bos>", text=GEMMA_TEXT,
    ),
    "gemma": Family(
        "unigram", "<bos> <eos> <start_of_turn> <end_of_turn> <start_of_image>", "",
        "<end_of_turn>", "<bos>", text=GEMMA_TEXT,
    ),
    "lfm2": Family(
        "bytes",
        "<|startoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
        "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|> "
        "<image>", "<think> </think>", "<|im_end|>", "<|startoftext|>",
    ),
    "llava_next": Family("metaspace", "<s> </s> <image>", "", "</s>", "<s>"),
    "muse_glimmer": Family(
        "bytes", "<|begin_of_text|> <|start|> <|message|> <|eot|> <|eom|> <|final|> <|patch|>", "",
        "<|eot|>", "<|begin_of_text|>",
    ),
    "nemotron": Family("bytes", "<s> </s> <|im_start|> <|im_end|>", QWEN3, "<|im_end|>", "<s>"),
    "phi3": Family(
        "metaspace", "<s> </s> <|endoftext|> <|system|> <|user|> <|assistant|> <|end|>", "",
        "<|endoftext|>", "<s>", frozenset({"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"}),
    ),
    "smolvlm": Family("bytes", "<|im_start|> <end_of_utterance> <image>", "", "<end_of_utterance>"),
}  # fmt: skip
"""Beginning of a template's name in `trl` -> its family. The longest beginning wins."""


def family_of(name: str) -> Family:
    """Return the family of a template of `trl`."""
    return FAMILIES[max((key for key in FAMILIES if name.startswith(key)), key=len)]


@cache
def _backend(family: Family) -> Tokenizer:
    if family.kind == "bytes":
        backend = Tokenizer(models.BPE())
        # As in Llama 3 and Qwen: a blank belongs to the next word, line breaks stay together.
        split = Regex(
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif family.kind == "metaspace":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        )
    else:  # as in Gemma: no blank is added, and line breaks are ordinary characters
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        trainer = trainers.UnigramTrainer(
            vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    backend.train_from_iterator(TEXTS * 20, trainer)
    # The trainer's bytes are ordinary tokens in published vocabularies, and not added ones.
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(plain))


def tokenizer_of(family: Family, template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    """Make a tiny tokenizer of this family with this template."""
    backend = Tokenizer.from_str(_backend(family).to_str())
    for text in family.special.split():
        token = AddedToken(text, special=True, normalized=False, rstrip=text in family.rstrip)
        backend.add_tokens([token])
    for text in (*family.words.split(), *family.text):
        backend.add_tokens([AddedToken(text, special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        unk_token=None if family.kind == "bytes" else "<unk>",
        pad_token=family.special.split()[0],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def packaged_templates(package: str) -> dict[str, str]:
    """Return name -> template of every *.jinja file in a package; {} if it is not installed."""
    found = {}
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:  # `make install` leaves vLLM out
        return {}
    for file in files:
        if file.suffix == ".jinja":
            found[re.sub(r"\.jinja$", "", file.name)] = file.locate().read_text(encoding="utf-8")
    return dict(sorted(found.items()))
