"""Read and write a `Decoder` in Hugging Face's folder format.

In: a folder with config.json and *.safetensors, possibly untrusted. Out: a `Decoder`, or an
AgentR1Error that names the fault. `decoder.py` has the arithmetic.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model.decoder import Decoder, DecoderShape, rope_tables
from agent_r1.model.rope_scaling import RopeScaling

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Supported architectures: `model_type` in config.json -> the class in `transformers`."""
CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
"""Fields of `DecoderShape` -> their names in config.json."""
LARGEST = {
    "vocab_size": 2**22,
    "hidden_size": 2**17,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "intermediate_size": 2**20,
    "max_position_embeddings": 2**24,
}
"""Upper bounds for config.json, above every published model."""
MOST_ANGLES = 2**28
"""Positions times the width of a head.

Two tables of 1 GB: a million positions with heads of width 256.
"""

UNREADABLE = (OSError, KeyError, RuntimeError, SafetensorError)
"""What reading weights raises: a missing file or name, other sizes, a damaged header."""
TYPES = ("F64", "F32", "BF16", "F16")
"""Types of weights in safetensors that are read as numbers. Others need a scale."""
RECOMPUTED = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")
"""Ends of the names of what older versions of `transformers` wrote into a file of weights, although
it follows from config.json."""
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "min_length": 0,
}
"""Sampling fields of generation_config.json -> the value with which training samples."""
LEFT_OUT = (
    "min_p",
    "top_h",
    "penalty_alpha",
    "guidance_scale",
    "bad_words_ids",
    "force_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "min_new_tokens",
    "constraints",
    "watermarking_config",
    "renormalize_logits",
    "remove_invalid_values",
    "stop_strings",
    "dola_layers",
    "token_healing",
)
"""Sampling fields whose neutral value is their absence."""
AUTHORS_FILE = "authors_sampling.json"
"""The sampling fields of the start model's authors, for the card of an export."""
SHARDS = "model_world_size_*_rank_*.pt"
"""The files in which verl writes a model, one a rank (training/fsdp_merge.py merges them)."""


def find_shards(folder: Path) -> Path | None:
    """Return the folder with verl's shards: `folder` or its `actor/`. None without shards."""
    return next((place for place in (folder / "actor", folder) if any(place.glob(SHARDS))), None)


class OtherModelError(AgentR1Error):
    """An architecture that `Decoder` does not support. `transformers` may read it."""


