"""Play a Harbor task: a shell, files, and tests after the agent has ended.

In: a row with a task's folder. Out: a plain class whose methods are tools (env/class_env.py). The
folder's `tests/` and `solution/` are not in the container while the agent works. Each episode
starts from a copy of the built image, and its tests write the reward as Harbor does:
/logs/verifier/reward.txt with a number, or reward.json.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, Hermes, Message, Row
from agent_r1_recipes.harbor.container import (
    FOLDER_SIZE,
    Container,
    Ran,
    check_container,
)
from agent_r1_recipes.harbor.tasks import HarborFolder, Refused, Step, read_task

COMMAND_S = 20.0
"""Seconds of one command of the agent."""
MAX_WRITE = 64 << 10
"""Characters of a file that the agent writes."""


_LOCK = threading.Lock()


@functools.lru_cache(maxsize=256)
def _image(folder: str) -> tuple[HarborFolder, Container]:
    """Build a task's file system once in a process. Raises AgentR1Error if it cannot run here."""
    try:
        task = read_task(Path(folder))
    except Refused as reason:
        raise AgentR1Error(f"{folder}: {reason}", code="task_refused") from None
    check_container()
    container = Container()
    atexit.register(container.remove)
    for step in task.steps:
        _build(container, task, step)
    return task, container


def _build(container: Container, task: HarborFolder, step: Step) -> None:
    """Run one step of a Dockerfile."""
    if step.kind == "workdir":
        container.directory = os.path.normpath(os.path.join(container.directory, step.words[0]))
        _place(container, ".").mkdir(parents=True, exist_ok=True)
    elif step.kind == "env":
        container.variables[step.words[0]] = step.words[1]
    elif step.kind == "copy":
        _copy(container, task.folder / "environment", step)
    else:
        result = container.run(step.words[0], task.build_s)
        if result.code != 0:
            raise AgentR1Error(
                f"{task.folder}: RUN {step.words[0][:80]} failed: {_last_line(result)}",
                code="build_failed",
            )


def _place(container: Container, name: str) -> Path:
    try:
        return container.path(name)
    except ValueError:
        raise AgentR1Error(f"{name}: a link is on the way", code="build_failed") from None


def _copy(container: Container, context: Path, step: Step) -> None:
    *sources, target = step.words
    into = target.endswith("/") or len(sources) > 1 or target in (".", "./")
    place = _place(container, target)
    for source in sources:
        paths = [context]  # `COPY . TARGET`
        if source.strip("./"):
            paths = sorted(context.glob(source.lstrip("/").removeprefix("./")))
        if not paths:
            raise AgentR1Error(f"{context}: COPY {source}: no such file", code="build_failed")
        for path in paths:
            if not path.resolve().is_relative_to(context.resolve()):
                raise AgentR1Error(
                    f"{context}: COPY {source} leads out of the folder", code="build_failed"
                )
            goal = place / path.name if path.is_file() and (into or place.is_dir()) else place
            _copy_tree(path, goal, container.root)


def _copy_tree(path: Path, goal: Path, root: Path) -> None:
    """Copy a file or folder. A link of a RUN on the way would lead the copy to the host's files."""
    inner = [Path()]
    if path.is_dir():
        inner += [one.relative_to(path) for one in sorted(path.rglob("*"))]
    for name in inner:
        source, place = path / name, goal / name
        ways = [place, *place.parents]
        if any(way.is_symlink() for way in ways[: ways.index(root)]):
            raise AgentR1Error(
                f"COPY to {place.relative_to(root)}: a link is on the way", code="build_failed"
            )
        if source.is_dir() and not source.is_symlink():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


