"""Compare a model folder with `transformers`, before anything costs.

In: a folder in Hugging Face's format, which someone else wrote. Out: one sentence on what was
compared, or an AgentR1Error that names the cause of a difference. `run.py`, the cold start and
doctor call it.

A folder has no end of keys, so behaviour is compared. The tokenizer, in the state in which training
uses it, must give texts the same ids. Weights that `model/decoder.py` runs must give a few tokens
the same log-probabilities. A result is kept in a file, under a key of all that it depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from importlib import metadata
from pathlib import Path

import torch
from safetensors import safe_open

from agent_r1.chat import format as chat_format
from agent_r1.chat import tokenizer as chat_tokenizer
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.probe import CONTENTS
from agent_r1.chat.tokenizer import load_chat
from agent_r1.ground.errors import AgentR1Error, first_line
from agent_r1.ground.files import write_whole
from agent_r1.model import cpu_products, decoder, rope_scaling
from agent_r1.model import files as model_files

LARGEST_COMPARED = 10**9
"""Parameters up to which log-probabilities are compared: 4 GB in float32, one model at a time."""
TOKENS = 16
"""Tokens whose log-probabilities are compared."""
TOLERANCE = 0.02
"""Largest difference of a log-probability. Equal arithmetic in float32 differs by 1e-5."""
LONG_TEXT = "Who founded the city of Tulo in 1930, and why? " * 60
"""About 700 tokens: longer than a `max_length` of 512 in a tokenizer's file."""
KEPT_FILES = (
    "*.json",
    "*.jinja",
    "chat_templates/*.jinja",
    "*.model",
    "*.txt",
    "*.safetensors",
)
"""What of a folder decides how it is read."""
_CODE = (
    cpu_products.__file__,
    decoder.__file__,
    rope_scaling.__file__,
    model_files.__file__,
    chat_format.__file__,
    chat_tokenizer.__file__,
)


def check_folder(folder: Path, weights: bool, use_cache: bool = True) -> str:
    """Compare a folder with `transformers`, and return one sentence on it.

    Args:
        weights: Whether our own decoder will run the weights.
        use_cache: Whether a kept result may be used.

    Raises AgentR1Error for a difference.
    """
    if (folder / "adapter_config.json").is_file():
        raise AgentR1Error(
            f"{folder} has an adapter (adapter_config.json), which is not read; merge it into the "
            "weights, or take its files out to use the base model",
            code="adapter_not_read",
        )
    file = _cache_file(folder, weights)
    if use_cache:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return str(json.loads(file.read_text(encoding="utf-8"))["text"])
    chat = load_chat(folder)
    check_ids(chat, folder)
    text = "ids of texts are those of transformers"
    if weights:
        text += f"; {compare_weights(chat, folder)}"
    with contextlib.suppress(OSError):  # the next command only takes longer without it
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"text": text}) + "\n")
    return text


