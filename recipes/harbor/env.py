"""Play a Harbor task: a shell, files, and tests after the agent has ended.

In: a row with a task's folder. Out: a plain class whose methods are tools (env/class_env.py). The
folder's `tests/` and `solution/` are not in the container while the agent works. Each episode
starts from a copy of the built image, and its tests write the reward as Harbor does:
/logs/verifier/reward.txt with a number, or reward.json.

Reading, writing, testing and paying are scripts that run inside the container, with text on stdin
and stdout. So a path of the agent means nothing outside.
"""

from __future__ import annotations

import atexit
import base64
import functools
import json
import math
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, Hermes, Message, Row
from agent_r1_recipes.code.confine import Ran
from agent_r1_recipes.harbor.container import INPUTS, MAX_OUTPUT, Container, check_container
from agent_r1_recipes.harbor.docker import DockerContainer, Engine, build_image, find_program
from agent_r1_recipes.harbor.packages import Refused
from agent_r1_recipes.harbor.tasks import HarborFolder, read_task

COMMAND_S = 20.0
"""Seconds of one command of the agent."""
MAX_WRITE = 64 << 10
"""Characters of a file that the agent writes."""
MAX_EDIT = 1 << 20
"""Bytes of a file that the agent edits."""
PLACE = """
case $1 in /*) ;; *) set -- "./$1" "${@:2}" ;; esac
"""
"""A program takes the path `-` for its input."""
IS_FILE = (
    PLACE
    + """
[ -e "$1" ] || { echo "No such file or directory"; exit 1; }
[ -f "$1" ] || { echo "not a regular file"; exit 1; }
"""
)
READ_PART = IS_FILE + 'exec head -c "$2" -- "$1"'
READ_ALL = (
    IS_FILE
    + """
[ "$(stat -L -c %s -- "$1")" -le "$2" ] || { echo "it has more than $2 bytes"; exit 1; }
exec base64 -w0 -- "$1"
"""
)
WRITE = (
    PLACE
    + """
[ ! -e "$1" ] || [ -f "$1" ] || { echo "not a regular file"; exit 1; }
[ -d "${1%/*}/" ] || mkdir -p -- "${1%/*}/" && exec head -c "$2" > "$1"
"""
)
READY = "\0tests\0"
"""Printed before the tests: what the agent left in their places is gone."""
TESTS = rf"""
[ -d /logs ] && [ ! -L /logs ] || rm -rf /logs || exit 1
chmod -R u+rwX /tests /logs 2>/dev/null
rm -rf /tests /logs/verifier || exit 1
mkdir -p /logs/verifier || exit 1
cp -R --preserve=mode,timestamps,links -- {INPUTS} /tests || exit 1
printf '\0tests\0'
export -- "$@"
exec /bin/bash /tests/test.sh </dev/null
"""
REWARD_MARK = "\0reward\0"
"""Printed before the name of the file with the reward, after what a loader may complain about."""
REWARD = r"""
exec 2>/dev/null
cd /logs/verifier || exit 1
for name in reward.txt reward.json; do
  if [ -f "$name" ] && [ ! -L "$name" ]; then
    printf '\0reward\0%s\0' "$name"
    exec head -c 10000 -- "$name"
  fi
done
"""


_LOCK = threading.Lock()
AnyContainer = Container | DockerContainer


@functools.lru_cache(maxsize=256)
def _image(folder: str, engine: Engine) -> tuple[HarborFolder, Callable[[], AnyContainer]]:
    """Build a task once in a process, and return what starts a copy of it.

    Raises AgentR1Error if it cannot run here.
    """
    program = find_program(engine)
    try:
        task = read_task(Path(folder), with_docker=program is not None)
    except Refused as reason:
        raise AgentR1Error(f"{folder}: {reason}", code="task_refused") from None
    if program:
        return task, functools.partial(DockerContainer, program, build_image(program, task))
    assert task.build is not None, "`read_task` reads the Dockerfile where no engine builds it"
    check_container()
    container = Container()
    atexit.register(container.remove)
    try:
        container.build(task.build, task.folder / "environment", task.build_s)
    except AgentR1Error as error:
        raise AgentR1Error(f"{folder}: {error}", code="build_failed") from None
    return task, functools.partial(Container, container)


