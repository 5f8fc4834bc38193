"""Read a Harbor task folder, and say whether it can run here without Docker.

In: a folder as in https://www.harborframework.com/docs/tasks, with task.toml, instruction.md,
environment/Dockerfile and tests/test.sh. Out: a `HarborFolder` with the steps of its Dockerfile, or
the reason for a refusal. Next: `container.py` runs the steps.

    FROM        an image of Python, Debian or Ubuntu; this machine's system stands in for it
    RUN         any command without a network; package installers only for what is here already
    COPY, ADD   of files in environment/
    WORKDIR, ENV, ARG, USER root; LABEL, EXPOSE, CMD and the like do nothing

Everything else is refused, and so are compose files, GPUs, services and other images.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAND_INS = re.compile(
    r"(?:docker\.io/|public\.ecr\.aws/docker/)?(?:library/)?(?:python:3\b|python:slim|ubuntu\b|debian\b)[\w.:-]*"
)
"""Images for which this machine's system may stand in."""
WITHOUT_EFFECT = {
    "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME",
}  # fmt: skip
NOT_NEEDED = {
    "tmux", "asciinema", "ca-certificates", "curl", "wget", "locales", "tzdata", "apt-utils",
    "software-properties-common", "gnupg", "sudo", "less", "vim", "nano", "procps",
}  # fmt: skip
"""Debian packages that serve other harnesses, the network, or a person at a terminal."""
COMMANDS = {
    "build-essential": "gcc", "python3-pip": "python3", "python3-venv": "python3",
    "python3-dev": "python3", "python-is-python3": "python3", "coreutils": "ls", "gawk": "awk",
    "findutils": "find", "diffutils": "diff", "util-linux": "mount", "openssl": "openssl",
    "openssh-client": "ssh", "xz-utils": "xz", "netcat-openbsd": "nc",
}  # fmt: skip
"""The command of a Debian package, where its name is another one."""
RUNNERS = {"pytest", "pytest-json-ctrf", "uv", "pip", "setuptools", "wheel"}
"""Python packages that only run tests; ours stand in, whatever version is asked for."""
MAX_FILES = 2000
MAX_BYTES = 64 << 20
"""Of a task's folder."""


class Refused(Exception):
    """Report why a task does not run here, in one line."""


@dataclass(frozen=True)
class Step:
    """A step of a Dockerfile: `run`, `copy`, `workdir` or `env`."""

    kind: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class HarborFolder:
    """A task that runs here."""

    folder: Path
    instruction: str
    steps: tuple[Step, ...]
    build_s: float
    agent_s: float
    verifier_s: float
    verifier_env: dict[str, str] = field(default_factory=dict)

    @property
    def solution(self) -> Path | None:
        """The reference solution's script, if there is one."""
        script = self.folder / "solution" / "solve.sh"
        return script if script.is_file() else None


def task_folders(place: Path) -> list[Path]:
    """List the task folders at or below `place`, at most two levels down."""
    if (place / "task.toml").is_file():
        return [place]
    files = [*place.glob("*/task.toml"), *place.glob("*/*/task.toml")]
    return sorted(file.parent for file in files)


def read_task(folder: Path) -> HarborFolder:
    """Read a task. Raises Refused with the reason if it cannot run here."""
    _check_size(folder)
    try:
        values = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Refused(f"it cannot be read: {' '.join(str(error).split())}") from None
    environment = _table(values, "environment")
    for key in ("gpus", "mcp_servers"):
        if environment.get(key):
            raise Refused(f"environment.{key} in task.toml")
    if _table(values, "verifier").get("environment_mode", "shared") != "shared":
        raise Refused("a verifier in a container of its own")
    if values.get("steps"):
        raise Refused("several steps in task.toml")
    if list((folder / "environment").glob("*compose*.y*ml")):
        raise Refused("a compose file: it has services")
    dockerfile = folder / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        raise Refused("there is no environment/Dockerfile")
    if not (folder / "tests" / "test.sh").is_file():
        raise Refused("there is no tests/test.sh")
    check_verifier((folder / "tests" / "test.sh").read_text(encoding="utf-8", errors="replace"))
    steps = read_dockerfile(dockerfile.read_text(encoding="utf-8", errors="replace"))
    verifier = _table(values, "verifier")
    return HarborFolder(
        folder,
        instruction,
        tuple(steps),
        build_s=_seconds(environment.get("build_timeout_sec"), 600),
        agent_s=_seconds(_table(values, "agent").get("timeout_sec"), 600),
        verifier_s=_seconds(verifier.get("timeout_sec"), 600),
        verifier_env={key: str(value) for key, value in _table(verifier, "env").items()},
    )


