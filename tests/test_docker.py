"""Dockerfile, .dockerignore and speedrun.sh, on a machine without a Docker engine.

The Dockerfile is read and walked as far as that goes. speedrun.sh is run for real, with a `docker` on the PATH that writes
down how it was called and runs the container's command in place, with no more of the environment than a container gets.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from runs import ROOT, TINY, environment, lines

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
    assert not ignored("recipes/laptop/smoke.yaml")


@pytest.mark.parametrize(
    "path", [".env", ".git/config", "runs/a/config.yaml", ".venv/bin/python", ".netrc", "tests/runs.py", "requirements/x",
             "src/agent_r1/__pycache__/cli.cpython-311.pyc"],
)  # fmt: skip
def test_nothing_else_reaches_the_builder(path):
    assert ignored(path)


def test_bases_are_pinned_and_the_user_is_not_root():
    bases = [words.split()[0] for words in arguments("FROM")]
    assert bases == ["nvidia/cuda:13.0.2-devel-ubuntu24.04", "debian:bookworm-slim", "${STACK}"]
    assert arguments("ARG")[0] == "STACK=gpu"
    user = arguments("USER")[-1]
    assert user.isdigit() and int(user) > 0
    assert instructions()[-3][0] == "USER", "only HEALTHCHECK and CMD come behind it"
    assert "agent-r1" in arguments("HEALTHCHECK")[0] and not arguments("ADD")


def test_no_key_is_in_it():
    told = " ".join(arguments("ENV") + arguments("ARG"))
    assert not re.search(r"key|token|secret|password", told, re.IGNORECASE)


def test_packages_come_before_the_source_and_only_from_the_requirements():
    order = [words for instruction, words in instructions() if instruction in ("COPY", "RUN")]
    [packages] = [i for i, words in enumerate(order) if '-r "$REQUIREMENTS"' in words]
    [source] = [i for i, words in enumerate(order) if words.startswith("src")]
    assert packages < source
    installs = re.findall(r"pip install ([^&|;]*)", " ".join(arguments("RUN")))
    named = {word for words in installs for word in words.split() if not word.startswith("-")}
    assert named == {'"$REQUIREMENTS"', "requirements/pocket.txt", "/dev/stdin", "."}, (
        "a version that stands in the Dockerfile is one that nobody compares"
    )
    told = re.findall(r"AGENT_R1_STACK=(\w+) REQUIREMENTS=(\S+)", " ".join(arguments("ENV")))
    script = (ROOT / "requirements" / "packages.sh").read_text()
    assert len(told) == 2 and all(f"{stack}) requirements={file} " in script for stack, file in told)


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


def test_every_package_is_pinned_once():
    text = (ROOT / "requirements" / "verl-gpu.txt").read_text()
    listed = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    loose = [line for line in listed if "==" not in line]
    assert len(loose) == 1 and loose[0].startswith("flash-attn @ https://")
    assert len(GPU_PINS) == len(listed) - 1


def test_the_image_for_a_cpu_has_what_the_preset_pocket_needs(box):
    """In a container nobody may install; speedrun.sh takes that image for it, also beside a GPU."""
    [install] = [words for words in arguments("RUN") if "requirements/pocket.txt" in words]
    assert install.startswith('if [ "$AGENT_R1_STACK" = cpu ]')
    cpu, extra = (read_pins((ROOT / "requirements" / name).read_text()) for name in ("cpu.txt", "pocket.txt"))
    assert extra and not cpu.keys() & extra.keys()
    box.add("nvidia-smi", GPUS)
    assert "STACK=cpu" in box.start("grpo", "--preset", "pocket", "--dry-run").stdout


def test_flash_attn_is_for_this_python():
    text = (ROOT / "requirements" / "verl-gpu.txt").read_text()
    [tag] = re.findall(r"flash_attn-\S+-(cp\d+)-cp\d+-linux_x86_64\.whl", text)
    assert tag == "cp312" and " python3.12 " in " ".join(arguments("RUN"))
    assert "names=(python3.12)" in (ROOT / "requirements" / "packages.sh").read_text()


def test_both_environments_differ_only_where_they_must():
    cpu = read_pins((ROOT / "requirements" / "cpu.txt").read_text())
    assert {n for n in cpu if n in GPU_PINS and cpu[n] != GPU_PINS[n]} == {"torch", "transformers"}
    assert cpu.keys() <= GPU_PINS.keys()


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

DOCKER = """#!{python}
import json, os, sys
from pathlib import Path

here, args = Path(__file__).parent, sys.argv[1:]
with (here / "calls").open("a") as log:
    log.write(json.dumps(args) + "\\n")
if args[0] == "info":
    if (here / "down").exists():
        sys.exit("Cannot connect to the Docker daemon")
    print((here / "info").read_text())
elif args[0] in ("build", "pull"):
    if (here / "broken").exists():
        sys.exit("no network")
    (here / "image").touch()
