"""Read a Harbor task folder, and say whether it can run here.

In: a folder as in https://www.harborframework.com/docs/tasks, with task.toml, instruction.md,
environment/Dockerfile and tests/test.sh. Out: a `HarborFolder`, or the reason for a refusal. Next:
`env.py` plays it in an engine: `docker.py`, or `container.py` with the script of `dockerfile.py`.

Compose files, GPUs, services, several steps and a separate verifier are refused with any engine.
Without Docker, what the script cannot say is refused, too.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_recipes.harbor.dockerfile import Build, read_dockerfile
from agent_r1_recipes.harbor.ignore import IGNORE, list_ignored
from agent_r1_recipes.harbor.packages import Refused, check_users, check_verifier

MAX_TEXT = 1 << 20
"""Bytes of a text of a task."""
MAX_FILES = 2000
MAX_BYTES = 64 << 20
"""Of a task's folder."""


@dataclass(frozen=True)
class HarborFolder:
    """A task that runs here."""

    folder: Path
    instruction: str
    build: Build | None
    """None where Docker builds it."""
    build_s: float
    verifier_s: float
    verifier_env: dict[str, str] = field(default_factory=dict)


def task_folders(place: Path) -> list[Path]:
    """List the task folders at or below `place`, at most two levels down."""
    if (place / "task.toml").is_file():
        return [place]
    files = [*place.glob("*/task.toml"), *place.glob("*/*/task.toml")]
    return sorted(file.parent for file in files)


def read_task(folder: Path, with_docker: bool = False) -> HarborFolder:
    """Read a task. Raises Refused with the reason if it cannot run here."""
    check_files(folder)
    try:
        values = tomllib.loads(read_text(folder, "task.toml"))
    except (ValueError, RecursionError) as error:
        raise Refused(f"task.toml cannot be read: {' '.join(str(error).split())}") from None
    instruction = read_text(folder, "instruction.md")
    environment = _table(values, "environment")
    for key in ("gpus", "mcp_servers"):
        if environment.get(key):
            raise Refused(f"environment.{key} in task.toml")
    verifier = _table(values, "verifier")
    if verifier.get("environment_mode", "shared") != "shared":
        raise Refused("a verifier in a container of its own")
    if values.get("steps"):
        raise Refused("several steps in task.toml")
    if list((folder / "environment").glob("*compose*.y*ml")):
        raise Refused("a compose file: it has services")
    dockerfile = read_text(folder, "environment/Dockerfile")
    test = read_text(folder, "tests/test.sh")
    build = None
    if not with_docker:
        check_verifier(test)
        for path in sorted((folder / "tests").glob("*.*")):
            if path.suffix in (".py", ".sh") and path.is_file():
                check_users(f"tests/{path.name}", read_text(folder, f"tests/{path.name}"))
        build = read_dockerfile(dockerfile)
        context = folder / "environment"
        # Docker prefers `Dockerfile.dockerignore`, which is rare.
        if list(context.glob("?*.dockerignore")):
            raise Refused("a .dockerignore of one Dockerfile")
        if (context / IGNORE).exists():
            build.left_out = list_ignored(read_text(context, IGNORE), context)
    return HarborFolder(
        folder,
        instruction,
        build,
        build_s=_seconds(environment.get("build_timeout_sec"), 600),
        verifier_s=_seconds(verifier.get("timeout_sec"), 600),
        verifier_env=_variables(_table(verifier, "env")),
    )


def check_files(folder: Path) -> None:
    """Refuse folders with too much, with links that leave them, and with pipes or devices."""
    total = 0
    count = 0
    folders = [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError as error:
            raise Refused(f"it cannot be read: {error.strerror}") from None
        for entry in entries:
            path = Path(entry.path)
            facts = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode):
                try:
                    inside = path.resolve().is_relative_to(folder.resolve())
                except (OSError, RuntimeError):  # a circle
                    inside = False
                if not inside:
                    raise Refused(f"{path.name} is a link that leaves the folder")
            elif stat.S_ISDIR(facts.st_mode):
                folders.append(path)
            elif not stat.S_ISREG(facts.st_mode):
                raise Refused(f"{path.name} is neither a file nor a folder")
            total += facts.st_size
        count += len(entries)
        if count > MAX_FILES or total > MAX_BYTES:
            raise Refused(f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MB")


def read_text(folder: Path, name: str) -> str:
    """Read a text of a task. Raises Refused unless it is a regular file of UTF-8, not too long."""
    try:
        place = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait
    except FileNotFoundError:
        raise Refused(f"there is no {name}") from None
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror}") from None
    with os.fdopen(place, "rb") as file:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise Refused(f"{name} is no regular file")
        text = file.read(MAX_TEXT + 1)
    if len(text) > MAX_TEXT or b"\0" in text:
        raise Refused(f"{name} has a zero byte, or more than {MAX_TEXT >> 20} MB")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise Refused(f"{name} is not in UTF-8") from None


def _variables(table: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a table. Raises Refused for what a shell cannot set."""
    variables = {}
    for name, value in table.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or isinstance(value, dict | list):
            raise Refused(f"verifier.env.{name} in task.toml")
        variables[name] = str(value)
        if "\0" in variables[name] or "${" in variables[name]:
            raise Refused(f"verifier.env.{name} in task.toml is a variable of this machine")
    return variables


def _table(values: object, key: str) -> dict[str, Any]:
    table = values.get(key) if isinstance(values, dict) else None
    return table if isinstance(table, dict) else {}


def _seconds(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e5 else default