class HarborTask:
    """Work in a task's container, with a shell and files."""

    score_name = "reward_of_tests"

    def __init__(self) -> None:
        self.container: Container | None = None

    def reset(self, task: str, **row: Any) -> str:
        with _LOCK:  # episodes have threads of their own, and a task is built once
            self.task, image = _image(task)
        self.container = Container()
        shutil.rmtree(self.container.root)
        shutil.copytree(image.root, self.container.root, symlinks=True)
        self.container.directory = image.directory
        self.container.variables = image.variables
        self.done = False
        return f"Working directory: {self.container.directory}"

    def run(self, command: str) -> str:
        """Run a command in bash. Each command is a new shell in the working directory.

        Args:
            command: The command.
        """
        return _shown(self._run(command, COMMAND_S))

    def read(self, path: str) -> str:
        """Read a file.

        Args:
            path: Its path.
        """
        try:
            return self._container.path(path).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError) as error:
            return _fault(error)

    def write(self, path: str, text: str) -> str:
        """Write a file, also in new folders.

        Args:
            path: Its path.
            text: Its content.
        """
        if len(text) > MAX_WRITE:
            return f"error: at most {MAX_WRITE} characters"
        try:
            place = self._container.path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8", errors="replace")
        except (OSError, ValueError) as error:
            return _fault(error)
        return "written"

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: Its path.
            old: The text.
            new: The text instead.
        """
        text = self.read(path)
        if text.count(old) != 1:
            return f"error: the text occurs {text.count(old)} times"
        return self.write(path, text.replace(old, new))

    def get_reward(self) -> float:
        """Copy the tests into the container, run them, and read their reward."""
        self.score = self._score()
        return self.score

    def close(self) -> None:
        if self.container is not None:
            self.container.remove()

    @property
    def _container(self) -> Container:
        assert self.container is not None, "reset made it"
        return self.container

    def _run(self, command: str, within_s: float) -> Ran:
        result = self._container.run(command, within_s)
        if self._container.size() > FOLDER_SIZE:
            self.done = True  # the disk belongs to all episodes
            return Ran(result.output, None, "size")
        return result

    def _score(self) -> float:
        container = self._container
        # The agent may have left a folder, a file or a link there. The parent comes first: below a
        # link named `logs`, `verifier` is a folder of this machine.
        for place in ("tests", "logs", "logs/verifier"):
            spot = container.root / place
            if spot.is_symlink() or spot.is_file():
                spot.unlink()
            elif spot.is_dir() and place != "logs":
                shutil.rmtree(spot, ignore_errors=True)
        logs = container.root / "logs"
        (logs / "verifier").mkdir(parents=True)
        shutil.copytree(self.task.folder / "tests", container.root / "tests", symlinks=True)
        variables = container.variables
        container.variables = variables | self.task.verifier_env
        result = container.run("bash /tests/test.sh", self.task.verifier_s)
        container.variables = variables
        if result.ended is not None:
            return 0.0
        return read_reward(logs / "verifier")


def read_reward(folder: Path) -> float:
    """Read reward.txt, or `reward` of reward.json, or its only number. Raises AgentR1Error."""
    text, table = folder / "reward.txt", folder / "reward.json"
    try:
        if text.is_file() and not text.is_symlink():
            return _finite(float(text.read_text()[:100]))
        if table.is_file() and not table.is_symlink():
            values = json.loads(table.read_text()[:10_000])
            if isinstance(values, dict) and len(values) == 1:
                values = {"reward": next(iter(values.values()))} | values
            return _finite(float(values["reward"]))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise AgentR1Error(
            f"the tests wrote no reward that can be read ({type(error).__name__}: {error}); "
            "reward.txt has one number, reward.json a number `reward`",
            code="bad_reward",
        ) from None
    raise AgentR1Error(
        "the tests wrote neither /logs/verifier/reward.txt nor reward.json", code="no_reward"
    )


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _shown(result: Ran) -> str:
    lines = [result.output.rstrip()] if result.output.strip() else []
    if result.ended:
        lines.append(f"[ended by the limit of {result.ended}]")
    elif result.code:
        lines.append(f"[exit code {result.code}]")
    return "\n".join(lines) or "[it printed nothing]"


def _last_line(result: Ran) -> str:
    lines = result.output.strip().splitlines()
    return lines[-1][:200] if lines else str(result.ended or f"exit code {result.code}")


def _fault(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    return f"error: {reason}"


def expert(row: Row, history: list[Message], rng: Any) -> str:
    """Copy the task's own solution into the container and run it, for `agent-r1 env check`."""
    folder = Path(row["extra_info"]["metadata"]["task"]) / "solution"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    place = sum(message["role"] == "tool" for message in history)
    if place < len(files):
        name = f"/solution/{files[place].relative_to(folder)}"
        text = files[place].read_text(encoding="utf-8", errors="replace")
        return Hermes.call("write", path=name, text=text)
    if place == len(files) and files:
        return Hermes.call("run", command="bash /solution/solve.sh")
    return Hermes.answer("done")
