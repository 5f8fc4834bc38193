"""Choose a run's device, dtype and chunk size. `machine.py` describes the machine."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from agent_r1.config.settings import TrainerConfig
from agent_r1.ground.errors import ConfigError

if TYPE_CHECKING:
    import torch  # it takes seconds to import

LOGITS = 1 << 24
"""Logits at a time in a training pass (training/forward.py): all of a tiny model's, or 111 tokens of 150,000 words."""
SAMPLING_HERE: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops of this process's samplers. `rollout/sampler.py` adds them; `search/coalescer.py` waits in them."""


def resolve_device(trainer: TrainerConfig) -> tuple[str, torch.dtype]:
    """Resolve `auto` and `fast` for this machine. Raises ConfigError if CUDA is requested and missing."""
    import torch

    if trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but PyTorch sees no CUDA GPU; use trainer.device=auto, or run agent-r1 doctor",
            code="no_cuda",
        )
    device = ("cuda" if torch.cuda.is_available() else "cpu") if trainer.device == "auto" else trainer.device
    native = device == "cuda" or (trainer.dtype == "fast" and torch.cpu.get_capabilities().get("avx512_bf16", False))
    dtype = trainer.dtype if trainer.dtype in ("float32", "bfloat16") else "bfloat16" if native else "float32"
    return device, getattr(torch, dtype)
