"""A model folder is compared with `transformers`: ids, rows, log-probabilities, and the key under
which a result is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import fails_with
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from agent_r1.chat import fit
from agent_r1.chat.tokenizer import load_chat
from agent_r1.env.hermes import HERMES
from agent_r1.training import folder_check
from agent_r1.training.folder_check import check_folder

AGENT = Path(__file__).parents[1] / "recipes" / "laptop" / "agent"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(AGENT, tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **keys) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_a_sound_folder_is_compared_once(folder, monkeypatch):
    text = check_folder(folder, weights=True)
    assert "ids of texts are those of transformers" in text
    assert "16 tokens differ by at most" in text
    monkeypatch.setattr(folder_check, "check_ids", lambda *_: pytest.fail("compared again"))
    assert check_folder(folder, weights=True) == text


@pytest.mark.parametrize(
    "state",
    [
        {"truncation": {"direction": "Right", "max_length": 12, "strategy": "LongestFirst",
                        "stride": 0}},
        {"padding": {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None,
                     "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    ],
)  # fmt: skip
def test_a_tokenizer_that_cuts_or_fills_does_neither_here(folder, state):
    text = "Roslir is a film by Kirdum, and it is starring Pirkel in the city of Tulo."
    before = load_chat(folder).encode_data(text)
    change(folder / "tokenizer.json", **state)
    chat = load_chat(folder)
    assert chat.encode_data(text) == before
    # ... also after transformers switched it in the same object.
    chat.tokenizer(text, truncation=True, max_length=5, padding=False)
    chat.tokenizer(text)
    assert chat.encode_trusted(text) == before
    check_folder(folder, weights=False)


def test_more_ids_than_rows_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding[:-9].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder / "config.json", vocab_size=len(embedding) - 9)
    with fails_with("more_ids_than_rows"):
        check_folder(folder, weights=True)


def test_weights_that_are_read_otherwise_are_refused_with_the_cause(folder):
    weights = load_file(folder / "model.safetensors")
    older = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(older, folder / "older.safetensors", metadata={"format": "pt"})
    with fails_with("damaged_model", "is in model.safetensors and in older.safetensors"):
        check_folder(folder, weights=True)


def shard(folder: Path, wrong_index: bool = False) -> None:
    """Write the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    place = {name: files[n >= len(names) // 2] for n, name in enumerate(names)}
    for file in files:
        part = {name: weights[name] for name in names if place[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    if wrong_index:
        place = dict.fromkeys(names, files[0])
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read_as_the_index_says_or_refused(folder):
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder)
    check_folder(folder, weights=True)
    # An older or newer whole model next to them: transformers reads it, and vLLM the shards.
    (folder / "model.safetensors").write_bytes(whole)
    with fails_with("damaged_model", "and in model.safetensors; take one of them out"):
        check_folder(folder, weights=True)


def test_an_index_that_lacks_a_shard_is_refused_with_the_cause(folder):
    shard(folder, wrong_index=True)
    with fails_with("other_weights", "model-00002-of-00002.safetensors is not in model.safet"):
        check_folder(folder, weights=True)


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.float32, "unread_weight"),
        ("visual.patch.weight", torch.bfloat16, "unread_weight"),
        ("model.layers.0.mlp.down_proj.weight_scale", torch.float32, "unread_weight"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.float32, None),
        ("model.norm.weight", torch.int8, "damaged_model"),
        ("model.norm.weight", torch.float8_e4m3fn, "damaged_model"),
        ("model.norm.weight", torch.float16, None),
        ("model.norm.weight", torch.float64, None),
    ],
)
def test_an_unread_weight_or_type_is_refused(folder, name, kind, code):
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.ones(len(weights["model.norm.weight"])).to(kind)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if code is None:
        assert "not compared" not in check_folder(folder, weights=True)
    else:
        with fails_with(code, name):
            check_folder(folder, weights=True)


def test_a_model_that_transformers_cannot_run_is_refused(folder):
    """Its sliding window has no width."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change(folder / "config.json", layer_types=["sliding_attention"] * layers)
    with fails_with("damaged_model", "transformers cannot run"):
        check_folder(folder, weights=True)


def test_a_weight_that_is_no_number_is_named(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with fails_with("other_weights", "model.norm.weight has a value that is no number"):
        check_folder(folder, weights=True)


def test_an_adapter_next_to_weights_is_refused(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    with fails_with("adapter_not_read", "merge it into the weights"):
        check_folder(folder, weights=False)


def test_a_model_of_few_positions_is_compared_on_as_many(folder):
    change(folder / "config.json", max_position_embeddings=8)
    assert "8 tokens differ by at most" in check_folder(folder, weights=True)


def test_other_ids_are_refused(folder):
    """Without `auto_map`, transformers rebuilds a tokenizer of its own for this config."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["auto_map"]
    file.write_text(json.dumps(settings | {"tokenizer_class": "Qwen2Tokenizer"}))
    with fails_with("other_ids"):
        check_folder(folder, weights=False)


def test_an_added_token_that_another_class_finds_otherwise_is_refused(folder, monkeypatch):
    """It takes the blanks before it. No text without that token shows the difference."""
    other = shutil.copytree(folder, folder.parent / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["lstrip"] = token["content"] == "<|im_end|>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    theirs = AutoTokenizer.from_pretrained(other)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: theirs)
    with fails_with("other_ids"):
        check_folder(folder, weights=False)


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
def test_a_changed_tokenizer_forces_a_new_comparison_of_the_template(folder, name):
    def key():
        return fit._cache_file(load_chat(folder), "hermes", HERMES, True)

    before = key()
    assert key() == before
    text = (folder / name).read_text() if (folder / name).exists() else "{}"
    (folder / name).write_text(text + "\n")
    assert key() != before


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
             "chat_template.jinja", "generation_config.json"],
)  # fmt: skip
def test_each_change_of_a_folder_forces_a_new_check(folder, name):
    before = folder_check._cache_file(folder, True)
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data)
    assert folder_check._cache_file(folder, True) != before


def test_other_versions_or_code_force_a_new_check(folder, monkeypatch, tmp_path):
    before = folder_check._cache_file(folder, True)
    monkeypatch.setattr(folder_check.metadata, "version", lambda package: "0")
    assert folder_check._cache_file(folder, True) != before
    monkeypatch.undo()
    monkeypatch.setattr(folder_check, "_CODE", folder_check._CODE[1:])
    assert folder_check._cache_file(folder, True) != before


def test_a_large_model_is_not_compared_and_its_types_are(folder, monkeypatch):
    monkeypatch.setattr(folder_check, "LARGEST_COMPARED", 1000)
    assert "not compared" in check_folder(folder, weights=True)
    weights = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with fails_with("damaged_model"):
        check_folder(folder, weights=True)