elif args[0] == "image":
    sys.exit(not (here / "image").exists())
elif args[0] == "run":
    at = args.index("bash")
    image, inside = args[at - 1], {{"PATH": os.environ["PATH"], "HOME": str(here / "home"), "AGENT_R1_VENV": "{prefix}"}}
    inside["AGENT_R1_STACK"] = image.partition(":")[2]
    for flag, value in zip(args, args[1:at - 1]):
        if flag == "-e":
            name, told, text = value.partition("=")
            if told or name in os.environ:
                inside[name] = text if told else os.environ[name]
    if not (here / "idle").exists():
        os.execvpe("bash", args[at:], inside)
"""
GPUS = '#!/bin/sh\necho "GPU 0: NVIDIA H100"\n'


class Box:
    """A machine with a stand-in for Docker."""

    def __init__(self, folder: Path):
        self.bin, self.home = folder / "bin", folder / "home"
        self.bin.mkdir()
        self.home.mkdir()
        self.add("docker", DOCKER.format(python=sys.executable, prefix=sys.prefix))
        (self.bin / "info").write_text('[name=seccomp,profile=builtin] {"runc":{}}')

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def idle(self) -> None:
        """There is an image, and a container does nothing."""
        (self.bin / "image").touch()
        (self.bin / "idle").touch()

    def start(self, *argv: str, path: str | None = None, timeout: float = 60, **variables: str):
        settings = environment(self.home) | {"PATH": path or f"{self.bin}:/usr/bin:/bin", "HF_HOME": f"{self.home}/hf",
                                                         "XDG_CACHE_HOME": f"{self.home}/cache"}  # fmt: skip
        for name in ("WANDB_API_KEY", "HF_TOKEN", "AGENT_R1_STACK", "AGENT_R1_IMAGE"):
            settings.pop(name, None)
        command = [ROOT / "speedrun.sh", *argv]
        settings |= variables
        return subprocess.run(
            command,
            env=settings,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def calls(self, verb: str) -> list[list[str]]:
        log = self.bin / "calls"
        recorded = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [args for args in recorded if args[0] == verb]


@pytest.fixture
def box(tmp_path) -> Box:
    return Box(tmp_path)


def test_help_and_wrong_words_need_no_docker(box):
    done = box.start("--help", path="/usr/bin:/bin")
    assert done.returncode == 0
    for word in ("In Docker", "AGENT_R1_IMAGE", "ALGORITHM", "--preset", "--resume", "--dry-run", "examples:"):
        assert word in done.stdout
    for argv in (["--foo"], ["--preset"], ["--preset", "smokey"]):
        done = box.start(*argv)
        assert done.returncode == 2 and argv[-1] in done.stderr.splitlines()[-1]
    assert not (box.bin / "calls").exists() and list(box.home.iterdir()) == []


def failure(done) -> str:
    """The one line that says what is wrong and what to do."""
    assert done.returncode == 1
    assert "bash speedrun-nodocker.sh" in done.stderr.splitlines()[-1]
    return done.stderr.splitlines()[-1]


def test_without_docker(box, tmp_path):
    assert "no Docker" in failure(box.start("grpo", path="/usr/bin:/bin"))


def test_with_the_daemon_down(box):
    (box.bin / "down").touch()
    assert "Cannot connect to the Docker daemon" in failure(box.start("grpo"))
    assert not box.calls("build") and list(box.home.iterdir()) == []


@pytest.mark.skipif(shutil.which("docker") is None, reason="no Docker client here")
def test_a_real_client_without_a_daemon(box):
    path = f"{Path(shutil.which('docker')).parent}:/usr/bin:/bin"
    said = failure(box.start("grpo", path=path, DOCKER_HOST="unix:///nonexistent.sock"))
    assert "does not answer" in said and "docker" in said.lower()


def test_gpus_that_docker_cannot_reach(box):
    box.add("nvidia-smi", GPUS)
    assert "install nvidia-container-toolkit" in failure(box.start("grpo"))
    assert not box.calls("build")
    box.add("nvidia-ctk", "#!/bin/sh\n")  # there, though Docker does not list it as a runtime
    assert box.start("--dry-run").returncode == 0


def test_a_build_that_fails(box):
    (box.bin / "broken").touch()
    assert "image could not be built" in failure(box.start("grpo", "--preset", "smoke"))
    assert not box.calls("run")
    dry = box.start("--preset", "smoke", "--dry-run", AGENT_R1_IMAGE="me/mine:cpu")
    assert dry.stdout.endswith("docker pull me/mine:cpu\n")
    assert "cannot be pulled" in failure(box.start("grpo", AGENT_R1_IMAGE="me/mine:cpu"))


def test_a_dry_run_builds_nothing(box):
    done = box.start("grpo", "--preset", "smoke", "--dry-run")
    assert done.returncode == 0
    [line] = done.stdout.splitlines()
    assert line.endswith("docker build -t agent-r1:cpu --build-arg STACK=cpu .")
    assert not box.calls("build") and not box.calls("run") and list(box.home.iterdir()) == []


@pytest.mark.slow
def test_what_docker_is_told(box, tmp_path):
    (box.bin / "image").touch()
    (tmp_path / "mine.json").write_text("[]")
    secrets = {"WANDB_API_KEY": "secret123", "HF_TOKEN": "hf_secret456"}
    done = box.start("grpo", "--preset", "smoke", "--dry-run", f"data.source={tmp_path}/mine.json", "data.name=hotpotqa",
                     "data.corpus=beir-hotpotqa", "actor.lr=0.25", **secrets)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "algorithm: grpo" in done.stdout and "lr: 0.25" in done.stdout, "speedrun-nodocker.sh ran, in the container"
    assert f"{box.home}/runs/smoke-grpo/report.html" in done.stdout, "a path that is true outside, too"
    [build], [run] = box.calls("build"), box.calls("run")
    assert "STACK=cpu" in build and build[-1] == "."
    told = " ".join(run)
    for words in ("--rm --init --shm-size", "--ulimit memlock=-1", "--ulimit stack=67108864",
                  f"--user {os.getuid()}:{os.getgid()}", f"-v {box.home}/runs:{box.home}/runs",
                  f"-v {box.home}/artifacts:{box.home}/artifacts", f"-v {box.home}/hf:/cache/huggingface",
                  f"-v {box.home}/cache/agent-r1/kernels:/cache/kernels",
                  f"-v {tmp_path}/mine.json:{tmp_path}/mine.json:ro", f"-e AGENT_R1_HOME={box.home}",
                  "-e WANDB_API_KEY -e HF_TOKEN", "agent-r1:cpu bash speedrun-nodocker.sh grpo"):  # fmt: skip
        assert words in told, words
    assert "--gpus" not in told and "-t" not in run, "no GPU, no terminal"
    assert "beir-hotpotqa:" not in told, "a name is no file"
    for secret in secrets.values():
        assert secret not in done.stdout + done.stderr + (box.bin / "calls").read_text()


def test_with_gpus(box):
    box.add("nvidia-smi", GPUS)
    (box.bin / "info").write_text('[name=seccomp] {"nvidia":{},"runc":{}}')
    box.idle()
    assert box.start("--dry-run").returncode == 0
    assert "STACK=gpu" in box.calls("build")[0] and "--gpus all" in " ".join(box.calls("run")[0])
    assert box.start("--preset", "laptop", "--dry-run").returncode == 0
    assert "STACK=cpu" in box.calls("build")[1] and "--gpus" not in box.calls("run")[1]


def test_rootless_docker_and_an_image_of_ones_own(box):
    (box.bin / "info").write_text('[name=rootless] {"runc":{}}')
    box.idle()
    assert box.start("--preset", "smoke", "--dry-run", AGENT_R1_IMAGE="me/mine:cpu").returncode == 0
    [run] = box.calls("run")
    assert "--user 0:0" in " ".join(run) and "me/mine:cpu" in run
    assert not box.calls("build") and not box.calls("pull")


def test_with_a_terminal_there_is_one_inside(box):
    box.idle()
    command = shlex.join([str(ROOT / "speedrun.sh"), "--preset", "smoke", "--dry-run"])
    settings = environment(box.home) | {"PATH": f"{box.bin}:/usr/bin:/bin", "HF_HOME": f"{box.home}/hf",
                                             "XDG_CACHE_HOME": f"{box.home}/cache"}  # fmt: skip
    subprocess.run(
        ["script", "-qec", command, "/dev/null"], env=settings, stdout=subprocess.DEVNULL, timeout=100, check=True
    )
    [run] = box.calls("run")
    assert "-i" in run and "-t" in run


@pytest.mark.slow
def test_a_whole_run_in_a_container_with_a_search_service(box, produced):
    """From a cold start to the report, each stage in the stand-in's container, and one search service for all of them."""
    (box.bin / "image").touch()
    shutil.copytree(produced / "artifacts", box.home / "artifacts")
    argv = ["grpo", "--preset", "smoke", *TINY[1:], "trainer.steps=2", "--search-server"]
    done = box.start(*argv, timeout=240, WANDB_API_KEY="secret123")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "search: one service for all, at http://127.0.0.1:8100" in done.stdout
    run = box.home / "runs" / "smoke-grpo"
    assert len(lines(run)) == 2 and (run / "eval.json").exists() and (run / "report.html").exists()
    assert "url: http://127.0.0.1:8100" in (run / "config.yaml").read_text()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 8100), timeout=1).close()
    written = [path.read_bytes() for path in box.home.rglob("*") if path.is_file()]
    assert all(b"secret123" not in text for text in [*written, done.stdout.encode(), done.stderr.encode()])
