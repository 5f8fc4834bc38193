"""Choose a preset for this machine's GPUs, and check the machine, before anything is installed.

    python3 src/agent_r1/ground/preflight.py --choose    preset and packages for this machine
    python3 src/agent_r1/ground/preflight.py --cards     only the checks of the GPUs
    python3 src/agent_r1/ground/preflight.py FOLDER [MODEL]
                                                         all checks; FOLDER: of the environment;
                                                         MODEL: on the hub, OWNER/NAME

In: the machine, as nvidia-smi, ldconfig and the file system describe it. Out: the choice in two
lines, or a line per check and exit code 1 if one failed. It needs Python 3.8 and its standard
library, nothing else, and takes seconds. A check that could not tell says so and never stops a run.
`doctor.py`, which runs after the installation, uses `Finding` and some checks from here.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Tuple
from urllib.parse import urlsplit

DRIVER = 580
"""Driver for CUDA 13, which the torch of requirements/verl-gpu.txt is built with."""
GLIBC = (2, 35)
"""The C library for which the packages of requirements/verl-gpu.txt were resolved: Ubuntu 22.04."""
GLIBCXX = "GLIBCXX_3.4.30"
"""The same machine's C++ library; packages compiled for newer systems need a newer symbol."""
PACKAGES_GIB = 11
"""Disk of requirements/verl-gpu.txt when installed (measured); pip's cache takes as much again."""
DATA_CENTRE = re.compile(r"\b(H100|H200|H20|GH200|B200|A100|A30|A40|A10G?|A2|L4|L40S?|V100|T4)\b")
"""Cards on which CUDA's compatibility libraries work with an older driver. Not on GeForce cards."""
CAPABILITY = 8.0
"""CUDA's number for Ampere, the first with bfloat16 and FlashAttention 2: A10, RTX 3090, A100."""
LEAST_GIB = 20
"""Memory of a card for the smallest GPU preset, which is sized for 24 GB."""
PRESETS = (
    (8, 70, "hotpotqa-8xh100", "H100"),
    (4, 70, "hotpotqa-4xh100", "H100"),
    (2, 70, "hotpotqa-2x80gb", "A100-80GB"),
    (1, 70, "first-agent-1xh100", "H100"),
    (1, LEAST_GIB, "first-agent-1x24gb", "RTX-4090"),
)
"""(GPUs, least GiB of each, preset, the card that its plan is for); the first that fits counts."""
CPU_PRESET = "discover"
PLANS = (
    ("H200", r"\bH200\b", 0),
    ("H100", r"\bH100\b", 0),
    ("A100-80GB", r"\bA100\b", 70),
    ("A100-40GB", r"\bA100\b", 0),
    ("L40S", r"\bL40S\b", 0),
    ("RTX-4090", r"\bRTX 4090\b", 20),
    ("A10", r"\bA10G?\b", 0),
    ("L4", r"\bL4\b", 0),
)
"""(name in `hardware.GPUS`, pattern of nvidia-smi's name, least GiB); the first that fits."""
COMPAT = "/usr/local/cuda-13.0/compat"

Status = Literal["ok", "warn", "fail", "unknown"]


class Finding(NamedTuple):
    """Hold what a check of the machine found. `doctor` uses this class, too."""

    status: Status
    detail: str
    """what was seen"""
    remedy: str = ""
    """empty if nothing needs doing"""


