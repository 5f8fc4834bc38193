"""Resolve each documented way to install on a GPU; with AGENT_R1_INSTALL_GPU=1 also install one.

Resolving reads metadata only. Installing needs Python 3.12 (python3.12, or the program in
PYTHON312), gcc, and temporarily 11 GB of disk. It validates imports, every preset on faked cards,
and tests. The page docs/presets.md lists what a CPU cannot check.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1.ground.machine import read_pins

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "verl-gpu.txt"
WAYS = {
    "requirements/verl-gpu.txt": ["-r", "requirements/verl-gpu.txt"],
    "agent-r1[verl]": [".[verl]"],
    "agent-r1[vllm]": [".[vllm]"],
    "inference.sh": ["vllm==0.27.1", "sentence-transformers==6.2.0", "-c", str(PINS)],
}
"""What README, docs/verl.md, requirements/ and messages tell users to install."""
WITHOUT_WHEEL = ("antlr4-python3-runtime",)
"""Pins in pure Python that are built on every machine."""
ONE_SET = ("torch", "vllm", "transformers", "verl", "ray", "tensordict")
"""Packages that training needs in exactly the pinned version; serving needs the first two."""
TESTS = ("tests/test_verl_compose.py", "tests/test_verl_equivalence.py")
# vLLM's CUDA library is linked against the driver's, which a machine without a GPU lacks. It looks
# for these names; all return 100, CUDA_ERROR_NO_DEVICE.
DRIVER = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)
IMPORTS = (
    "vllm.entrypoints.openai.api_server",
    "verl.trainer.ppo.v1",
    "verl.workers.engine.fsdp.transformer_impl",
    "agent_r1.cluster.trainer",
    "agent_r1.cluster.agent_loop",
    "agent_r1.cluster.serve",
    "agent_r1.app.cli",
    "sentence_transformers",
    "datasets",
    "faiss",
    "wandb",
    "tensorboard",
    "ray",
    "transfer_queue",
)


def run() -> dict[str, Any]:
    """Return figures of the resolutions, and of the installation and its checks."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-pins-") as folder:
        root = Path(folder)
        figures: dict[str, Any] = {"resolved": resolve(root), "wheels_for_arm": count_arm(root)}
        if os.environ.get("AGENT_R1_INSTALL_GPU") != "1":
            return figures
        figures |= install(root)
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(stub_driver(root)),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        for name in IMPORTS:
            call([root / "venv/bin/python", "-c", f"import {name}"], environment)
        print(f"  {len(IMPORTS)} imports work; every preset on faked cards ...", flush=True)
        figures |= {"imports": len(IMPORTS)} | presets(root, environment)
        print("  tests under these versions ...", flush=True)
        return figures | tests(root, environment)


