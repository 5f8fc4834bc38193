"""Dockerfile, .dockerignore and speedrun.sh on a machine without a Docker engine.

The Dockerfile is read. speedrun.sh runs with a `docker` on the PATH that writes down how it was called.
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

from agent_r1.ground.machine import read_pins
from agent_r1.verl_engine import VERL

GPU_PINS = read_pins((ROOT / "requirements" / "verl-gpu.txt").read_text())


# --------------------------------------------------------------------------------------------------- the Dockerfile


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def arguments(name: str) -> list[str]:
    return [words for instruction, words in instructions() if instruction == name]


def copied() -> list[str]:
    """Sources of all COPY lines, in order."""
    return [source for words in arguments("COPY") for source in words.split()[:-1]]


def ignored(path: str) -> bool:
    """What .dockerignore says of a path: the last pattern that matches it or a folder above it decides."""
    answer = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern and not pattern.startswith("#"):
            parts = path.split("/")
            above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
            if pattern.startswith("**/"):
                hit = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
            else:
                hit = any(fnmatch.fnmatch(p, pattern) and p.count("/") == pattern.count("/") for p in above)
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


def test_bases_are_pinned_and_the_user_is_not_root():
    bases = [words.split()[0] for words in arguments("FROM")]
    assert bases == ["nvidia/cuda:13.0.2-devel-ubuntu24.04", "debian:bookworm-slim", "${STACK}"]
    assert arguments("ARG")[0] == "STACK=gpu"
    user = arguments("USER")[-1]
    assert user.isdigit() and int(user) > 0
    assert instructions()[-3][0] == "USER", "only HEALTHCHECK and CMD come behind it"
    assert "agent-r1" in arguments("HEALTHCHECK")[0] and not arguments("ADD")
    told = " ".join(arguments("ENV") + arguments("ARG"))
    assert not re.search(r"key|token|secret|password", told, re.IGNORECASE)


def test_the_pins_of_the_image_cover_what_the_project_needs():
    """Everything that pyproject.toml names, the optional parts too, but what only development takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_a_cpu = ("dev", "pocket")  # a GGUF file is read by the preset pocket alone
    optional = (wanted for extra, wanted in project["optional-dependencies"].items() if extra not in for_a_cpu)
    wanted = [Requirement(line) for line in (*project["dependencies"], *itertools.chain(*optional))]
    assert len(wanted) > 15
    for needed in wanted:
        if needed.name == "agent-r1":  # an extra that brings another one
            continue
        version = GPU_PINS[canonicalize_name(needed.name)]
        assert needed.specifier.contains(version, prereleases=True), f"{needed} and {version} in the image"
    assert GPU_PINS["verl"] == VERL
    text = (ROOT / "requirements" / "verl-gpu.txt").read_text()
    [tag] = re.findall(r"flash_attn-\S+-(cp\d+)-cp\d+-linux_x86_64\.whl", text)
    assert tag == "cp312" and " python3.12 " in " ".join(arguments("RUN"))


def test_the_pins_are_what_verl_asks_for():
    """verl's own metadata, its extras `vllm` and `verl-core` included."""
    try:
        asked = [Requirement(line) for line in importlib.metadata.requires("verl")]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("verl is not installed")
    checked = set()
    for need in asked:
        extras = ("", "verl-core", "vllm")
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name != "verl" and (not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras)):
            assert need.specifier.contains(GPU_PINS[name]), f"{need} and {GPU_PINS[name]}"
            checked.add(name)
    assert {"torch", "vllm", "transformers", "ray", "tensordict", "torchvision"} <= checked


@pytest.fixture
def image(tmp_path) -> dict[str, str]:
    """The files that the image gets and nothing else; the variables that make a Python of them."""
    root, venv = tmp_path / "image", tmp_path / "venv" / "bin"
    for source in copied():
        target = root / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
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
    settings = environment(tmp_path / "home") | {"AGENT_R1_VENV": image["venv"], "AGENT_R1_STACK": "cpu"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "environment" not in done.stdout, "everything is installed, so nothing is to do"
    assert "algorithm: grpo" in done.stdout


# ------------------------------------------------------------------------------------------------------- speedrun.sh

DOCKER = """#!/bin/bash
# A container does nothing; `image` finds one, unless nothing can be built.
cd "$(dirname "$0")"
printf '%s\\n' "$*" >> calls
case "$1" in
    info) [ ! -e down ] || { echo "Cannot connect to the Docker daemon" >&2; exit 1; }; cat info ;;
esac
"""


class Box:
    """A machine with a stand-in for Docker."""

    def __init__(self, folder: Path):
        self.bin, self.home = folder / "bin", folder / "home"
        self.bin.mkdir()
        self.home.mkdir()
        (self.bin / "docker").write_text(DOCKER)
        (self.bin / "docker").chmod(0o755)
        (self.bin / "info").write_text('[name=seccomp,profile=builtin] {"nvidia":{},"runc":{}}')

    def start(self, *argv: str, path: str | None = None, **variables: str) -> subprocess.CompletedProcess:
        places = {
            "PATH": path or f"{self.bin}:/usr/bin:/bin",
            "HF_HOME": f"{self.home}/hf",
            "XDG_CACHE_HOME": f"{self.home}/c",
        }
        settings = environment(self.home) | places | variables
        command = [ROOT / "speedrun.sh", *argv]
        return subprocess.run(
            command, env=settings, cwd=self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )

    def calls(self, verb: str) -> list[str]:
        log = self.bin / "calls"
        return [line for line in log.read_text().splitlines() if line.startswith(verb)] if log.exists() else []


@pytest.fixture
def box(tmp_path) -> Box:
    return Box(tmp_path)


@pytest.mark.parametrize(
    ("argv", "trouble", "code"),
    [(["--preset", "smokey"], "absent", 2), (["grpo"], "absent", 1), (["grpo"], "down", 1)],
)  # fmt: skip
def test_without_an_image_nothing_is_started(box, argv, trouble, code):
    (box.bin / trouble).touch()
    done = box.start(*argv, path="/usr/bin:/bin" if trouble == "absent" else None)
    assert done.returncode == code and not box.calls("run") and list(box.home.iterdir()) == []
    assert code != 1 or "bash speedrun-nodocker.sh" in done.stderr.splitlines()[-1], "the way that needs no Docker"


def test_what_docker_is_told(box, tmp_path):
    (tmp_path / "mine.json").write_text("[]")
    done = box.start("grpo", "--preset", "smoke", f"data.source={tmp_path}/mine.json", "data.corpus=beir-hotpotqa",
                     "--dry-run", WANDB_API_KEY="secret123")  # fmt: skip
    assert done.returncode == 0, done.stderr
    [build], [run] = box.calls("build"), box.calls("run")
    assert "STACK=cpu" in build
    for words in ("--rm --init --shm-size", f"--user {os.getuid()}:{os.getgid()}", f"-v {box.home}/runs:{box.home}/runs",
                  f"-v {box.home}/artifacts:{box.home}/artifacts", f"-v {box.home}/hf:/cache/huggingface",
                  f"-v {tmp_path}/mine.json:{tmp_path}/mine.json:ro", f"-e AGENT_R1_HOME={box.home}", "-e WANDB_API_KEY",
                  "agent-r1:cpu bash speedrun-nodocker.sh grpo"):  # fmt: skip
        assert words in run, words
    assert "--gpus" not in run and "beir-hotpotqa:" not in run, "no GPU; the name of a corpus is not a file"
    assert "secret123" not in done.stdout + done.stderr + run
