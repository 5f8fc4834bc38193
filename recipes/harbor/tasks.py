"""Read a Harbor task folder, and say whether it can run here.

In: a folder as in https://www.harborframework.com/docs/tasks, with task.toml, instruction.md,
environment/Dockerfile and tests/test.sh. Out: a `HarborFolder`, or the reason for a refusal. Next:
`env.py` plays it in an engine: `docker.py`, or `container.py` with the script of `dockerfile.py`.

Compose files, GPUs, services, several steps and a separate verifier are refused with any engine. So
is each key of task.toml whose value is not read here, unless it stands in `HARMLESS`. Without
Docker, what the script cannot say is refused, too.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agent_r1 import Fields
from agent_r1_recipes.harbor.dockerfile import READONLY, Build, read_dockerfile
from agent_r1_recipes.harbor.ignore import IGNORE, list_ignored
from agent_r1_recipes.harbor.packages import Refused, check_users, check_verifier

MAX_TEXT = 1 << 20
"""Bytes of a text of a task."""
MAX_FILES = 2000
MAX_BYTES = 64 << 20
"""Of a task's folder."""
HARMLESS = {
    "version": "the version of the form",
    "schema_version": "the version of the form",
    "source": "the data set's name",
    "task": "the task's name and authors",
    "metadata": "about the task; its tests do not see it",
    "artifacts": "files to keep of a trial; the reward does not need them",
    "agent.timeout_sec": "env.episode_timeout_s bounds an episode",
    "agent.network_mode": "the agent has no network here",
    "verifier.network_mode": "the engine decides: see this recipe's page",
    "environment.allow_internet": "the agent has no network here",
    "environment.network_mode": "the agent has no network here",
    "environment.docker_image": "the image of this Dockerfile, made before",
    "environment.cpus": "limits are those of this recipe's page",
    "environment.memory": "limits are those of this recipe's page",
    "environment.memory_mb": "limits are those of this recipe's page",
    "environment.storage": "limits are those of this recipe's page",
    "environment.storage_mb": "limits are those of this recipe's page",
}
"""Keys of task.toml whose values are not read -> what they are."""


@dataclass(frozen=True)
class HarborFolder:
    """A task that runs here."""

    folder: Path
    instruction: str
    build: Build | None
    """None where Docker builds it."""
    build_s: float
    verifier_s: float
    environment_env: dict[str, str] = field(default_factory=dict)
    """Variables of the agent's commands and of the tests."""
    verifier_env: dict[str, str] = field(default_factory=dict)
    """Variables of the tests alone."""
    solution_env: dict[str, str] = field(default_factory=dict)
    """Variables of the task's own solution."""
    not_read: Counter[str] = field(default_factory=Counter)
    """Keys of task.toml in `HARMLESS` that have a value."""


def task_folders(place: Path) -> list[Path]:
    """List the task folders at or below `place`, at most two levels down."""
    if (place / "task.toml").is_file():
        return [place]
    files = [*place.glob("*/task.toml"), *place.glob("*/*/task.toml")]
    return sorted(file.parent for file in files)


def read_task(folder: Path, with_docker: bool = False) -> HarborFolder:
    """Read a task. Raises Refused with the reason if it cannot run here."""
    check_files(folder)
    values = _read_toml(folder)
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
    for section in ("agent", "verifier"):
        user = _table(values, section).get("user")
        if user not in (None, "", "root", 0):
            raise Refused(f"{section}.user = {user!r:.40} in task.toml: only root is here")
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
    task = HarborFolder(
        folder,
        instruction,
        build,
        build_s=_seconds(environment, "build_timeout_sec", 600),
        verifier_s=_seconds(verifier, "timeout_sec", 600),
        environment_env=_variables(environment, "environment"),
        verifier_env=_variables(verifier, "verifier"),
        solution_env=_variables(_table(values, "solution"), "solution"),
    )
    try:
        values.refuse_unread(HARMLESS, task.not_read)
    except ValueError as error:
        raise Refused(f"task.toml: {error}") from None
    return task


def _read_toml(folder: Path) -> Fields:
    try:
        return Fields(tomllib.loads(read_text(folder, "task.toml")))
    except (ValueError, RecursionError) as error:
        raise Refused(f"task.toml cannot be read: {' '.join(str(error).split())}") from None


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


def _variables(table: Fields, section: str) -> dict[str, str]:
    """Return the variables `env` of a section. Raises Refused for what a shell cannot set."""
    variables = {}
    entries = table.whole("env", {})
    if not isinstance(entries, dict):
        raise Refused(f"{section}.env in task.toml is no table")
    for name, value in entries.items():
        place = f"{section}.env.{name} in task.toml"
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or isinstance(value, dict | list):
            raise Refused(place)
        if name in READONLY:
            raise Refused(f"{place}: a shell keeps that variable for itself")
        variables[name] = str(value)
        if "\0" in variables[name] or "${" in variables[name]:
            raise Refused(f"{place} is a variable of this machine")
    return variables


def _table(values: Fields, key: str) -> Fields:
    """Return a section; an empty one if there is none."""
    table = values.get(key)
    if table is None:
        return Fields({})
    if not isinstance(table, Fields):
        raise Refused(f"{key} in task.toml is no section")
    return table


def _seconds(table: Fields, key: str, default: float) -> float:
    value = table.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e5:
        raise Refused(f"{key} = {value!r:.40} in task.toml: it is a number of seconds")
    return float(value)