def save_model(
    model: Decoder,
    folder: Path,
    eos_token_id: int | list[int],
    pad_token_id: int,
    start_generation: dict[str, Any] | None = None,
) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    The format is that of `transformers`.

    `start_generation`: the start model's generation_config.json. Its sampling fields become
    neutral, and are noted for the card. Raises OSError or SafetensorError if the folder cannot be
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    s = model.shape
    config = {
        "architectures": [FAMILIES[s.family]],
        "model_type": s.family,
        **{name: getattr(s, field) for field, name in CONFIG_NAMES.items()},
        "head_dim": s.head_dim,
        "rope_theta": s.rope_theta,
        "tie_word_embeddings": s.tied,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": str(model.embed.weight.dtype).removeprefix("torch."),
    }
    if isinstance(s.rope_scaling, RopeScaling):
        config["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(s.rope_scaling)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = neutral_generation(start_generation or {}) | {
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    if authors := authors_sampling(start_generation or {}):
        (folder / AUTHORS_FILE).write_text(json.dumps(authors, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: t.contiguous().cpu() for name, t in to_hf(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def neutral_generation(generation: dict[str, Any]) -> dict[str, Any]:
    """Return generation settings that sample as training does: from all tokens, as they are.

    A repetition penalty of the start model's authors would make a client of the trained model
    sample from another distribution than training and evaluation did.
    """
    kept = {key: value for key, value in generation.items() if key not in LEFT_OUT}
    neutral = {key: NEUTRAL[key] for key in generation if key in NEUTRAL}
    # Without a word on top_k, `transformers` takes 50.
    always = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return kept | neutral | always


def authors_sampling(generation: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling fields that are not neutral."""
    fields = {}
    for key, value in generation.items():
        is_field = key in NEUTRAL or key in LEFT_OUT
        if is_field and value is not None and value != NEUTRAL.get(key):
            fields[key] = value
    return fields


def _damaged_weights(folder: Path, error: Exception) -> AgentR1Error:
    """Return the error that names a folder whose weights cannot be read."""
    return AgentR1Error(
        f"{folder}: its weights cannot be used ({type(error).__name__}: {error}); make or "
        "download the model again",
        code="damaged_model",
    )


def load_model(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """Read a Hugging Face folder of one of `FAMILIES`. Raise AgentR1Error naming the fault."""
    shape = read_shape(folder)
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError("it has no *.safetensors")
        check_head(folder)
        _fit(shape, files)  # before memory is allocated for the sizes in config.json
        with torch.device("meta"):  # each weight is read: drawing 135 million costs half a second
            model = Decoder(shape)
        model.to_empty(device="cpu")
        model.cos, model.sin = rope_tables(shape)
        from_hf(model, {name: t for file in files for name, t in load_file(file).items()})
    except UNREADABLE as error:
        raise _damaged_weights(folder, error) from None
    return model.to(device=device, dtype=dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json, of any architecture.

    Raise AgentR1Error for an invalid one.
    """
    try:
        raw = bounds.read_json(folder / "config.json")
        if not isinstance(raw, dict):
            raise ValueError("config.json is not an object")
        for name, most in LARGEST.items():
            if type(value := raw.get(name, 1)) is not int or not 1 <= value <= most:
                raise ValueError(f"config.json has {name}={str(value):.20}, which no model has")
    except (OSError, ValueError) as error:
        raise AgentR1Error(
            f"{folder} is not a complete model ({type(error).__name__}: {error}); make or download "
            "it again",
            code="damaged_model",
        ) from None
    return raw


def read_shape(folder: Path) -> DecoderShape:
    """Read the shape in config.json.

    Raise AgentR1Error, with a remedy, for an unsupported model.
    """
    raw = read_config(folder)
    family = raw.get("model_type")
    otherwise = "choose another model to train; for a chat or an evaluation, try --backend vllm"
    if family not in FAMILIES and raw.get("auto_map"):
        raise OtherModelError(
            f"{folder} needs code of its own (`auto_map` in its config.json), which is not run; "
            "choose a model of an architecture that transformers has",
            code="remote_code",
        )
    if family not in FAMILIES:
        raise OtherModelError(
            f"{folder} is of architecture {family!r}; the local loop computes "
            f"{', '.join(FAMILIES)}; {otherwise}",
            code="unsupported_model",
        )
    rope = raw.get("rope_parameters") or {}  # transformers 5 nests what version 4 has at the top
    scaling = raw.get("rope_scaling") or rope
    scaling_kind = scaling.get("rope_type") or scaling.get("type") or "default"
    for what, there in {
        f"RoPE scaling {scaling_kind!r}": scaling_kind not in ("default", "llama3"),
        "a sliding window": raw.get("use_sliding_window"),
        "weights of another precision (quantization_config)": raw.get("quantization_config"),
        f"the activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "a bias in attention's output or in the MLP": raw.get("attention_bias")
        or raw.get("mlp_bias"),
    }.items():
        if there:
            raise OtherModelError(
                f"{folder} has {what}, which the local loop does not compute; {otherwise}",
                code="unsupported_model",
            )
    raw.setdefault(
        "num_key_value_heads", raw.get("num_attention_heads")
    )  # older Llamas have no groups
    names = {field: raw_name for field, raw_name in CONFIG_NAMES.items() if raw_name in raw}
    if missing := CONFIG_NAMES.keys() - names.keys():
        raise OtherModelError(
            f"{folder}/config.json lacks {CONFIG_NAMES[min(missing)]!r}; make or download the "
            "model again",
            code="damaged_model",
        )
    shape = DecoderShape(
        **{field: raw[name] for field, name in names.items()},
        rope_theta=raw.get("rope_theta") or rope.get("rope_theta", 10000.0),
        tied=raw.get("tie_word_embeddings", False),
        family=family,
        head_width=None
        if (width := raw.get("head_dim")) == raw["hidden_size"] // raw["num_attention_heads"]
        else width,
        rope_scaling=_scaling(folder, scaling) if scaling_kind == "llama3" else None,
    )
    real = all(
        isinstance(x, int | float) and 0 < x < math.inf
        for x in (shape.rope_theta, shape.rms_norm_eps)
    )
    heads = (
        shape.heads % shape.kv_heads == 0
        and type(shape.head_dim) is int
        and shape.head_dim in range(2, 2**12, 2)
    )
    if not (real and heads and shape.max_position * shape.head_dim <= MOST_ANGLES):
        raise AgentR1Error(
            f"{folder}/config.json: its heads, rope_theta, rms_norm_eps or max_position_embeddings "
            "are invalid; make or download it again",
            code="damaged_model",
        )
    return shape


def _scaling(folder: Path, raw: dict[str, Any]) -> RopeScaling:
    """Read Llama 3.1's RoPE scaling. Raise AgentR1Error for values that no model has."""
    numbers: list[Any] = [raw.get(field.name) for field in dataclasses.fields(RopeScaling)]
    valid = all(isinstance(x, int | float) and 0 < x < 2**32 for x in numbers)
    if not valid or numbers[2] <= numbers[1]:
        raise AgentR1Error(
            f"{folder}/config.json: its rope_scaling is invalid; make or download the model again",
            code="damaged_model",
        )
    return RopeScaling(*numbers)


def check_head(folder: Path) -> None:
    """Raise AgentR1Error if a head contradicts `tie_word_embeddings` in config.json.

    `transformers` uses the file's, this decoder the embedding: one folder, two models.
    """
    shape = read_shape(folder)
    files = sorted(folder.glob("*.safetensors"))
    if shape.tied and "lm_head.weight" in (sizes := sizes_in(files)):
        head = _tensor(files, "lm_head.weight")
        embedding = "model.embed_tokens.weight"
        if embedding in sizes and not torch.equal(head, _tensor(files, embedding)):
            raise AgentR1Error(
                f"{folder}: config.json says tie_word_embeddings=true, and its lm_head.weight is "
                "not the embedding; set tie_word_embeddings to false, or delete lm_head.weight",
                code="contradicting_head",
            )


def _tensor(files: list[Path], name: str) -> Tensor:
    for file in files:
        with safe_open(file, framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118
                return weights.get_tensor(name)
    raise KeyError(name)


def to_hf(model: Decoder) -> dict[str, Tensor]:
    """Return views of our parameters under Hugging Face's names, with the fused matrices split."""
    s = model.shape
    sizes = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
    out = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for i, b in enumerate(model.blocks):
        p = f"model.layers.{i}."
        for x, w in zip("qkv", b.qkv.weight.split(sizes), strict=True):
            out[f"{p}self_attn.{x}_proj.weight"] = w
        if s.family == "qwen2":
            for x, bias in zip("qkv", b.qkv.bias.split(sizes), strict=True):
                out[f"{p}self_attn.{x}_proj.bias"] = bias
        if s.family == "qwen3":
            out |= {
                f"{p}self_attn.q_norm.weight": b.q_norm.weight,
                f"{p}self_attn.k_norm.weight": b.k_norm.weight,
            }
        gate, up = b.gate_up.weight.chunk(2)
        out |= {
            f"{p}self_attn.o_proj.weight": b.o.weight,
            f"{p}input_layernorm.weight": b.input_norm.weight,
            f"{p}post_attention_layernorm.weight": b.post_norm.weight,
            f"{p}mlp.gate_proj.weight": gate,
            f"{p}mlp.up_proj.weight": up,
            f"{p}mlp.down_proj.weight": b.down.weight,
        }
    if model.head is not None:
        out["lm_head.weight"] = model.head.weight
    return {name: t.detach() for name, t in out.items()}


def sizes_in(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Read the shape of each weight from safetensors headers. Raise OSError and SafetensorError."""
    sizes = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            sizes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return sizes


def names_of(folder: Path) -> set[str]:
    """Return the names of the weights that `load_model` reads."""
    with torch.device("meta"):  # shapes without memory
        return set(to_hf(Decoder(read_shape(folder))))


def check_weights(folder: Path) -> None:
    """Compare names, shapes and types of the weights with config.json, and read none.

    An unread weight, such as a scale or an adapter, would change the model. One that is
    in two files is read by one program from the first, and by another from the second. Raises
    AgentR1Error for a difference.
    """
    files = sorted(folder.glob("*.safetensors"))
    places: dict[str, str] = {}
    try:
        _fit(read_shape(folder), files)
        for file in files:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118
                    kind = weights.get_slice(name).get_dtype()
                    if kind not in TYPES:
                        raise RuntimeError(f"{name} is of type {kind}, and its scale is not read")
                    if name in places:
                        raise RuntimeError(
                            f"{name} is in {places[name]} and in {file.name}; take one of them out"
                        )
                    places[name] = file.name
    except UNREADABLE as error:
        raise _damaged_weights(folder, error) from None
    for name in sorted(places.keys() - names_of(folder) - {"lm_head.weight"}):
        if not name.endswith(RECOMPUTED):
            raise AgentR1Error(
                f"{folder}: its weight {name} in {places[name]} is not read; choose another model, "
                "or take it out",
                code="unread_weight",
            )


def _fit(shape: DecoderShape, files: list[Path]) -> None:
    """Compare the weights' headers with `shape`. Raise RuntimeError or KeyError if they differ."""
    sizes = sizes_in(files)
    if f"model.layers.{shape.layers}.input_layernorm.weight" in sizes:
        raise RuntimeError(f"config.json has num_hidden_layers={shape.layers}, and there are more")
    _ = sizes[
        f"model.layers.{shape.layers - 1}.input_layernorm.weight"
    ]  # KeyError before any layer is made
    with torch.device("meta"):  # shapes without memory
        model = Decoder(shape)
    for name, view in to_hf(model).items():
        if sizes[name] != tuple(view.shape):
            raise RuntimeError(f"{name} is {sizes[name]}, expected {tuple(view.shape)}")


def from_hf(model: Decoder, tensors: dict[str, Tensor]) -> None:
    """Copy weights with Hugging Face's names into `model`, through the views of `to_hf`."""
    with torch.no_grad():
        for name, view in to_hf(model).items():
            if view.shape != tensors[name].shape:
                raise RuntimeError(
                    f"{name} is {tuple(tensors[name].shape)}, expected {tuple(view.shape)}"
                )
            view.copy_(tensors[name])