def _cache_file(folder: Path, weights: bool) -> Path:
    """Name the file after all that the result depends on."""
    packages = ("transformers", "tokenizers", "torch", "safetensors")
    digest = hashlib.sha256(json.dumps([metadata.version(p) for p in packages]).encode())
    digest.update(f"{weights} {TOLERANCE} {TOKENS}".encode())
    for file in (*_CODE, __file__):
        digest.update(Path(file).read_bytes())
    for pattern in KEPT_FILES:
        for file in sorted(folder.glob(pattern)):
            digest.update(f"\0{file.name}\0".encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "agent-r1" / "folders" / f"{digest.hexdigest()[:32]}.json"


# ------------------------------------------------------------------------------------ the tokenizer


def check_ids(chat: ChatFormat, folder: Path) -> None:
    """Raise AgentR1Error if texts have other ids than in `transformers`, or ids have no row.

    Also for a rendered question, because a class may read the same added token in another way.
    """
    from transformers import AutoTokenizer

    rows = model_files.read_config(folder).get("vocab_size")
    largest = max(chat.tokenizer.get_vocab().values())
    if isinstance(rows, int) and largest >= rows:
        raise AgentR1Error(
            f"{folder}: its tokenizer has the id {largest}, and config.json says vocab_size={rows};"
            " resize the embedding (`resize_token_embeddings`) or take the added tokens out",
            code="more_ids_than_rows",
        )
    try:
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        raise AgentR1Error(
            f"transformers cannot open the tokenizer of {folder} ({first_line(error)}); save it "
            "again with transformers 5",
            code="damaged_tokenizer",
        ) from None
    question = {"role": "user", "content": CONTENTS["plain words"]}
    # With the vocabulary's control tokens, and with each added token between blanks.
    added = " and \n".join(sorted(chat.tokenizer.get_added_vocab()))
    for text in (*CONTENTS.values(), LONG_TEXT, chat.template.render([question]), added):
        our_ids = chat.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        # Here and there, the tokenizer is switched to neither cut nor fill.
        their_ids = theirs(text, add_special_tokens=False, truncation=False, padding=False)
        if our_ids != their_ids["input_ids"]:
            raise AgentR1Error(
                f"{folder}: {text[:40]!r} has other ids here than in transformers "
                f"({len(our_ids)} and {len(their_ids['input_ids'])} ids); the class in "
                "tokenizer_config.json reads tokenizer.json in another way: save the tokenizer "
                "again with transformers 5",
                code="other_ids",
            )


# -------------------------------------------------------------------------------------- the weights


def compare_weights(chat: ChatFormat, folder: Path) -> str:
    """Compare log-probabilities with `transformers`, one model after the other.

    Before, and above LARGEST_COMPARED only, names, shapes and types of the weights. Raises
    AgentR1Error for a difference.
    """
    files = sorted(folder.glob("*.safetensors"))
    sizes = model_files.sizes_in(files)
    count = sum(math.prod(size) for size in sizes.values())
    model_files.check_weights(folder)
    if count > LARGEST_COMPARED:
        return (
            f"log-probabilities not compared ({count / 1e9:.1f}e9 parameters); names, shapes and "
            "types of the weights are as config.json says"
        )
    most = model_files.read_config(folder).get("max_position_embeddings")
    tokens = min(TOKENS, most) if isinstance(most, int) else TOKENS
    ids = chat.encode_trusted(CONTENTS["plain words"] + LONG_TEXT)[:tokens]
    ours = _our_logprobs(folder, ids)
    theirs = _their_logprobs(folder, ids)
    worst = float((ours - theirs).abs().max())
    if not worst < TOLERANCE:
        raise AgentR1Error(
            f"{folder}: log-probabilities differ from those of transformers by {worst:.3g}; "
            f"{_cause(folder, files)}",
            code="other_weights",
        )
    return f"log-probabilities of {len(ids)} tokens differ by at most {worst:.0e}"


@torch.no_grad()
def _our_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    model = model_files.load_model(folder)
    positions = torch.arange(len(ids))[None]
    hidden = model(torch.tensor([ids]), positions, decoder.causal_attention)
    return model.logits(hidden)[0].log_softmax(-1)


@torch.no_grad()
def _their_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    except Exception as error:  # transformers raises many kinds
        raise AgentR1Error(
            f"transformers cannot run {folder} ({first_line(error)}); make or download it again",
            code="damaged_model",
        ) from None
    return logits.float().log_softmax(-1)


def _first_not_finite(files: list[Path]) -> str | None:
    """Return the name of a weight with NaN or infinity, if there is one."""
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                if not weights.get_tensor(name).float().isfinite().all():
                    return name
    return None


def _cause(folder: Path, files: list[Path]) -> str:
    """Name what in a folder is read in two ways."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        extra = [file.name for file in files if file.name not in listed]
        if extra:
            return f"{extra[0]} is not in model.safetensors.index.json: delete it"
    elif len(files) > 1:
        return f"{files[0].name} and {files[1].name} have no index: delete the older one"
    if broken := _first_not_finite(files):
        return f"its weight {broken} has a value that is no number: download it again"
    return "config.json has a key that the local loop does not compute: choose another model"
