"""Run a task's commands in Docker or Podman, where one of them is there.

In: a task. Out: the same methods as those of `container.py`. Next: `env.py` plays a task in it.

The engine builds the task's own Dockerfile, with a network. While the agent works there is none,
and memory, processes and rights are limited. The tests run in a second container, made of the
first one's files, with the network that Harbor gives them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_r1 import AgentR1Error, say
from agent_r1_recipes.code.confine import Ran, converse, end, start
from agent_r1_recipes.code.watch import MEMORY, PROCESSES
from agent_r1_recipes.harbor.container import (
    FILE_SIZE,
    INPUTS,
    MAX_OUTPUT,
    MOST_OUTPUT,
    SHARED_MEMORY,
    refuse_command,
)
from agent_r1_recipes.harbor.tasks import HarborFolder

Engine = Literal["auto", "docker", "podman", "bubblewrap"]
LABEL = "agent-r1-harbor"
START_S = 120.0
"""Seconds for the start of a container, and for a copy of its files."""
RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
"""What root needs in a container to install and to change users."""
FIRST_PROCESS = "while :; do sleep 60 & wait; done"
"""A shell as process 1 takes over orphans, and `kill -9 -1` does not end it."""


@dataclass(frozen=True)
class Program:
    """The command line of Docker or Podman."""

    name: str
    path: str
    rootless: bool
    """Root in its containers is an ordinary user of this machine."""

    def __call__(self, *words: str, text: bytes = b"", within_s: float, keep: int = 1 << 20) -> Ran:
        """Run a command of it, in the environment of this process."""
        process = start([self.path, *words], dict(os.environ))
        try:
            return converse(process, text, time.monotonic() + within_s, keep, MOST_OUTPUT)
        finally:
            end(process)

    def must(self, *words: str, within_s: float = START_S) -> str:
        """Run a command that may not fail, and return its output. Raises AgentR1Error."""
        result = self(*words, within_s=within_s)
        if result.code != 0:
            lines = result.output.strip().splitlines() or [str(result.ended or result.code)]
            raise AgentR1Error(
                f"{self.name} {words[0]}: {lines[-1][:300]}", code="container_failed"
            )
        return result.output.strip()


@functools.cache
def find_program(engine: Engine) -> Program | None:
    """Choose the engine once in a process; None is bubblewrap. Prefers a rootless one.

    Raises AgentR1Error if the engine that was asked for does not answer.
    """
    if engine == "bubblewrap":
        return None
    names = ("podman", "docker") if engine == "auto" else (engine,)
    programs = [program for name in names if (program := _ask(name))]
    programs.sort(key=lambda program: not program.rootless)
    if not programs:
        if engine == "auto":
            return None
        raise AgentR1Error(
            f"data.harbor_engine={engine}: `{engine} info` fails here; start it, or take "
            "data.harbor_engine=bubblewrap",
            code="no_sandbox",
        )
    [program, *_] = programs
    root = "rootless" if program.rootless else "its daemon has the rights of root"
    say(
        f"Harbor tasks run in {program.name} ({root}); not bounded here: bytes on the disk",
        sys.stderr,
    )
    return program


def _ask(name: str) -> Program | None:
    """Return the program if its engine answers."""
    path = shutil.which(name)
    if path is None:
        return None
    form = "{{json .SecurityOptions}}" if name == "docker" else "{{.Host.Security.Rootless}}"
    with contextlib.suppress(AgentR1Error):
        facts = Program(name, path, False).must("info", "--format", form, within_s=15.0)
        return Program(name, path, "rootless" in facts or facts == "true")
    return None


class DockerContainer:
    """The container of one episode."""

    def __init__(self, program: Program, image: str, *options: str) -> None:
        """Start a container of an image. `options` replace having no network."""
        self.program = program
        self.name = f"{LABEL}-{uuid.uuid4().hex[:12]}"
        self.variables: dict[str, str] = {}
        """Those of task.toml; the image has the others."""
        self._image_to_remove = ""
        self._tests: DockerContainer | None = None
        limits = [
            "--memory", str(MEMORY), "--memory-swap", str(MEMORY), "--pids-limit", str(PROCESSES),
            "--shm-size", str(SHARED_MEMORY), "--ulimit", "core=0",
            "--ulimit", f"fsize={FILE_SIZE}", "--security-opt", "no-new-privileges",
            "--cap-drop", "ALL",
        ]  # fmt: skip
        for right in RIGHTS:
            limits += ["--cap-add", right]
        program.must(
            "run", "--detach", "--pull", "never", "--name", self.name, "--label", LABEL,
            *limits, *(options or ["--network", "none"]), "--entrypoint", "/bin/sh", image,
            "-c", FIRST_PROCESS,
        )  # fmt: skip
        self.directory = "/"
        self.directory = self.call("pwd").output.strip() or "/"

    def run(self, command: str, within_s: float) -> Ran:
        """Run a command of a task in bash, in the image's directory, with its variables."""
        refusal = refuse_command(command)
        if refusal:
            return refusal
        variables = [f"--env={name}={value}" for name, value in self.variables.items()]
        ran = self.program(
            "exec", *variables, self.name, "/bin/bash", "-c", command,
            within_s=within_s, keep=MAX_OUTPUT,
        )  # fmt: skip
        return self._end_after_limit(ran)

    def call(
        self,
        script: str,
        *words: str,
        text: bytes = b"",
        within_s: float = 20.0,
        keep: int = MAX_OUTPUT,
    ) -> Ran:
        """Run a script of ours: `words` are its arguments, `text` is its input."""
        ran = self.program(
            "exec",
            "--interactive",
            self.name,
            "/bin/bash",
            "-c",
            script,
            "bash",
            *words,
            text=text,
            within_s=within_s,
            keep=keep,
        )
        return self._end_after_limit(ran)

    ask = call

    def for_tests(self, tests: Path) -> DockerContainer:
        """Return a container of this one's files, with a network and the folder as `INPUTS`.

        No process of the agent lives in it.
        """
        image = f"{LABEL}:{self.name}"
        self.program.must("commit", self.name, image)
        self._image_to_remove = image
        bound = f"type=bind,source={tests.resolve()},target={INPUTS},readonly"
        self._tests = DockerContainer(self.program, image, "--user", "0", "--mount", bound)
        return self._tests

    def fits(self) -> bool:
        """Return True: the engine bounds no bytes, and says so before the first task."""
        return True

    def end_processes(self) -> None:
        """Kill all processes but the first one."""
        self.program(
            "exec", "--user", "0", self.name, "/bin/sh", "-c", "kill -9 -1", within_s=START_S
        )

    def remove(self) -> None:
        """Delete everything."""
        if self._tests:
            self._tests.remove()
        self.program("rm", "--force", "--volumes", self.name, within_s=START_S)
        if self._image_to_remove:
            self.program("rmi", "--force", self._image_to_remove, within_s=START_S)

    def _end_after_limit(self, result: Ran) -> Ran:
        """End what a command left, if a limit ended only its client."""
        if result.ended:
            self.end_processes()
        return result


def build_image(program: Program, task: HarborFolder) -> str:
    """Build a task's image, and return its name. Raises AgentR1Error if that fails."""
    context = str((task.folder / "environment").resolve())
    image = f"{LABEL}:{hashlib.sha256(context.encode()).hexdigest()[:16]}"
    program.must("build", "--quiet", "--tag", image, "--label", LABEL, "--", context,
                 within_s=task.build_s)  # fmt: skip
    return image
