"""Check what a run of verl on GPUs needs: rows of `agent-r1 doctor` (`app/doctor.py`)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from agent_r1.app.checks import BY_TEST, CheckRow, Facts
from agent_r1.app.doctor import CACHES
from agent_r1.app.local_engine import SMALLEST
from agent_r1.cluster import plan
from agent_r1.cluster.hardware import find_gpu
from agent_r1.config import Config
from agent_r1.ground import preflight
from agent_r1.ground.errors import first_line
from agent_r1.ground.files import home
from agent_r1.ground.machine import flash_attn_error, installed
from agent_r1.ground.preflight import Finding
from agent_r1.ground.shapes import Shape
from agent_r1.ground.units import GIB

VARLEN = "verl.attention=varlen packs rows with PyTorch's own kernel"


def needs_gpus(facts: Facts) -> bool:
    return facts.shape is not None


def needs_gpus_and_has_some(facts: Facts) -> bool:
    return facts.shape is not None and len(facts.gpus) > 0


def needs_of_gpus(config: Config, shape: Shape) -> tuple[float, dict[Path, float]]:
    """Return bytes of memory, and of disk in each folder, that a verl run needs.

    The disk includes the caches of pip, the hub's client, vLLM and Triton.
    """
    disk = plan.disk(config, shape)
    packages = disk.pop("packages")
    hub_cache = disk.pop("the hub's cache")
    # What earlier runs left counts as done. A container shares only these two folders.
    existing = bytes_of_files(home() / "artifacts") + bytes_of_files(home() / "runs")
    folders = {
        home() / "artifacts": max(sum(disk.values()) - existing, SMALLEST),
        home() / "runs": 0,
        Path(tempfile.gettempdir()): plan.KERNELS_BYTES,
    }
    cache_needs = {
        "HF_HOME": hub_cache,
        "VLLM_CACHE_ROOT": plan.KERNELS_BYTES,
        "TRITON_CACHE_DIR": plan.KERNELS_BYTES,
    }
    if installed("vllm") is None:  # pip will write each package twice: here and in its cache
        folders[Path(sys.prefix)] = packages
        cache_needs = {"PIP_CACHE_DIR": packages, **cache_needs}
    for variable, need in cache_needs.items():
        if need:
            folder = Path(os.environ.get(variable) or CACHES[variable]).expanduser()
            folders[folder] = need
    return sum(plan.host_memory_parts(config, shape).values()), folders


def bytes_of_files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_attention(facts: Facts) -> Finding:
    """Check the trainer's attention: flash-attn if it loads, else PyTorch's own kernel."""
    error = flash_attn_error()
    if error is None:
        return Finding("ok", "flash-attn loads")
    wants_flash_attn = facts.config.verl.attention == "flash_attention_2"
    if isinstance(error, ModuleNotFoundError) and not wants_flash_attn:
        return Finding("ok", f"no flash-attn; {VARLEN}")
    # vLLM imports an installed flash-attn, too, and its server would end with this error.
    detail = f"flash-attn does not load ({type(error).__name__}: {first_line(error)})"
    return Finding("fail", detail)


def check_compiler(facts: Facts) -> Finding:
    """Check what Triton builds its kernels with, as `preflight.py` does before an installation."""
    return preflight.check_compiler(sysconfig.get_path("include"))


def check_shm(facts: Facts) -> Finding:
    """Check shared memory, in which Ray's processes exchange tensors. Docker's default is 64 MB."""
    path = Path("/dev/shm")
    if not path.exists():
        remedy = "Ray uses the disk instead, which is slow"
        return Finding("warn", f"{path} does not exist", remedy)
    free = shutil.disk_usage(path).free
    detail = f"{free / GIB:.1f} GiB free at {path}"
    return Finding("ok" if free >= plan.SHM else "warn", detail)


def check_fit(facts: Facts) -> Finding:
    """Check that sampling and training fit together on the smallest GPU."""
    assert facts.shape is not None  # `needs_gpus_and_has_some` holds
    smallest = min(gpu.mib for gpu in facts.gpus) * 2**20
    gpu = dataclasses.replace(find_gpu(facts.config.verl.gpu), memory=smallest)
    problems = plan.misfits(facts.config, facts.shape, gpu)
    if problems:
        detail, _, remedy = problems[0].partition("; ")
        return Finding("fail", detail, remedy)
    rows = plan.gpu_memory(facts.config, facts.shape, gpu).values()
    sampling = sum(row[0] for row in rows) / GIB
    training = sum(row[1] for row in rows) / GIB
    detail = (
        f"sampling needs {sampling:.0f}, training {training:.0f} of {gpu.memory / GIB:.0f} GiB "
        "(computed)"
    )
    return Finding("ok", detail)


CHECKS = (
    CheckRow(
        "attention",
        check_attention,
        f"pip uninstall flash-attn; {VARLEN}",
        applies=needs_gpus,
    ),
    CheckRow(
        "shared memory",
        check_shm,
        f"start the container with --shm-size={plan.SHM // GIB}g; otherwise Ray uses the slow disk",
        applies=needs_gpus,
    ),
    CheckRow("C compiler", check_compiler, BY_TEST, applies=needs_gpus),
    CheckRow("GPU memory", check_fit, BY_TEST, applies=needs_gpus_and_has_some),
)
"""After the rows of every run (`app/doctor.py`)."""
