"""Choose a run's device, dtype and chunk size. `machine.py` describes the machine."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.ground.errors import ConfigError

if TYPE_CHECKING:
    import torch  # it takes seconds to import

CPU = Path("/proc/cpuinfo")  # of Linux; elsewhere `fast` is float32 on a CPU
LOGITS = 1 << 24
"""Logits at a time in a training pass: all of a tiny model's, or 111 tokens of 150,000 words.

training/forward.py computes them.
"""
SAMPLING_HERE: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops of this process's samplers.

`model/sampler.py` adds them; `search/coalescer.py` waits in them.
"""


def resolve_device(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """Resolve `auto` and `fast` of the `trainer` settings here.

    Raises ConfigError if CUDA is requested and missing.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but PyTorch sees no CUDA GPU; use trainer.device=auto, or run "
            "agent-r1 doctor",
            code="no_cuda",
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        avoid_cudnn_attention()
    return device, getattr(torch, dtype_on(device, dtype))


def avoid_cudnn_attention() -> None:
    """Leave attention to PyTorch's other kernels: cuDNN compiles a plan for each new shape.

    An agent's batches have a new shape in nearly every pass. On an H100 (torch 2.11), it took 37 ms
    for decoding and 100 to 2,000 ms with a gradient. Without cuDNN it took 0.2 to 1 ms. In
    bfloat16, for which PyTorch chooses cuDNN there, a step of the preset small took 3.1 s, and 0.25
    s in float32.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_on(device: str, dtype: str) -> str:
    """Resolve `auto` and `fast` to the name of a dtype, without importing PyTorch."""
    if dtype not in ("auto", "fast"):
        return dtype
    if device == "cuda":
        return "bfloat16"
    if dtype == "fast" and CPU.exists() and "avx512_bf16" in CPU.read_text():
        return "bfloat16"
    return "float32"
