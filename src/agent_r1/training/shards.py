"""FSDP shards to whole weights, with PyTorch alone: verl need not be installed where a model of verl is used.

In: a folder of verl with a file of DTensors for each rank. Out: the whole weights, by name.
The files are read with `weights_only=True`: tensors, never code.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard

from agent_r1.errors import AgentR1Error


def merge_shards(actor: Path) -> dict[str, torch.Tensor]:
    """The whole weights, float32. Raises AgentR1Error when a rank's file is missing."""
    files = sorted(actor.glob("model_world_size_*_rank_*.pt"), key=lambda f: int(f.stem.rsplit("_", 1)[1]))
    if not files or len(files) != int(files[0].stem.split("_")[3]):
        raise AgentR1Error(f"{actor} has {len(files)} shards of the model; it is not a whole checkpoint of verl")
    ranks = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    return {name: _whole([rank[name] for rank in ranks]).float().contiguous() for name in ranks[0]}


def _whole(parts: list[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    (placement,) = first.placements
    local = [part.to_local() for part in parts]
    return torch.cat(local, dim=placement.dim) if isinstance(placement, Shard) else local[0]
