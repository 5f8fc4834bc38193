"""Model folders in the shapes of other people's families, with tiny random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from families import family_of, packaged_templates, tokenizer_of

from agent_r1.chat.tokenizer import save_tokenizer
from agent_r1.model.decoder import Decoder, DecoderShape
from agent_r1.model.files import save_model
from agent_r1.model.rope_scaling import RopeScaling

ROPE = RopeScaling(8.0, 1.0, 4.0, 256)
SHAPES = {
    "llama": {"hidden_size": 128, "rope_theta": 500000.0, "rope_scaling": ROPE},
    "qwen3": {"head_width": 32},
}
"""Heads are 32 wide, because vLLM on a CPU knows no narrower ones."""


def random_decoder(family: str, vocabulary: int, tied: bool = True, **sizes) -> Decoder:
    """Make a decoder of this family, with weights large enough to show any difference."""
    shape = {
        "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128,
        "max_position": 4096,
    } | SHAPES[family] | sizes  # fmt: skip
    model = Decoder(DecoderShape(vocabulary, tied=tied, family=family, **shape))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.1, generator=generator)
    return model


def small_model(folder: Path, family: str, template: str, **sizes) -> Path:
    """Write a model folder with a template of `trl` and a tokenizer of its family."""
    tokenizer = tokenizer_of(family_of(template), packaged_templates("trl")[template])
    model = random_decoder(family, len(tokenizer), **sizes)
    save_model(model, folder, tokenizer.eos_token_id, tokenizer.pad_token_id)
    save_tokenizer(tokenizer, folder)
    return folder
