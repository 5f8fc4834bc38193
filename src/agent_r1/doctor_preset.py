"""`agent-r1 doctor --preset hotpotqa-4xh100`: will it work here?

In: a preset that names a GPU, and the machine. Out: `Check`s for `doctor.py`: what `plan.py` says the run needs, held
against what nvidia-smi, the disk and the memory say there is.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import shutil
from pathlib import Path

from agent_r1 import hub, plan, sizes
from agent_r1.config import Config
from agent_r1.device import GpuHere, available_memory, gpus_here, torch_sees_gpu
from agent_r1.doctor import Check, existing, installed
from agent_r1.errors import ConfigError, first_line
from agent_r1.sizes import GIB

DRIVER = 580
"""NVIDIA's driver for CUDA 13, which the torch in requirements/verl-gpu.txt is built with."""
INSTALL = "pip install -r requirements/verl-gpu.txt"


def check_gpu_preset(config: Config) -> list[Check]:
    """Everything that the preset needs beyond what the laptop needs."""
    from agent_r1.workspace import Workspace

    gpus, workspace = gpus_here(), Workspace.of(config)
    try:
        shape = sizes.find_shape(config.model.path or "", workspace.start_model)
        sizes.check_context(config.rollout.max_context, config.verl.tensor_parallel, shape)
    except ConfigError as error:
        return [check_model(config) or Check("preset", "fail", str(error), "set model.path to one that the plan knows")]
    return [
        check_count(config, gpus),
        *check_fit(config, shape, gpus),
        *check_driver(gpus),
        *check_gpu_packages(config),
        check_space(config, shape, workspace.root),
        check_host(config, shape, available_memory()),
        check_shm(),
    ]


def check_count(config: Config, gpus: list[GpuHere]) -> Check:
    want = config.verl.ranks // config.verl.nodes
    if len(gpus) >= want:
        return Check("number of GPUs", "ok", f"{len(gpus)}, and {config.preset} takes {want}")
    return Check(
        "number of GPUs",
        "fail",
        f"{len(gpus)}, and {config.preset} takes {want}",
        f"use --preset {suggest_preset(gpus)} here, or a machine with {want} GPUs",
    )


def check_fit(config: Config, shape: sizes.Shape, gpus: list[GpuHere]) -> list[Check]:
    """Sampling and training beside each other on the smallest GPU."""
    if not gpus:
        return []
    gpu = dataclasses.replace(sizes.find_gpu(config.verl.gpu), memory=min(gpu.mib for gpu in gpus) * 2**20)
    if problems := plan.misfits(config, shape, gpu):
        return [Check("GPU memory", "fail", *problem.split("; ", 1)) for problem in problems]
    sampling, training = (sum(row[i] for row in plan.gpu_memory(config, shape, gpu).values()) / GIB for i in (0, 1))
    detail = f"sampling takes {sampling:.0f}, training {training:.0f} of {gpu.memory / GIB:.0f} GiB (computed)"
    return [Check("GPU memory", "ok", detail)]


def check_driver(gpus: list[GpuHere]) -> list[Check]:
    """Whether PyTorch can use the GPUs. That is asked of PyTorch: data-centre GPUs work with older drivers where a container
    brings CUDA's compatibility libraries, as ours does."""
    if not gpus:
        return []
    oldest = min((gpu.driver for gpu in gpus), key=lambda version: int(version.split(".")[0]))
    new, works = int(oldest.split(".")[0]) >= DRIVER, torch_sees_gpu()
    if works and new:
        return [Check("GPU driver", "ok", oldest)]
    if works:
        detail = f"{oldest}, and CUDA 13 is made for {DRIVER}; PyTorch can use the GPUs all the same"
        return [Check("GPU driver", "warn", detail, f"should a CUDA error come up, install driver {DRIVER} or newer")]
    if not new:
        remedy = f"install driver {DRIVER} or newer, or use Docker (./speedrun.sh), whose image brings libraries for older ones"
        return [Check("GPU driver", "fail", f"{oldest}, and CUDA 13 takes {DRIVER}", remedy)]
    return [
        Check("GPU driver", "fail", f"{oldest}, but PyTorch sees no GPU", f"{INSTALL}, and unset CUDA_VISIBLE_DEVICES")
    ]


