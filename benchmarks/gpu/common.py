"""Share model sizes, the GPU's clock and its memory between both measurements."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from agent_r1.ground.shapes import MODELS, Shape
from agent_r1.ground.units import GIB

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def shape_here(name: str) -> Shape:
    """Return the sizes of a model in `sizes.MODELS`; without a GPU much smaller test sizes."""
    small = {
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,  # the least that vLLM takes on a CPU
        "intermediate": 128,
        "vocab": 1024,
    }
    return MODELS[name] if CUDA else replace(MODELS[name], **small)


def reset_peak() -> None:
    """Forget the largest amount of GPU memory seen so far."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return the peak GPU memory since the last reset, in GiB; 0 without a GPU."""
    return round(torch.cuda.max_memory_allocated() / GIB, 2) if CUDA else 0.0


def reserved_gib() -> float:
    """Return the allocator's peak since the last reset in GiB; 0 without a GPU."""
    return round(torch.cuda.max_memory_reserved() / GIB, 2) if CUDA else 0.0


def finished() -> float:
    """Wait for the GPU, and return the clock in seconds."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()
