"""Merge FSDP shards into whole weights, without verl.

In: a folder of verl with a file of DTensors for each rank. Out: the whole weights, by name, or in a
model folder. Files are read with `weights_only=True`: tensors, never code.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors.torch import save_file

from agent_r1.ground.errors import AgentR1Error
from agent_r1.model import files as model_files
from agent_r1.model.files import SHARDS
from agent_r1.training.checkpoint import refuse_weights
from agent_r1.training.settings import LORA_ALPHA


def write_merged(actor: Path, base: Path, out: Path) -> None:
    """Write the weights of `actor`, float32, to `out`, with `base`'s config.json.

    Raises AgentR1Error for NaN or infinity, OSError or SafetensorError if it cannot be written.
    """
    weights = merge_shards(actor)
    config = model_files.read_config(base)
    refuse_weights(weights.values(), f"the policy for {out.name}")
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def merge_adapters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge LoRA adapters into their weights, float32: W + LORA_ALPHA B A.

    `weights` has the names of `peft`, or Hugging Face's for weights without an adapter, which stay
    unchanged.
    """
    plain = {
        name.removeprefix("base_model.model.")
        .replace(".base_layer.", ".")
        .replace(".default.", "."): tensor.float()
        for name, tensor in weights.items()
    }
    for name in [name for name in plain if name.endswith(".lora_A.weight")]:
        A = plain.pop(name)
        B = plain.pop(name.replace(".lora_A.", ".lora_B."))
        target = name.replace(".lora_A.weight", ".weight")
        plain[target] = (
            plain[target] + LORA_ALPHA * B @ A
        )  # not in place: the tensor may be mapped from a file
    return {name: tensor.contiguous() for name, tensor in plain.items()}


def merge_shards(actor: Path) -> dict[str, torch.Tensor]:
    """Merge the shards of all ranks, in float32. Raise AgentR1Error if a rank's file is missing."""
    # Imported here because it takes a second. `torch.load` requires it.
    from torch.distributed.tensor import DTensor, Shard

    def whole(parts: list[torch.Tensor]) -> torch.Tensor:
        first = parts[0]
        if not isinstance(first, DTensor):
            return first
        # On a two-dimensional mesh (replicas of a sharded group), the first group has all parts.
        placement = first.placements[-1]
        group = first.device_mesh.size(-1)
        local = [part.to_local() for part in parts[:group]]
        return torch.cat(local, dim=placement.dim) if isinstance(placement, Shard) else local[0]

    files = sorted(actor.glob(SHARDS), key=lambda f: int(f.stem.rsplit("_", 1)[1]))
    if not files or len(files) != int(files[0].stem.split("_")[3]):
        raise AgentR1Error(
            f"{actor} has {len(files)} shards of the model; it is not a complete verl checkpoint",
            code="damaged_checkpoint",
        )
    # It warns that a mesh without processes cannot be compiled for; nothing is compiled here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    # mmap: the files are not read into memory, which also needs room for the whole weights.
    ranks = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
    return merge_adapters({name: whole([rank[name] for rank in ranks]) for name in ranks[0]})