def _check_size(folder: Path) -> None:
    """Refuse folders that are too large to copy, and links that leave them."""
    total = 0
    for count, path in enumerate(folder.rglob("*"), 1):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise Refused(f"{path.name} is a link that leaves the folder")
        if path.is_file():
            total += path.stat().st_size
        if count > MAX_FILES or total > MAX_BYTES:
            raise Refused(f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MB")


def _table(values: object, key: str) -> dict[str, Any]:
    table = values.get(key) if isinstance(values, dict) else None
    return table if isinstance(table, dict) else {}


def _seconds(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e5 else default


# ------------------------------------------------------------------------------------- Dockerfile


def read_dockerfile(text: str) -> list[Step]:
    """Return the steps of a Dockerfile of the subset. Raises Refused."""
    steps: list[Step] = []
    images = 0
    for word, rest in _instructions(text):
        if word == "FROM":
            images += 1
            _check_image(rest, images)
        elif word in WITHOUT_EFFECT:
            continue
        elif word == "WORKDIR":
            steps.append(Step("workdir", (rest.strip().strip("\"'"),)))
        elif word in ("ENV", "ARG"):
            steps += [Step("env", pair) for pair in _pairs(rest)]
        elif word == "USER":
            if rest.strip() not in ("root", "0"):
                raise Refused(f"USER {rest.strip()}: all commands run as one user here")
        elif word in ("COPY", "ADD"):
            steps.append(_copy(word, rest))
        elif word == "RUN":
            command = check_command(_shell(rest))
            if command:
                steps.append(Step("run", (command,)))
        else:
            raise Refused(f"Dockerfile: {word}")
    if not images:
        raise Refused("Dockerfile: no FROM")
    return steps


def _instructions(text: str) -> list[tuple[str, str]]:
    """Split a Dockerfile into (INSTRUCTION, rest). Lines that end in a backslash go on."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if any(re.search(r"<<-?\s*['\"]?\w+", line) for line in lines if line[:3].upper() == "RUN"):
        raise Refused("Dockerfile: a here-document")
    code = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    instructions = []
    for line in code.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            instructions.append((word.upper(), rest.strip()))
    return instructions


def _check_image(rest: str, images: int) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    image = words[0].partition("@")[0] if words else ""
    if images > 1:
        raise Refused("Dockerfile: several FROM")
    if not STAND_INS.fullmatch(image):
        raise Refused(f"FROM {image or 'nothing'}: only images of Python, Debian and Ubuntu")


def _pairs(rest: str) -> list[tuple[str, str]]:
    """Return the names and values of ENV or ARG."""
    try:
        words = shlex.split(rest)
    except ValueError:
        raise Refused(f"Dockerfile: ENV {rest[:60]}") from None
    if words and "=" not in words[0]:  # ENV NAME VALUE; ARG NAME
        return [(words[0], " ".join(words[1:]))]
    pairs = [word.partition("=") for word in words if "=" in word]
    return [(name, value) for name, _, value in pairs]


def _copy(word: str, rest: str) -> Step:
    if "--from" in rest or "<<" in rest:
        raise Refused(f"Dockerfile: {word} from another image or a here-document")
    try:
        if rest.startswith("["):
            words = [str(name) for name in json.loads(rest)]
        else:
            words = [name for name in shlex.split(rest) if not name.startswith("--")]
    except ValueError:
        raise Refused(f"Dockerfile: {word} {rest[:60]}") from None
    if len(words) < 2 or any("://" in name for name in words):
        raise Refused(f"Dockerfile: {word} {rest[:60]}")
    return Step("copy", tuple(words))


def _shell(rest: str) -> str:
    """Return the shell command of RUN, whose options are dropped."""
    while rest.startswith("--"):
        rest = rest.partition(" ")[2].strip()
    if rest.startswith("["):
        try:
            return shlex.join(str(word) for word in json.loads(rest))
        except ValueError:
            raise Refused(f"Dockerfile: RUN {rest[:60]}") from None
    return rest


# ------------------------------------------------------------------------- what is installed


def check_command(command: str) -> str:
    """Return the command without its installers, whose packages must be here already.

    Raises Refused for a missing package, and for commands that need a network.
    """
    parts = []
    for part in re.split(r"\s*(?:&&|;)\s*", command):
        words = part.split()
        if not words:
            continue
        first = words
        while first and re.fullmatch(r"\w+=[^=]\S*", first[0]):  # DEBIAN_FRONTEND=noninteractive
            first = first[1:]
        if _is_installer(first):
            continue
        if {"curl", "wget", "npm", "cargo", "go", "gem", "conda"} & {word for word in first[:1]}:
            raise Refused(f"RUN {' '.join(first[:3])}: there is no network")
        if first[:2] == ["git", "clone"] and "://" in part:
            raise Refused("RUN git clone: there is no network")
        parts.append(part)
    return " && ".join(parts)


def _is_installer(words: list[str]) -> bool:
    """Return whether this is a package manager's command; raise Refused for a missing package."""
    options = [word for word in words if word.startswith("-")]
    names = [word for word in words if not word.startswith("-")]
    if names[:1] == ["sudo"]:
        names = names[1:]
    if names and names[0] in ("apt-get", "apt"):
        if names[1:2] == ["install"]:
            for name in names[2:]:
                check_debian(name)
        return True
    if names[:1] == ["rm"] and any("/var/lib/apt" in word for word in names):
        return True
    if names[:2] == ["python3", "pip"] or names[:2] == ["python", "pip"]:
        names = names[1:]  # python3 -m pip
    if names[:1] == ["uv"]:
        names = names[1:]
    if names and names[0] in ("pip", "pip3") and names[1:2] == ["install"]:
        if any(option in ("-r", "--requirement", "-e", "--editable") for option in options):
            raise Refused("RUN pip install -r: a list of packages")
        for name in names[2:]:
            check_python(name)
        return True
    return False


def check_debian(name: str) -> None:
    """Raise Refused for a Debian package that is needed and not here."""
    plain = name.partition("=")[0]
    if plain in NOT_NEEDED:
        return
    if shutil.which(COMMANDS.get(plain, plain), path="/usr/bin:/bin:/usr/sbin:/sbin") is None:
        raise Refused(f"the Debian package {plain} is not here")


def check_python(requirement: str) -> None:
    """Raise Refused unless a Python package is here, in the version that is asked for."""
    match = re.match(r"['\"]?([\w.-]+)(?:\[[\w,-]+\])?(?:==([\w.]+))?", requirement)
    if match is None:
        raise Refused(f"pip install {requirement}")
    name, version = match[1], match[2]
    if name.lower() in RUNNERS:
        return
    try:
        present_version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise Refused(f"the Python package {name} is not here") from None
    if version and version != present_version:
        raise Refused(f"the Python package {name} is here as {present_version}, not {version}")


def check_verifier(script: str) -> None:
    """Raise Refused for a test script that installs what is not here.

    Published scripts fetch uv and run pytest with it. Both have stand-ins (`container.py`).
    """
    plain = re.sub(r"\\[ \t]*\n", " ", script)
    for line in plain.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for name in re.findall(r"(?:\s-w|\s--with)[ =]([\w.\[\]=-]+)", line):
            check_python(name)
        requirements = re.search(r"\b(?:uv add|pip3? install|uv pip install)\s+(.*)", line)
        for name in requirements[1].split() if requirements else ():
            if name in ("&&", ";", "||", "|", ">"):
                break
            if not name.startswith("-"):
                check_python(name)
        packages = re.search(r"\bapt(?:-get)? +(?:-\S+ +)*install +(.*)", line)
        for name in packages[1].split() if packages else ():
            if name in ("&&", ";", "||", "|", ">"):
                break
            if not name.startswith("-"):
                check_debian(name)
        if re.search(r"\bgit clone\b|\bnpm\b|\bcargo\b|\bdocker\b", line):
            raise Refused(f"tests/test.sh needs a network: {line.strip()[:60]}")
        fetches = re.search(r"\b(?:curl|wget)\b", line) and "astral.sh/uv" not in line
        if fetches and re.search(r"https?://(?!localhost|127\.)", line):
            raise Refused(f"tests/test.sh needs a network: {line.strip()[:60]}")
