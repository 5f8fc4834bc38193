"""Room 5, the model: the arithmetic of Llama, Qwen2 and Qwen3 as `transformers` has it, and its
folder format both ways."""

from __future__ import annotations

import json
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import fails_with, random_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from agent_r1.model.decoder import Decoder, attend, causal_attention
from agent_r1.model.files import FAMILIES, load_model, save_model
from agent_r1.model.policies import load_any

SHAPES = {
    "tied": {},
    "untied": {"tied": False},
    "one key head": {"kv_heads": 1},
    "three layers, other constants": {
        "layers": 3,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "tied": False,
    },
    "llama": {"family": "llama", "rope_theta": 1e5},
    "llama, wide heads": {"family": "llama", "head_width": 12, "tied": False},
    "qwen3": {"family": "qwen3"},
    "qwen3, wide heads": {"family": "qwen3", "head_width": 16, "kv_heads": 4, "tied": False},
}


def logits_of(model: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids_BT.shape[1]).expand(ids_BT.shape)
    return model.logits(model(ids_BT, positions, causal_attention))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_logits_are_those_of_transformers(shape, tmp_path):
    model = random_model(vocab=97, seed=1, **shape)
    save_model(model, tmp_path, eos_token_id=3, pad_token_id=0)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    assert type(theirs).__name__ == FAMILIES[model.shape.family]
    ids_BT = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))
    ours, theirs = logits_of(model, ids_BT), theirs(ids_BT).logits
    assert ours.std() > 0.5  # weights that make a difference, so that agreement means something
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "shape", [{}, {"family": "llama"}, {"family": "qwen3", "head_width": 16}], ids=str
)
@torch.no_grad()
def test_a_folder_written_by_transformers_can_be_read(shape, tmp_path):
    """Version 5 nests rope_theta in rope_parameters; both spellings are understood."""
    model = random_model(vocab=97, seed=1, rope_theta=5e5, tied=False, **shape)
    save_model(model, tmp_path / "ours", 3, 0)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).save_pretrained(
        tmp_path / "theirs"
    )
    again = load_model(tmp_path / "theirs")
    assert again.shape == model.shape
    assert_equal_weights(again, model)


def assert_equal_weights(a: Decoder, b: Decoder) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_saved_and_loaded_is_the_same_model(shape, tmp_path):
    model = random_model(seed=2, **shape)
    save_model(model, tmp_path, 3, 0)
    again = load_model(tmp_path)
    assert again.shape == model.shape
    assert_equal_weights(again, model)


def test_weights_may_be_spread_over_several_files(tmp_path):
    model = random_model()
    save_model(model, tmp_path, 3, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    for i, part in enumerate((names[::2], names[1::2])):
        save_file(
            {name: tensors[name] for name in part}, tmp_path / f"model-0000{i}-of-00002.safetensors"
        )
    assert_equal_weights(load_model(tmp_path), model)


def test_parameters_are_counted_by_hand():
    model = random_model(
        vocab=10, hidden_size=8, layers=1, heads=2, kv_heads=1, intermediate_size=6, tied=True
    )
    embed, norms = 10 * 8, 3 * 8
    attention = (8 + 4 + 4) * 8 + (8 + 4 + 4) + 8 * 8  # q, k, v with biases; the output without
    mlp = 3 * 8 * 6
    assert model.parameter_count == embed + norms + attention + mlp


# ---------------------------------------------------------------------------------------- rotations


@torch.no_grad()
def test_the_future_and_the_padding_change_nothing():
    model = random_model(vocab=50)
    ids = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    padded = torch.cat((ids[:, :12], torch.zeros(1, 8, dtype=torch.long)), dim=1)
    torch.testing.assert_close(
        logits_of(model, ids)[:, :12], logits_of(model, padded)[:, :12], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3)])
def test_bfloat16_attends_as_float32(queries, heads, kv_heads):
    """Our products against PyTorch's attention: with a mask of bools, with the same mask as
    numbers, and causal."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, queries, 8, generator=g)
    k, v = (torch.randn(2, kv_heads, 16, 8, generator=g) for _ in range(2))
    visible = torch.rand(2, 1, queries, 16, generator=g) < 0.5
    visible[..., 0] = True  # no empty row
    numbers = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    for mask in (visible, numbers, None) if queries == 16 else (visible, numbers):
        theirs = scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=heads != kv_heads
        )
        ours = attend(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), mask.bfloat16() if mask is numbers else mask
        )
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.03)


# ----------------------------------------------------------------------------------------- refusals


@pytest.fixture
def folder(tmp_path):
    save_model(random_model(), tmp_path, 3, 0)
    return tmp_path


def change_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_type": "olmo2"}, "unsupported_model"),
        ({"attention_bias": True}, "unsupported_model"),
        ({"hidden_act": "gelu"}, "unsupported_model"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "unsupported_model"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "unsupported_model"),
        ({"hidden_size": None}, "damaged_model"),
        ({"intermediate_size": 50}, "damaged_model"),
        ({"tie_word_embeddings": False}, "damaged_model"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused(folder, changes, code):
    change_config(folder, **changes)
    with fails_with(code):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 1000},
        {"hidden_size": 2**16},
        {"num_attention_heads": 3},
        {"head_dim": 2**11},
        {"max_position_embeddings": 2**24, "head_dim": 64},
        {"rope_theta": float("inf")},
        {"vocab_size": 10**3000},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_does_not_fit_its_weights_is_refused_before_it_takes_memory(folder, changes):
    change_config(folder, **changes)
    with limited_memory(2 << 30), fails_with("damaged_model"):
        load_any(folder)


@contextmanager
def limited_memory(most: int):
    """A larger allocation fails, and does not fill the machine where the code is wrong."""
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_missing_or_damaged_folder_is_refused(folder, tmp_path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:-10]):
        weights.write_bytes(damaged)
        with fails_with("damaged_model"):
            load_model(folder)
    weights.unlink()
    with fails_with("damaged_model"):
        load_model(folder)
    for broken in ("{", "[]", "[" * 100_000):
        (folder / "config.json").write_text(broken)
        with fails_with("damaged_model"):
            load_model(folder)
    (folder / "config.json").unlink()
    with fails_with("damaged_model"):
        load_model(folder)
    with fails_with("damaged_model"):
        load_model(tmp_path / "nowhere")


def test_older_llamas_do_not_say_that_each_head_has_its_own_keys(tmp_path):
    model = random_model(family="llama", kv_heads=4)
    save_model(model, tmp_path, 3, 0)
    change_config(tmp_path, num_key_value_heads=None, head_dim=None)
    assert_equal_weights(load_model(tmp_path), model)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_config_without_a_word_about_tied_embeddings_is_untied(family, tmp_path):
    """transformers writes what differs from its default, and that is untied: the output projection
    would be lost."""
    model = random_model(family=family, tied=False)
    save_model(model, tmp_path, 3, 0)
    change_config(tmp_path, tie_word_embeddings=None)
    assert_equal_weights(load_model(tmp_path), model)