def output(*command: str) -> str:
    """Return what a program prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


# ---------------------------------------------------------------------------------------- the GPUs


@dataclass(frozen=True)
class GpuHere:
    """Describe a GPU as nvidia-smi reports it."""

    name: str
    mib: int
    driver: str
    capability: float | None = None
    """7.5 is a T4, 8.0 an A100, 9.0 an H100. None where nvidia-smi is too old."""

    @property
    def too_old(self) -> bool:
        """Return whether the GPU is older than Ampere."""
        return self.capability is not None and self.capability < CAPABILITY

    @property
    def driver_major(self) -> int:
        return int(self.driver.split(".")[0])

    def __str__(self) -> str:
        return f"{self.name}, {self.mib} MiB, driver {self.driver}"


def gpus_here() -> list[GpuHere]:
    """List the NVIDIA GPUs; none if nvidia-smi is missing or does not answer."""
    for more in (",compute_cap", ""):  # drivers before 510 do not know compute_cap
        query = f"--query-gpu=name,memory.total,driver_version{more}"
        gpus = []
        for line in output("nvidia-smi", query, "--format=csv,noheader").splitlines():
            fields = re.match(r"(.+), (\d+) MiB, (\d[\d.]*)(?:, (\d[\d.]*))?\s*$", line)
            if fields:
                name, mib, driver, capability = fields.groups()
                number = float(capability) if capability else None
                gpus.append(GpuHere(name, int(mib), driver, number))
        if gpus:
            return gpus
    return []


def has_amd_gpu() -> bool:
    programs = ("rocm-smi", "amd-smi")
    return Path("/dev/kfd").exists() or any(shutil.which(name) for name in programs)


def list_gpus(gpus: list[GpuHere]) -> str:
    """Return `4 x NVIDIA H100 80GB HBM3, 80 GiB`."""
    counts = Counter(f"{gpu.name}, {gpu.mib / 1024:.0f} GiB" for gpu in gpus)
    return " and ".join(f"{count} x {name}" for name, count in sorted(counts.items()))


def suggest_preset(gpus: list[GpuHere]) -> str:
    """Return the preset for these GPUs, whatever their driver; the smallest GPU decides."""
    if not gpus or any(gpu.too_old for gpu in gpus):
        return CPU_PRESET
    memory = min(gpu.mib for gpu in gpus) / 1024
    for count, least_gib, preset, _ in PRESETS:
        if len(gpus) >= count and memory >= least_gib:
            return preset
    return CPU_PRESET


def lacks_for_gpus(gpus: list[GpuHere]) -> list[str]:
    """Return what a GPU run needs and these GPUs lack, one phrase each."""
    lacks = []
    oldest = min(gpus, key=lambda gpu: gpu.driver_major)
    if oldest.driver_major < DRIVER and not has_compat(oldest.name):
        lacks.append(f"driver {DRIVER} (here {oldest.driver_major})")
    old_gpus = [gpu for gpu in gpus if gpu.too_old]
    if old_gpus:
        lacks.append(
            f"compute capability {CAPABILITY}, as of an A10, L4, RTX 3090, A100 or newer "
            f"({old_gpus[0].name}: {old_gpus[0].capability})"
        )
    smallest = min(gpus, key=lambda gpu: gpu.mib)
    if smallest.mib / 1024 < LEAST_GIB:
        lacks.append(f"{LEAST_GIB} GiB on a GPU ({smallest.name}: {smallest.mib / 1024:.0f})")
    return lacks


def plan_setting(gpus: list[GpuHere], sized_for: str) -> str:
    """Return `verl.gpu=NAME` if the plan knows these cards and the preset is sized for others."""
    smallest = min(gpus, key=lambda gpu: gpu.mib)
    for name, pattern, least_gib in PLANS:
        if re.search(pattern, smallest.name) and smallest.mib / 1024 >= least_gib:
            return "" if name == sized_for else f"verl.gpu={name}"
    return ""


def describe_idle_cards(rank_count: int, count: int) -> str:
    """Return a note if a preset leaves some of the cards idle."""
    if rank_count == count:
        return ""
    note = f"; it uses {rank_count} of {count} cards"
    # Minibatches of the presets are powers of two, so only such numbers of ranks divide them.
    if rank_count == 1 and count in (2, 4, 8):
        note += f" (verl.ranks={count} uses all)"
    return note


def choose(gpus: list[GpuHere]) -> tuple[str, str]:
    """Choose for a user who named no preset; return the choice and its reason.

    The choice is in words: preset, packages (cpu or gpu), and a setting if one is needed. A GPU
    preset is chosen only if these GPUs lack nothing that it needs.
    """
    on_cpu = f"{CPU_PRESET} cpu"
    if not gpus and has_amd_gpu():
        return on_cpu, "because a GPU run needs a GPU of NVIDIA, and this one is AMD's"
    if not gpus:
        return on_cpu, "because there is no GPU here; --preset smoke is a shorter run"
    lacks = lacks_for_gpus(gpus)
    if lacks:
        return on_cpu, f"on the CPU, because a GPU run needs {'; '.join(lacks)}"
    preset = suggest_preset(gpus)
    if any("Laptop" in gpu.name for gpu in gpus):
        name = gpus[0].name
        return on_cpu, f"on the CPU, because {name} is a laptop's; --preset {preset} uses it"
    rank_count, sized_for = next((row[0], row[3]) for row in PRESETS if row[2] == preset)
    reason = f"because of {list_gpus(gpus)} here{describe_idle_cards(rank_count, len(gpus))}"
    if platform.machine() != "x86_64":
        reason += f"; this project has not run it on {platform.machine()} yet"
    return f"{preset} gpu {plan_setting(gpus, sized_for)}".strip(), reason


def check_cards() -> Finding:
    """Check that a GPU preset can use GPUs of this kind and size."""
    gpus = gpus_here()
    if not gpus and has_amd_gpu():
        remedy = "rent one of NVIDIA, or use --preset discover on the CPU"
        return Finding("fail", "a GPU of AMD", remedy)
    if not gpus:
        return Finding("unknown", "nvidia-smi does not answer", f"install NVIDIA's driver {DRIVER}")
    lacks = [reason for reason in lacks_for_gpus(gpus) if not reason.startswith("driver")]
    if lacks:
        remedy = "use --preset discover on the CPU, or another GPU"
        return Finding("fail", f"{list_gpus(gpus)}; a GPU preset needs {'; '.join(lacks)}", remedy)
    return Finding("ok", list_gpus(gpus))


def check_processor() -> Finding:
    """Check for a processor that the packages of requirements/verl-gpu.txt have wheels for.

    For 64-bit Arm, as of a GH200, `make long PART=gpu_pins` counts them.
    """
    name = platform.machine()
    if name == "x86_64":
        return Finding("ok", name)
    if name == "aarch64":
        return Finding("warn", f"{name}: there are wheels, and this project has not run them yet")
    remedy = "use a machine with x86-64 or 64-bit Arm"
    return Finding("fail", f"there are no packages for {name}", remedy)


# ------------------------------------------------------------------------------------- the driver


def driver_remedy(card: str, container: bool) -> str:
    """Return the remedy for a driver that is too old for CUDA 13."""
    newer = f"install driver {DRIVER} or newer"
    if not DATA_CENTRE.search(card):
        return newer + " (CUDA's compatibility libraries do not work on this card)"
    if container:
        return (
            f"choose another machine or image, with driver {DRIVER} or newer; or, if the folder "
            "/usr/local/cuda/compat exists here: export "
            "LD_LIBRARY_PATH=/usr/local/cuda/compat:$LD_LIBRARY_PATH"
        )
    return (
        f"{newer}; or NVIDIA's compatibility libraries, from its repository (first its package "
        "cuda-keyring, docs/cloud.md): apt-get install cuda-compat-13-0 && export "
        f"LD_LIBRARY_PATH={COMPAT}:$LD_LIBRARY_PATH"
    )


def has_compat(card: str) -> bool:
    """Tell whether CUDA's compatibility libraries are there and work on this card.

    They have a newer libcuda than the driver. They are in a folder of LD_LIBRARY_PATH, or in the
    image that speedrun.sh will start (AGENT_R1_IMAGE_COMPAT).
    """
    if not DATA_CENTRE.search(card):
        return False
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return bool(os.environ.get("AGENT_R1_IMAGE_COMPAT")) or any(
        "compat" in folder and Path(folder, "libcuda.so.1").exists() for folder in folders
    )


def check_driver() -> Finding:
    gpus = gpus_here()
    if not gpus:
        return Finding("unknown", "nvidia-smi does not answer", f"install NVIDIA's driver {DRIVER}")
    oldest = min(gpus, key=lambda gpu: gpu.driver_major)
    observation = f"{len(gpus)} x {oldest.name}, driver {oldest.driver_major}"
    if oldest.driver_major >= DRIVER:
        return Finding("ok", observation)
    if has_compat(oldest.name):
        return Finding("ok", observation + ", with CUDA's compatibility libraries")
    observation += f"; CUDA 13 needs driver {DRIVER}"
    return Finding("fail", observation, driver_remedy(oldest.name, in_container()))


# --------------------------------------------------------------------------------- system libraries


def check_glibc() -> Finding:
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (AttributeError, OSError, ValueError):
        words = []
    version_match = re.match(r"(\d+)\.(\d+)", words[-1] if words else "")
    if not version_match:
        return Finding("unknown", "the C library's version is not known")
    version = (int(version_match.group(1)), int(version_match.group(2)))
    observation = f"glibc {version[0]}.{version[1]}"
    if version >= GLIBC:
        return Finding("ok", observation)
    remedy = "use Ubuntu 22.04 or newer, or Docker (./speedrun.sh)"
    return Finding("fail", f"{observation}, the packages are for {GLIBC[0]}.{GLIBC[1]}", remedy)


def check_libstdcxx() -> Finding:
    """Look for the newest C++ symbol version that Ubuntu 22.04 has."""
    places = re.findall(
        r"libstdc\+\+\.so\.6 \([^)]*(?:x86-64|AArch64)[^)]*\) => (\S+)", output("ldconfig", "-p")
    )
    for place in places:
        try:
            symbols = Path(place).read_bytes()
        except OSError:
            continue
        if GLIBCXX.encode() + b"\0" in symbols:
            return Finding("ok", f"libstdc++ has {GLIBCXX}")
        remedy = "install a newer libstdc++6, or use Ubuntu 22.04 or newer"
        return Finding("fail", f"{place} lacks {GLIBCXX}", remedy)
    return Finding("unknown", "ldconfig lists no libstdc++")


# ----------------------------------------------------------------------------- Python and compiler


def check_pip() -> Finding:
    """Check that an environment can be made.

    Either Python 3.12 makes it, or pip fetches uv, which brings that Python.
    """
    for name in ("python3.12", os.environ.get("PYTHON", "")):
        if name and output(name, "-c", "import ensurepip, venv; print(1)"):
            return Finding("ok", f"{name} can make an environment")
    if output(sys.executable, "-m", "pip", "--version"):
        return Finding("ok", "no Python 3.12 with venv; pip fetches uv, which brings one")
    remedy = "install python3.12-venv and python3.12-dev (Ubuntu 24.04), or python3-pip"
    return Finding("fail", "neither python3.12 with venv nor pip is here", remedy)


def check_compiler(python_headers: str | None = None) -> Finding:
    """Look for what Triton builds each kernel's launcher with.

    `python_headers` is the folder of Python.h; without it only the compiler is looked for. Without
    either, the first evaluation would fail.
    """
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    major, minor = sys.version_info[:2]
    packages = f"build-essential python{major}.{minor}-dev"
    remedy = f"install a C compiler and Python's headers (Ubuntu: {packages})"
    if not any(shutil.which(name) for name in compilers):
        return Finding("fail", f"there is no C compiler ({' or '.join(compilers)})", remedy)
    if python_headers is not None and not Path(python_headers, "Python.h").is_file():
        return Finding("fail", f"there is no {Path(python_headers, 'Python.h')}", remedy)
    return Finding("ok", "a C compiler is here")


def check_headers() -> Finding:
    """Look for Python.h of Python 3.12; a Python that uv brings has its own."""
    include_folder = output(
        "python3.12", "-c", "import sysconfig; print(sysconfig.get_path('include'))"
    ).strip()
    if not include_folder:
        return Finding("ok", "no Python 3.12 here; uv's has its headers")
    status, observation, remedy = check_compiler(include_folder)
    return Finding(status, observation, remedy and "install build-essential and python3.12-dev")


# ---------------------------------------------------------------------------------- disk, network


def nearest_folder(path: Path) -> Path:
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_disk(environment: str) -> Finding:
    """Add up what the installation needs on each file system."""
    cache = os.environ.get("PIP_CACHE_DIR") or "~/.cache/pip"
    needs = [(environment, PACKAGES_GIB), (cache, PACKAGES_GIB)]
    needs.append((os.environ.get("TMPDIR") or "/tmp", 2))
    disks: dict[int, Tuple[Path, int]] = {}
    for name, need in needs:
        folder = nearest_folder(Path(name))
        if not os.access(str(folder), os.W_OK):
            remedy = "set AGENT_R1_VENV, PIP_CACHE_DIR, TMPDIR"
            return Finding("fail", f"{folder} is not writable", remedy)
        disk = folder.stat().st_dev
        first_folder, sum_of_needs = disks.get(disk, (folder, 0))
        disks[disk] = (first_folder, sum_of_needs + need)
    observations = []
    enough = True
    for folder, need in disks.values():
        free = shutil.disk_usage(str(folder)).free / 2**30
        observations.append(f"{free:.0f} GiB free at {folder}, {need} needed")
        enough = enough and free >= need
    remedy = "free space, or set AGENT_R1_VENV, PIP_CACHE_DIR and TMPDIR to a larger disk"
    if enough:
        return Finding("ok", "; ".join(observations))
    return Finding("fail", "; ".join(observations), remedy)


def check_network() -> Finding:
    """Open a connection to the package index; a proxy or a mirror is not judged."""
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "PIP_INDEX_URL")):
        return Finding("unknown", "a proxy or another index is set")
    if output(sys.executable, "-m", "pip", "config", "get", "global.index-url"):
        return Finding("unknown", "pip is configured for another index")
    try:
        socket.create_connection(("pypi.org", 443), timeout=8).close()
    except OSError as error:
        remedy = "connect this machine to the network"
        return Finding("fail", f"pypi.org does not answer ({error})", remedy)
    return Finding("ok", "pypi.org answers")


def check_hub(model: str) -> Finding:
    """Connect to the hub (or HF_ENDPOINT) for a start model that is not here yet."""
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folder = Path(cache).expanduser() / "hub" / ("models--" + model.replace("/", "--"))
    if Path(model).is_dir() or folder.is_dir():
        return Finding("ok", f"{model} is on this machine")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    proxies = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY")
    if any(os.environ.get(name) for name in proxies):
        return Finding("unknown", f"a proxy is set, so {endpoint} was not asked")
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=8).close()
    except OSError as error:
        remedy = "connect it, set HF_ENDPOINT to a mirror, or use model.path=FOLDER"
        return Finding("fail", f"{endpoint}, which has {model}, does not answer ({error})", remedy)
    return Finding("ok", f"{endpoint} answers")


def check_gpus() -> list[tuple[str, Finding]]:
    """Return the findings about the GPUs, by name of the check."""
    return [("GPUs", check_cards()), ("driver", check_driver())]


def run_checks(environment: str, model: str = "") -> list[tuple[str, Finding]]:
    """Return the finding of each check by name.

    Args:
        model: Start model on the hub, as OWNER/NAME; empty if the run needs no hub.
    """
    checks = [
        *check_gpus(),
        ("processor", check_processor()),
        ("C library", check_glibc()),
        ("C++ library", check_libstdcxx()),
        ("Python", check_pip()),
        ("C compiler", check_compiler()),
        ("Python's headers", check_headers()),
        ("disk", check_disk(environment)),
        ("network", check_network()),
    ]
    return [*checks, ("hub", check_hub(model))] if model else checks


def main(arguments: list[str]) -> int:
    """Print the choice, or a line per check; return 1 if a check failed."""
    words = arguments or [".venv-gpu"]
    if words == ["--choose"]:
        print("\n".join(choose(gpus_here())))
        return 0
    failures = 0
    findings = check_gpus() if words == ["--cards"] else run_checks(*words[:2])
    for name, finding in findings:
        arrow = "  -> " + finding.remedy if finding.remedy and finding.status != "ok" else ""
        print(f"{finding.status:7}  {name}: {finding.detail}{arrow}", flush=True)
        failures += finding.status == "fail"
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
