"""Run `agent-r1` on a CPU with the configuration and environment of a GPU run.

    python -m lab.rehearsals._as_on_a_gpu train grpo --preset hotpotqa-4xh100 ...

verl gets `compose.overrides(..., "cuda")` and `launch.environment(..., "cuda")`, as in a GPU run.
`CANNOT`, `NEEDS` and `SMALLER` hold the differences: what a CPU cannot do, what it requires, and
smaller sizes. Evaluations use vLLM, as on GPUs. For the doctor, an `nvidia-smi` on the path lists
cards. Packages, PyTorch's answer, memory and disk are faked here.
"""

# `agent-r1` has no setting that says which program evaluates.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from agent_r1.app import cli, doctor, stages
from agent_r1.cluster import doctor as gpu_rows
from agent_r1.cold_start import stage as cold_start
from agent_r1.config import Config
from agent_r1.ground import device
from lab.rehearsals import _varlen

ROOT = Path(__file__).parents[2]
CANNOT = {
    "changed": {
        "trainer": {"device": "cpu"},
        "actor_rollout_ref": {
            "rollout": {
                "free_cache_engine": False,  # vLLM's CPU backend can neither sleep nor wake up,
                "enforce_eager": True,  # has no CUDA graphs,
                # and crashes on a seeded request in chunks; requests have seeds on a CPU
                "enable_chunked_prefill": False,
            },
        },
    },
    "added": {
        "actor_rollout_ref": {
            "rollout": {
                "enable_sleep_mode": False,
                "engine_kwargs": {
                    "vllm": {"worker_extension_cls": "agent_r1.cluster.cpu.CpuWorkerExtension"}
                },
            },
        },
    },
}
SMALLER = {  # four samplers and four ranks in 16 GB
    "changed": {"transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}},
    "added": {
        "actor_rollout_ref": {
            "rollout": {"engine_kwargs": {"vllm": {"num_gpu_blocks_override": 256}}}
        }
    },
}
NEEDS = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lab.rehearsals._gpu_worker",
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            both[key] = merge(below[key], above[key])
    return both


def a_large_machine() -> None:
    """Fake hundreds of gigabytes and CUDA packages for the doctor."""
    _varlen.install()
    doctor.torch_sees_gpu = lambda: True
    doctor.installed = gpu_rows.installed = lambda name: "faked"
    doctor.available_memory = lambda: 2**40
    shutil.disk_usage = lambda path: SimpleNamespace(free=2**40)


def main(argv: list[str]) -> int:
    """Run the command line, with the CPU's necessary differences patched in."""
    device.resolve_device = lambda device, dtype: (
        "cpu",
        torch.bfloat16,
    )  # where tensors lie; the others import it from there
    stages.resolve_device = cold_start.resolve_device = device.resolve_device
    stages._backend = lambda config, model: "vllm"
    from agent_r1.cluster import launch

    overrides, environment = launch.overrides, launch.driver_environment

    def gpu_environment(config: Config, device: str, mark: str, scratch: Path) -> dict[str, str]:
        ours = (
            environment(config, "cuda", mark, scratch)
            | NEEDS
            | {"VLLM_CACHE_ROOT": str(scratch / "vllm")}
        )
        ours["PYTHONPATH"] = os.pathsep.join(
            (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
        )
        ours.pop("CUDA_VISIBLE_DEVICES", None)
        return ours

    ours = merge(CANNOT, SMALLER)
    launch.overrides = lambda config, sources, device: merge(
        overrides(config, sources, "cuda"), ours
    )
    launch.driver_environment = gpu_environment
    if argv[0] == "doctor":
        a_large_machine()
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