def check_gpu_packages(config: Config) -> list[Check]:
    """What the stages import on top of what the laptop needs."""
    needed = ["verl", "vllm", "ray", "flash-attn", "fastapi", "uvicorn", *config.trainer.loggers]
    if config.data.name != "tinyhop" and not config.data.source:
        needed.append("datasets")
    if config.search.encoder != "ngram":
        needed.append("sentence-transformers")
    if hub.is_name(config.model.path):
        needed.append("huggingface-hub")
    if missing := [name for name in needed if installed(name) is None]:
        return [Check("GPU packages", "fail", f"{', '.join(missing)} missing", INSTALL)]
    return [Check("GPU packages", "ok", f"{', '.join(needed)} are installed"), check_flash_attn()]


def check_flash_attn() -> Check:
    """A wheel for another torch, CUDA or glibc installs, and fails when it is first imported: in a trainer, hours later."""
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # ImportError for a symbol or a library, OSError for glibc, and whatever torch raises
        detail = f"does not load ({type(error).__name__}: {first_line(error)})"
        remedy = (
            "its wheel is built for torch 2.11, CUDA 13, Python 3.12 and a recent glibc: use Docker (./speedrun.sh) or a newer "
            "system, or compile it: MAX_JOBS=8 pip install --no-build-isolation --no-binary :all: flash-attn==2.8.3"
        )
        return Check("flash-attn", "fail", detail, remedy)
    return Check("flash-attn", "ok", "loads")


def check_space(config: Config, shape: sizes.Shape, root: Path) -> Check:
    """What is in artifacts/ and runs/ already need not be found again."""
    place = existing(root)
    made = sum(f.stat().st_size for part in ("artifacts", "runs") for f in (root / part).rglob("*") if f.is_file())
    need, free = sum(plan.disk(config, shape).values()) - made, shutil.disk_usage(place).free
    detail = f"{free / GIB:.0f} GiB free at {place}, {max(need, 0) / GIB:.0f} may be needed"
    if free >= need:
        return Check("disk for the preset", "ok", detail)
    return Check("disk for the preset", "fail", detail, "free space, or set AGENT_R1_HOME to a larger disk")


def check_host(config: Config, shape: sizes.Shape, free: int | None) -> Check:
    need = sum(plan.host_memory(config, shape).values())
    if free is None:
        return Check("host memory", "warn", "cannot tell how much is free", f"see that {need / GIB:.0f} GiB are")
    detail = f"{free / GIB:.0f} GiB free, {need / GIB:.0f} needed with one search service, as the speedrun starts it"
    if free < need:
        return Check("host memory", "fail", detail, "take a machine with more, or a smaller model")
    return Check("host memory", "ok", detail)


def check_shm(path: str = "/dev/shm") -> Check:
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return Check("shared memory", "warn", f"there is no {path}", "Ray falls back on the disk, which is slow")
    detail = f"{free / GIB:.1f} GiB free at {path}"
    if free < plan.SHM:
        remedy = f"give the container --shm-size={plan.SHM // GIB}g; Ray is slow on the disk"
        return Check("shared memory", "warn", detail, remedy)
    return Check("shared memory", "ok", detail)


def check_preset(config: Config) -> list[Check]:
    """Is what the preset asks for here?"""
    if config.engine == "verl" and config.verl.gpu:
        return check_gpu_preset(config)
    if config.trainer.device == "cuda" and not torch_sees_gpu():
        return [Check("preset", "fail", f"{config.preset} runs on a GPU and there is none", "use --preset laptop")]
    return [check_model(config) or Check("preset", "ok", f"{config.preset} can run here")]


def check_model(config: Config) -> Check | None:
    """A finding when the start model is a folder that is not there."""
    path = config.model.path
    if path is None or Path(path).is_dir() or hub.is_name(path):
        return None
    return Check("preset", "fail", f"there is no model at {path}", "set model.path to a local folder")


def suggest_preset(gpus: list[GpuHere]) -> str:
    """The preset for such GPUs; of unlike ones, the smallest decides."""
    memory = min((gpu.mib for gpu in gpus), default=0) / 1024
    if memory >= 70:
        return next(name for count, name in PRESETS_80GB if len(gpus) >= count)
    return "hotpotqa-1x24gb" if memory >= 20 else "laptop"


PRESETS_80GB = ((8, "hotpotqa-8xh100"), (4, "hotpotqa-4xh100"), (2, "hotpotqa-2x80gb"), (1, "hotpotqa-1x80gb"))
"""By the number of GPUs."""