class HarborTask:
    """Work in a task's container, with a shell and files."""

    score_name = "reward_of_tests"

    def __init__(self) -> None:
        self.container: AnyContainer | None = None

    def reset(self, task: str, engine: Engine = "auto", **row: Any) -> str:
        with _LOCK:  # episodes have threads of their own, and a task is built once
            self.task, make_copy = _image(task, engine)
        self.container = make_copy()
        self.container.variables = self.container.variables | self.task.environment_env
        self.done = False
        return f"Working directory: {self.container.directory}"

    def run(self, command: str) -> str:
        """Run a command in bash. Each command is a new shell in the working directory.

        Args:
            command: The command.
        """
        command = command.encode("utf-8", "replace").decode()  # a model can write half a character
        return _describe_run(self._within_size(self._container.run(command, COMMAND_S)))

    def read(self, path: str) -> str:
        """Read a file.

        Args:
            path: Its path.
        """
        result = self._call(READ_PART, path, str(MAX_OUTPUT))
        return result.output if result.code == 0 else _fault(result)

    def write(self, path: str, text: str) -> str:
        """Write a file, also in new folders.

        Args:
            path: Its path.
            text: Its content.
        """
        if len(text) > MAX_WRITE:
            return f"error: at most {MAX_WRITE} characters"
        return self._write(path, text.encode("utf-8", "replace"))

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: Its path.
            old: The text.
            new: The text instead.
        """
        result = self._call(READ_ALL, path, str(MAX_EDIT), keep=2 * MAX_EDIT)
        if result.code != 0:
            return _fault(result)
        content = base64.b64decode(result.output)
        old_bytes = old.encode("utf-8", "replace")
        count = content.count(old_bytes) if old_bytes else 0
        if count != 1:
            return f"error: the text occurs {count} times"
        return self._write(path, content.replace(old_bytes, new.encode("utf-8", "replace")))

    def get_reward(self) -> float:
        """Copy the tests into the container, run them, and read their reward."""
        self.score = self._score()
        return self.score

    def close(self) -> None:
        if self.container is not None:
            self.container.remove()

    @property
    def _container(self) -> AnyContainer:
        assert self.container is not None, "reset made it"
        return self.container

    def _within_size(self, result: Ran) -> Ran:
        """End the episode if its files are too large: the disk belongs to all."""
        if result.ended == "size" or not self._container.fits():
            self.done = True
            return Ran(result.output, None, "size")
        return result

    def _call(self, script: str, path: str, *words: str, text: bytes = b"", keep: int = 0) -> Ran:
        """Run a script of ours with a path of the agent."""
        path = path.encode("utf-8", "replace").decode()
        if "\0" in path or len(path) > 4096:
            return Ran("a path has at most 4096 characters, none of them zero", 1)
        keep = keep or MAX_OUTPUT
        return self._container.ask(script, path, *words, text=text, within_s=COMMAND_S, keep=keep)

    def _write(self, path: str, content: bytes) -> str:
        result = self._within_size(self._call(WRITE, path, str(len(content)), text=content))
        return "written" if result.code == 0 else _fault(result)

    def _score(self) -> float:
        """Return the reward. What keeps the tests from starting or ending is worth 0."""
        variables = self._container.variables | self.task.verifier_env
        assignments = [f"{name}={value}" for name, value in variables.items()]
        container = self._container.for_tests(self.task.folder / "tests")
        result = container.call(TESTS, *assignments, within_s=self.task.verifier_s)
        if result.ended is not None or READY not in result.output:
            return 0.0
        container.end_processes()
        result = container.ask(REWARD)
        _, _, answer = result.output.partition(REWARD_MARK)
        name, _, text = answer.partition("\0")
        return read_reward(name, text)


def read_reward(name: str, text: str) -> float:
    """Read reward.txt, or `reward` of reward.json, or its only number. Raises AgentR1Error."""
    if name not in ("reward.txt", "reward.json"):
        raise AgentR1Error(
            "the tests wrote neither /logs/verifier/reward.txt nor reward.json", code="no_reward"
        )
    try:
        if name == "reward.txt":
            return _finite(float(text[:100]))
        values = json.loads(text)
        if isinstance(values, dict) and len(values) == 1:
            values = {"reward": next(iter(values.values()))} | values
        return _finite(float(values["reward"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise AgentR1Error(
            f"the tests wrote no reward that can be read ({type(error).__name__}: {error}); "
            "reward.txt has one number, reward.json a number `reward`",
            code="bad_reward",
        ) from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _describe_run(result: Ran) -> str:
    lines = [result.output.rstrip()] if result.output.strip() else []
    if result.ended:
        lines.append(f"[ended by the limit of {result.ended}]")
    elif result.code:
        lines.append(f"[exit code {result.code}]")
    return "\n".join(lines) or "[it printed nothing]"


def _fault(result: Ran) -> str:
    lines = result.output.strip().splitlines() or [f"[{result.ended or result.code}]"]
    reason = f"ended by the limit of {result.ended}" if result.ended else lines[-1]
    return f"error: {reason[:300]}"


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
        variables = read_task(folder.parent, with_docker=True).solution_env
        words = ["env", *(f"{name}={value}" for name, value in variables.items())]
        words += ["bash", "/solution/solve.sh"]
        return Hermes.call("run", command=shlex.join(words if variables else words[1:]))
    return Hermes.answer("done")
