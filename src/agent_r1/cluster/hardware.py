"""List NVIDIA's data sheets of known GPUs; `plan.py` computes bytes and seconds from them."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.ground.errors import ConfigError
from agent_r1.ground.units import GIB


@dataclass(frozen=True)
class Gpu:
    """Hold NVIDIA's data sheet: bf16 FLOP/s without sparsity, bytes per second, bytes."""

    flops: float
    bandwidth: float
    memory: float


GPUS = {
    "H200": Gpu(989e12, 4.8e12, 140 * GIB),
    "H100": Gpu(989e12, 3.35e12, 80 * GIB),  # SXM; the PCIe card is slower
    "A100-80GB": Gpu(312e12, 2.04e12, 80 * GIB),
    "A100-40GB": Gpu(312e12, 1.555e12, 40 * GIB),
    "L40S": Gpu(362e12, 0.864e12, 45 * GIB),
    "RTX-4090": Gpu(165e12, 1.008e12, 24 * GIB),  # the Ada whitepaper
    "A10": Gpu(125e12, 0.6e12, 24 * GIB),
    "L4": Gpu(121e12, 0.3e12, 24 * GIB),
}


def find_gpu(name: str) -> Gpu:
    """Look up a GPU. Raises ConfigError if it is not in the table."""
    if name not in GPUS:
        raise ConfigError.unknown("verl.gpu", name, GPUS)
    return GPUS[name]