def resolve(root: Path) -> dict[str, int]:
    """Resolve each way for Python 3.12 and glibc 2.35; return how many packages each brings.

    Raises if a way does not resolve, or brings another version of a package in ONE_SET.
    """
    call([sys.executable, "-m", "venv", root / "tools"])
    call([root / "tools/bin/pip", "install", "-q", "uv"])
    platform = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35"]
    pins = read_pins(PINS.read_text())
    counts = {}
    for name, words in WAYS.items():
        requirements = root / "wanted.in"
        lines = [word for word in words if "==" in word or word.startswith(".")]
        requirements.write_text("\n".join(lines) + "\n")
        source = ROOT / words[1] if words[0] == "-r" else requirements
        constraints = ["-c", PINS] if "-c" in words else []
        lock = call(
            [root / "tools/bin/uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
            + [*platform, *constraints, source]
        )
        pin_of = read_pins(lock)
        one_set = ONE_SET if "verl" in pin_of else ONE_SET[:2]
        differences = [
            f"{package} {pin_of[package]}"
            for package in one_set
            if package in pin_of and pin_of[package] != pins[package]
        ]
        if differences:
            raise RuntimeError(f"{name} brings {', '.join(differences)}")
        counts[name] = len(pin_of)
        print(f"  {name}: {len(pin_of)} packages, torch {pin_of['torch']}", flush=True)
    return counts


def count_arm(root: Path) -> int:
    """Count the pins that have a wheel for 64-bit Arm, as of a GH200. Raises if one has none."""
    pins = read_pins(PINS.read_text())
    requirements = root / "arm.in"
    lines = [f"{name}=={pin}" for name, pin in pins.items() if name not in WITHOUT_WHEEL]
    requirements.write_text("\n".join(lines) + "\n")
    uv = [root / "tools/bin/uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    platform = ["--python-version", "3.12", "--python-platform", "aarch64-manylinux_2_35"]
    lock = call([*uv, *platform, "--no-deps", "--only-binary", ":all:", requirements])
    count = len(read_pins(lock))
    if count != len(lines):
        raise RuntimeError(f"{count} of {len(lines)} pins have a wheel for 64-bit Arm")
    print(f"  64-bit Arm: {count} wheels", flush=True)
    return count


def install(root: Path) -> dict[str, Any]:
    """Install exactly the pins, and what the tests need."""
    python = os.environ.get("PYTHON312") or shutil.which("python3.12")
    if (
        python is None or subprocess.run([python, "--version"], capture_output=True).returncode
    ):  # pyenv's may not run
        raise RuntimeError("no python3.12 that runs on this machine; name one in PYTHON312")
    pins = [line.split("#")[0].strip() for line in PINS.read_text().splitlines()]
    pins = [line for line in pins if line]
    requirements = root / "pins.txt"
    requirements.write_text("\n".join(pins) + "\n")
    print(f"  installing {len(pins)} packages ...", flush=True)
    began = time.monotonic()
    call([python, "-m", "venv", root / "venv"])
    call([root / "venv/bin/pip", "install", "-q", "uv"])
    uv = [root / "venv/bin/uv", "--cache-dir", root / "cache", "pip", "--quiet"]
    call([*uv, "install", "--python", root / "venv/bin/python", "-r", requirements])
    seconds = round(time.monotonic() - began)
    call([*uv, "check", "--python", root / "venv/bin/python"])
    listing = call([*uv, "list", "--python", root / "venv/bin/python", "--format", "json"])
    version_of = {
        re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"]
        for package in json.loads(listing)
    }
    wrong = [
        f"{name}=={pin}"
        for name, pin in read_pins("\n".join(pins)).items()
        if version_of.get(name) != pin
    ]
    if wrong:
        raise RuntimeError(f"installed, but not in the pinned version: {', '.join(wrong)}")
    size = sum(
        file.stat().st_size
        for file in (root / "venv").rglob("*")
        if file.is_file() and not file.is_symlink()
    )
    call(
        [
            *uv,
            "install",
            "--python",
            root / "venv/bin/python",
            "pytest",
            "pytest-timeout",
            "hypothesis",
        ]
    )
    return {"pins": len(pins), "gigabytes": round(size / 1e9, 1), "install_seconds": seconds}


def stub_driver(root: Path) -> Path:
    """Make a folder with a libcuda.so.1 that has no device."""
    (root / "stub.c").write_text(
        "\n".join(f"int {name}(void) {{ return 100; }}" for name in DRIVER)
    )
    (root / "driver").mkdir()
    call(["gcc", "-w", "-shared", "-fPIC", "-o", root / "driver/libcuda.so.1", root / "stub.c"])
    return root / "driver"


def presets(root: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Validate all combinations of preset, algorithm and card. Raises if one is refused."""
    command = [root / "venv/bin/python", "-m", "lab.rehearsals._gpu_pins_inside"]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    if refusals := [line for line in lines if "error" in line]:
        raise RuntimeError(
            f"{len(refusals)} of {len(lines)} combinations are refused, the first: {refusals[0]}"
        )
    if answer.returncode or not lines:
        raise RuntimeError(f"the check itself failed: {answer.stderr.strip().splitlines()[-1:]}")
    samplers = {f"{line['preset']} {line['algorithm']}": line["rollout"] for line in lines}
    return {"combinations": len(lines), "samplers": samplers}


def tests(root: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the equivalence with verl's own functions with the GPU's versions."""
    output = call(
        [root / "venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", *TESTS], environment
    )
    return {"tests": re.findall(r"\d+ passed[^=]*?(?= in )", output)[-1]}


def call(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raises with its last lines if it fails."""
    done = subprocess.run(
        [str(word) for word in command], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-3000:], file=sys.stderr)
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{' '.join(map(str, command[1:4]))}: {' '.join(last)}")
    return done.stdout
