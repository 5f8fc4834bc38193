"""Check a machine with a GPU before 11 GB of packages are installed on it.

    python3 src/agent_r1/ground/preflight.py FOLDER      FOLDER: where the environment will be

In: the machine, as nvidia-smi, ldconfig and the file system describe it. Out: a line per check, and
exit code 1 if one failed. It needs Python 3.8 and its standard library, nothing else, and takes
seconds. A check that could not tell says so and never stops a run. `doctor.py`, which runs after
the installation, uses the driver's and the compiler's checks from here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Tuple

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
COMPAT = "/usr/local/cuda-13.0/compat"

Finding = Tuple[str, str, str]
"""Status (ok, warn, fail, unknown), what was seen, and the remedy."""


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


# ------------------------------------------------------------------------------------- the driver


def driver_remedy(card: str, container: bool) -> str:
    """Return the remedy for a driver that is too old for CUDA 13."""
    newer = f"install driver {DRIVER} or newer"
    if not DATA_CENTRE.search(card):
        return newer + " (CUDA's compatibility libraries do not work on this card)"
    if container:
        return (
            f"on the host: {newer}, or nvidia-container-toolkit 1.17.8 or newer; here: export "
            "LD_LIBRARY_PATH=/usr/local/cuda/compat:$LD_LIBRARY_PATH, if that folder exists"
        )
    return (
        f"{newer}, or NVIDIA's compatibility libraries: apt-get install cuda-compat-13-0 && export "
        f"LD_LIBRARY_PATH={COMPAT}:$LD_LIBRARY_PATH"
    )


def has_compat() -> bool:
    """Tell whether LD_LIBRARY_PATH has a newer libcuda than the driver's own."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return any("compat" in folder and Path(folder, "libcuda.so.1").exists() for folder in folders)


def check_driver() -> Finding:
    lines = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    cards = re.findall(r"^(.+), (\d+)[\d.]*\s*$", lines, re.MULTILINE)
    if not cards:
        return "unknown", "nvidia-smi does not answer", f"install NVIDIA's driver {DRIVER}"
    card, driver = min(cards, key=lambda pair: int(pair[1]))
    observation = f"{len(cards)} x {card}, driver {driver}"
    if int(driver) >= DRIVER:
        return "ok", observation, ""
    if has_compat():
        return "ok", observation + ", with CUDA's compatibility libraries", ""
    observation += f"; CUDA 13 needs driver {DRIVER}"
    return "fail", observation, driver_remedy(card, in_container())


# --------------------------------------------------------------------------------- system libraries


def check_glibc() -> Finding:
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (AttributeError, OSError, ValueError):
        words = []
    version_match = re.match(r"(\d+)\.(\d+)", words[-1] if words else "")
    if not version_match:
        return "unknown", "the C library's version is not known", ""
    version = (int(version_match.group(1)), int(version_match.group(2)))
    observation = f"glibc {version[0]}.{version[1]}"
    if version >= GLIBC:
        return "ok", observation, ""
    remedy = "use Ubuntu 22.04 or newer, or Docker (./speedrun.sh)"
    return "fail", f"{observation}, the packages are for {GLIBC[0]}.{GLIBC[1]}", remedy


def check_libstdcxx() -> Finding:
    """Look for the newest C++ symbol version that Ubuntu 22.04 has."""
    places = re.findall(
        r"libstdc\+\+\.so\.6 \([^)]*x86-64[^)]*\) => (\S+)", output("ldconfig", "-p")
    )
    for place in places:
        try:
            symbols = Path(place).read_bytes()
        except OSError:
            continue
        if GLIBCXX.encode() + b"\0" in symbols:
            return "ok", f"libstdc++ has {GLIBCXX}", ""
        remedy = "install a newer libstdc++6, or use Ubuntu 22.04 or newer"
        return "fail", f"{place} lacks {GLIBCXX}", remedy
    return "unknown", "ldconfig lists no libstdc++", ""


# ----------------------------------------------------------------------------- Python and compiler


def check_pip() -> Finding:
    """Check that an environment can be made.

    Either Python 3.12 makes it, or pip fetches uv, which brings that Python.
    """
    for name in ("python3.12", os.environ.get("PYTHON", "")):
        if name and output(name, "-c", "import ensurepip, venv; print(1)"):
            return "ok", f"{name} can make an environment", ""
    if output(sys.executable, "-m", "pip", "--version"):
        return "ok", "no Python 3.12 with venv; pip fetches uv, which brings one", ""
    remedy = "install python3.12-venv and python3.12-dev (Ubuntu 24.04), or python3-pip"
    return "fail", "neither python3.12 with venv nor pip is here", remedy


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
        return "fail", f"there is no C compiler ({' or '.join(compilers)})", remedy
    if python_headers is not None and not Path(python_headers, "Python.h").is_file():
        return "fail", f"there is no {Path(python_headers, 'Python.h')}", remedy
    return "ok", "a C compiler is here", ""


def check_headers() -> Finding:
    """Look for Python.h of Python 3.12; a Python that uv brings has its own."""
    include_folder = output(
        "python3.12", "-c", "import sysconfig; print(sysconfig.get_path('include'))"
    ).strip()
    if not include_folder:
        return "ok", "no Python 3.12 here; uv's has its headers", ""
    status, observation, remedy = check_compiler(include_folder)
    return status, observation, remedy and "install build-essential and python3.12-dev"


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
            return "fail", f"{folder} is not writable", "set AGENT_R1_VENV, PIP_CACHE_DIR, TMPDIR"
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
    return ("ok" if enough else "fail"), "; ".join(observations), "" if enough else remedy


def check_network() -> Finding:
    """Open a connection to the package index; a proxy or a mirror is not judged."""
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "PIP_INDEX_URL")):
        return "unknown", "a proxy or another index is set", ""
    if output(sys.executable, "-m", "pip", "config", "get", "global.index-url"):
        return "unknown", "pip is configured for another index", ""
    try:
        socket.create_connection(("pypi.org", 443), timeout=8).close()
    except OSError as error:
        return (
            "fail",
            f"pypi.org does not answer ({error})",
            "connect this machine to the network",
        )
    return "ok", "pypi.org answers", ""


def run_checks(environment: str) -> list[tuple[str, Finding]]:
    """Return the finding of each check by name."""
    return [
        ("driver", check_driver()),
        ("C library", check_glibc()),
        ("C++ library", check_libstdcxx()),
        ("Python", check_pip()),
        ("C compiler", check_compiler()),
        ("Python's headers", check_headers()),
        ("disk", check_disk(environment)),
        ("network", check_network()),
    ]


def main(arguments: list[str]) -> int:
    """Print a line per check, and return 1 if one failed."""
    failures = 0
    for name, (status, observation, remedy) in run_checks(
        arguments[0] if arguments else ".venv-gpu"
    ):
        arrow = "  -> " + remedy if remedy and status != "ok" else ""
        print(f"{status:7}  {name}: {observation}{arrow}", flush=True)
        failures += status == "fail"
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
