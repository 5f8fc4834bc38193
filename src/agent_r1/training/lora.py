"""Train LoRA adapters: two thin matrices next to each frozen weight matrix (2106.09685, section 4.1).

    y = W x + (alpha / r) B A x        A: [r, in], random;  B: [out, r], zero, so training begins at the start model

Adam then stores two numbers for each of the (in + out) r weights of A and B, not of the in x out of W. Training a model
of 1.5B parameters takes 6 GB instead of 25. Loop, losses and sampler do not change: `peft` adds A and B to the decoder's
linear layers.

In: a `Decoder`, or a checkpoint with adapters. Out: a decoder that trains only A and B; an adapter folder in the format
of `peft`; a merged model W + (alpha / r) B A. A checkpoint has only the adapters, and every command that reads it merges
them. With verl, `peft` is verl's own (`actor_rollout_ref.model.lora_rank`), and `shards.fold` merges its shards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_r1.ground.errors import AgentR1Error, extra
from agent_r1.ground.files import whole, writing
from agent_r1.rollout import model_files
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.decoder import Decoder
from agent_r1.training.fsdp_merge import merge_adapters, write_weights
from agent_r1.training.settings import LORA_ALPHA
from agent_r1.training.tiny_model import save_tokenizer

TARGETS = ("qkv", "o", "gate_up", "down")
"""The adapted layers of a `Block`: attention and MLP, as "LoRA Without Regret" (Thinking Machines, 2025) advises."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGED = "merged"
"""Folder next to `model/` in a checkpoint; made when the model is first read."""


def add_adapters(model: Decoder, rank: int) -> None:
    """Add adapters to the linear layers of `model`, in place, and freeze all other weights."""
    with extra("lora", "actor.lora_rank"):
        from peft import LoraConfig, inject_adapter_in_model
    with torch.random.fork_rng():  # every run starts with the same A, also a resumed one
        torch.manual_seed(0)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=LORA_ALPHA * rank, target_modules=list(TARGETS)), model)


def load_adapters(folder: Path, base: Path, device: str, rank: int) -> Decoder:
    """Read `base` with the adapters of the model folder `folder`, or with new ones."""
    model = model_files.load_model(base, device)
    add_adapters(model, rank)
    if is_adapter(folder):
        saved = load_file(folder / ADAPTER_WEIGHTS, device=device)
        with torch.no_grad():
            for name, tensor in _by_name(model).items():
                tensor.copy_(saved[name])
    return model


def save_adapters(model: Decoder, chat: ChatFormat, base: Path, folder: Path) -> None:
    """Write the adapters of `model` and the tokenizer in the format of `peft` and `transformers`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().clone() for name, tensor in _by_name(model).items()}  # safetensors needs own memory
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    rank = len(model.blocks[0].qkv.lora_A["default"].weight)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": rank,
        "lora_alpha": LORA_ALPHA * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_tokenizer(chat.tokenizer, folder)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has adapters instead of a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def merged_model(checkpoint: Path) -> Path:
    """Return a checkpoint's merged model in Hugging Face's format; made at the first call.

    Raises AgentR1Error if the base model has moved or the disk is full.
    """
    target, adapter = checkpoint / MERGED, checkpoint / "model"
    if target.is_dir():
        return target
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    if (
        config["lora_alpha"] != LORA_ALPHA * config["r"]
    ):  # another program's adapter: our scale would give another model
        raise AgentR1Error(
            f"{adapter} has another scale than this program's adapters; merge it with `agent-r1 export`",
            code="other_adapter",
        )
    base = Path(config["base_model_name_or_path"])
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise AgentR1Error(
            f"{checkpoint} has LoRA adapters of {base}, which does not exist; restore the model, or run `agent-r1 cold-start` "
            "with the run's settings again",
            code="missing_base_model",
        )
    weights = {name: tensor for file in (*files, adapter / ADAPTER_WEIGHTS) for name, tensor in load_file(file).items()}
    with writing(target), whole(target) as part:
        part.mkdir()
        for file in (*base.glob("*token*.json"), *base.glob("*.jinja"), *base.glob("generation_config.json")):
            shutil.copyfile(file, part / file.name)
        write_weights(merge_adapters(weights), base, part)
    return target


def _by_name(model: Decoder) -> dict[str, Tensor]:
    """Return views of the adapters under the names of `peft` and Hugging Face.

    Hugging Face splits our fused matrices (qkv, gate_up). The parts share A, and each has its own rows of B.
    """
    s = model.shape
    heads = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
    parts = {
        "qkv": dict(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), heads, strict=True)),
        "o": {"self_attn.o_proj": s.hidden_size},
        "gate_up": {"mlp.gate_proj": s.intermediate_size, "mlp.up_proj": s.intermediate_size},
        "down": {"mlp.down_proj": s.hidden_size},
    }
    found = {}
    for number, block in enumerate(model.blocks):
        for layer, rows in parts.items():
            adapted = getattr(block, layer)
            A, B = adapted.lora_A["default"].weight.data, adapted.lora_B["default"].weight.data
            for name, part in zip(rows, B.split(list(rows.values())), strict=True):
                place = f"base_model.model.model.layers.{number}.{name}"
                found |= {f"{place}.lora_A.weight": A, f"{place}.lora_B.weight": part}
    return found
