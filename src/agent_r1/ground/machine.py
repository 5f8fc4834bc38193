"""Describe this machine: cores, memory, GPUs, packages; set PyTorch's threads and how they wait.

In: /proc and nvidia-smi. Out: facts. `doctor.py` judges them; `device.py` chooses what a run uses.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

from agent_r1.ground.device import dtype_on, resolve_device
from agent_r1.ground.preflight import gpus_here
from agent_r1.ground.units import GIB

OPEN_FILES = 65536
"""Limit that `raise_file_limit` asks for, as Ray does; with more, some programs are slow.

They close every file that could be open.
"""
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA's driver, of Windows' driver inside WSL, and of AMD's driver."""
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Hidden from vLLM, whose sleep mode they break (vllm#40812, trl#5794).

That mode has its own memory pool.
"""
VLLM_ON_CUDA = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Defaults of vLLM's environment. FlashInfer compiles its sampler when vLLM starts, with nvcc. A
rented machine has none: a driver is not a CUDA toolkit. vLLM's own sampler needs none."""


def cores() -> int:
    """Count the cores that this process may use, by affinity and the container's quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, max(1, round(int(quota) / int(period))))
    return count


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit, and return it.

    Each episode under way has a connection to its model server, and a login shell allows 1,024.
    Child processes inherit the limit.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (OPEN_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < (most := min(hard, OPEN_FILES)):
        with suppress(OSError, ValueError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            return most
    return soft


def available_memory() -> int | None:
    """Return the free bytes of the machine or the container, or None if unknown."""
    free = _search_file(r"^MemAvailable:\s+(\d+) kB", "/proc/meminfo")
    amounts = [int(free) * 1024] if free else []
    limit, usage = (
        _read("/sys/fs/cgroup/memory.max").strip(),
        _read("/sys/fs/cgroup/memory.current").strip(),
    )
    if limit.isdigit() and usage.isdigit():
        # A container counts the file cache as used, but it can be reclaimed.
        reclaimable = int(_search_file(r"^inactive_file (\d+)$", "/sys/fs/cgroup/memory.stat") or 0)
        amounts.append(int(limit) - int(usage) + reclaimable)
    return min(amounts, default=total_memory())


def total_memory() -> int | None:
    """Return the bytes of the machine's memory or the container's limit; None if unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def torch_sees_gpu() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()


def flash_attn_error() -> Exception | None:
    """Import flash-attn; return the error, or None if it loads.

    A wheel for another torch, CUDA or glibc installs without an error. It raises ImportError for a
    missing symbol or library, OSError for a glibc that is too old, or an error of torch.
    """
    try:
        import flash_attn  # noqa: F401
    except Exception as error:
        return error
    return None


def device_names(device: str, dtype: str) -> tuple[str, str]:
    """Name the device and the dtype of `resolve_device`.

    A machine without a GPU's driver need not import PyTorch.
    """
    if device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPU_DRIVERS))):
        return "cpu", dtype_on("cpu", dtype)
    device, torch_dtype = resolve_device(device, dtype)
    return device, str(torch_dtype).removeprefix("torch.")


def _search_file(pattern: str, path: str) -> str | None:
    """Return the group of `pattern` in a file of /proc or /sys."""
    match = re.search(pattern, _read(path), re.MULTILINE)
    return match and match[1]


def _read(path: str) -> str:
    """Read a file of /proc or /sys; empty on systems without it."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def describe_machine() -> str:
    """Describe the hardware for a report: cores, processor, memory and GPU."""
    memory = total_memory()
    processor = (
        _search_file(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo")
        or platform.processor()
        or platform.machine()
    )
    parts = [f"{cores()} core{'s' if cores() > 1 else ''} of {processor.strip()}"]
    if memory:
        parts.append(f"{memory / GIB:.0f} GB")
    return ", ".join([*parts, *map(str, gpus_here())])


def installed(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_pins(text: str) -> dict[str, str]:
    """Read the `name==version` lines of a requirements file that hold on this system."""
    here = [
        line
        for line in text.splitlines()
        if re.search(r"; *sys_platform == \"(\w+)\"|$", line)[1] in (None, sys.platform)
    ]
    pins = re.findall(
        r"^[ \t]*([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?[ \t]*==[ \t]*([^\s;#]+)",
        "\n".join(here),
        re.MULTILINE,
    )
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


def same_version(have: str | None, want: str) -> bool:
    """Compare versions, ignoring a local part (`+cpu`) that the pin does not name."""
    return have == want or (have is not None and "+" not in want and have.split("+")[0] == want)


def idle_cores(seconds: float) -> float:
    """Measure for `seconds` how many of the cores that this process may use stay idle.

    Linux only: elsewhere it raises AttributeError or OSError.
    """
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}

    def idle_seconds() -> float:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # After the name: user, nice, system, idle, waiting for a disk; see proc(5).
        ticks = sum(int(line[4]) + int(line[5]) for line in lines if line[0] in usable)
        return ticks / os.sysconf("SC_CLK_TCK")

    began, before = time.perf_counter(), idle_seconds()
    time.sleep(seconds)
    return (idle_seconds() - before) / (time.perf_counter() - began)


def choose_waiting() -> None:
    """Let OpenMP's threads sleep while they wait, if other programs need the cores.

    The threads of a product wait for each other at its end. By default they spin for up to
    milliseconds, since waking a thread takes time. But if a program uses the other core, the
    spinning thread keeps the one that it waits for from running. A cold start of `smoke`, on two
    cores of a Xeon (docs/lab/experiments.md, "Speed"):

                              spinning    asleep
        idle machine              27 s      38 s
        one other program    over 190 s      38 s

    What is computed is the same. OpenMP reads its environment when PyTorch is imported, so later
    calls do nothing.
    """
    if "torch" in sys.modules or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    with suppress(OSError, AttributeError):  # macOS has neither /proc nor an affinity
        # Half a core is not tuned: the program of the table used a whole one.
        if idle_cores(0.2) < cores() - 0.5:
            os.environ["OMP_WAIT_POLICY"] = "passive"


def set_threads(threads: int) -> None:
    """Set PyTorch's number of threads; 0 means one per core that this process may use.

    PyTorch's default counts the machine's cores; more threads than a container may run wait for one
    another.
    """
    import torch

    torch.set_num_threads(threads or cores())


def matmul_rate(threads: int) -> float:
    """Measure the FLOP/s of a float32 product of the tiny model's size.

    The fastest of three counts, in about 0.01 s. NumPy computes it, because PyTorch takes seconds
    to import. NumPy reads the number of threads when it is imported.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads or cores()))
    import numpy as np

    a, b = np.ones((4096, 128), np.float32), np.ones((128, 384), np.float32)

    def seconds() -> float:
        start = time.perf_counter()
        np.dot(a, b)
        return time.perf_counter() - start

    return 2 * 4096 * 128 * 384 / min(seconds() for _ in range(3))


def gpu_matmul_rate(dtype: str) -> float:
    """Measure the FLOP/s of the same products on the GPU for 0.1 s."""
    import torch

    a, b = (
        torch.randn(*size, device="cuda", dtype=getattr(torch, dtype))
        for size in ((4096, 128), (128, 384))
    )
    a @ b
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.1:
        product = a @ b
        count += 1
    product[0, 0].item()  # waits for the GPU to finish
    return count * 2 * 4096 * 128 * 384 / (time.perf_counter() - start)
