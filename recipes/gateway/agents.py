"""Start the agent of an episode, and end it at its deadline.

In: an environment and a task. Out: how the agent ended, and what it reported. `worker.py` does the
forking, in a process of its own, so a blocking agent never stops the sampler.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, ConfigError

WORKER = Path(__file__).with_name("worker.py")
SECRETS = ("_API_KEY", "_BASE_URL")
"""Ends of names of variables that an agent does not get: a call to another model would not be
captured, and would cost money."""


@dataclass
class Ended:
    """How an episode's agent ended."""

    status: int
    """Its exit code; negative: the signal that ended it."""
    timed_out: bool
    last_line: str
    """Of its standard error."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """What it wrote to file descriptor 3."""


class Agents:
    """The worker of one agent. It outlives event loops, so that an agent is imported once."""

    def __init__(self, agent: str, python: str | None, visible_variables: list[str]):
        """Take an agent. It may see `visible_variables`, although they look like keys."""
        self.agent = agent
        self.visible_variables = visible_variables
        self.python = python or sys.executable
        self.number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._rest = b""
        self._start_futures: dict[int, asyncio.Future[int]] = {}
        self._end_futures: dict[int, asyncio.Future[int]] = {}

    # ------------------------------------------------------------------------------- the worker

    def start(self) -> None:
        """Start the worker, and wait until it has imported the agent.

        Raise ConfigError if it cannot.
        """
        if self._process is not None:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="agent-r1-agents-"))
        ours, theirs = socket.socketpair()
        with (self.folder / "worker").open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [self.python, str(WORKER), str(theirs.fileno()), self.agent],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    # A client that is made during the import must not reach another model.
                    env=agent_environment(self.visible_variables)
                    | {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C lets the step finish, agents included
                )
            except OSError as error:
                theirs.close()
                ours.close()
                raise ConfigError(
                    f"rollout.agent_python={self.python} does not start ({error.strerror}); give "
                    "the bin/python of the agent's environment",
                    code="agent_not_started",
                ) from None
        theirs.close()
        self._channel = ours
        first = ours.makefile("rb").readline()
        message = json.loads(first) if first else {"broken": self._log()}
        if "broken" in message:
            self.stop()
            raise ConfigError(
                f"the agent {self.agent} cannot be imported: {message['broken']}",
                code="agent_not_started",
            )
        ours.setblocking(False)

    def stop(self) -> None:
        """End the worker and its agents."""
        if self._process is None:
            return
        if self._channel is not None:
            self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()
        self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def channel(self) -> socket.socket:
        """Return the socket to the worker. Raise RuntimeError before `start`."""
        if self._channel is None:
            raise RuntimeError("the agents' worker was not started")
        return self._channel

    def listen(self) -> None:
        """Read the worker's messages in the running event loop."""
        self._sending = asyncio.Lock()
        asyncio.get_running_loop().add_reader(self.channel, self._receive)

    def unlisten(self) -> None:
        asyncio.get_running_loop().remove_reader(self.channel)

    def _receive(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            chunk = self.channel.recv(65536)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                waiting = self._end_futures if "status" in message else self._start_futures
                future = waiting.pop(message["number"], None)
                if future is not None and not future.done():
                    future.set_result(message.get("status", message.get("process")))
            if chunk:
                return
        error = AgentR1Error(f"the agents' worker ended: {self._log()}", code="agents_gone")
        for future in [*self._start_futures.values(), *self._end_futures.values()]:
            if not future.done():
                future.set_exception(error)
        self.unlisten()

    def _log(self) -> str:
        return last_line(self.folder / "worker") or "it printed nothing"

    # -------------------------------------------------------------------------------- an episode

    async def play(
        self, environment: dict[str, str], task: dict[str, Any], timeout_s: float
    ) -> Ended:
        """Run the agent to its end or deadline, then kill its process group.

        `environment` is added to the worker's.
        """
        self.number += 1
        number = self.number
        folder = self.folder / str(number)
        folder.mkdir()
        loop = asyncio.get_running_loop()
        self._start_futures[number] = loop.create_future()
        end_future = self._end_futures[number] = loop.create_future()
        start_future = self._start_futures[number]
        request = {
            "number": number,
            "folder": str(folder),
            "environment": environment,
            "task": task,
        }
        async with self._sending:
            await loop.sock_sendall(self.channel, json.dumps(request).encode() + b"\n")
        process = await start_future
        try:
            await asyncio.wait([end_future], timeout=timeout_s)
        finally:  # also if the run is interrupted
            timed_out = not end_future.done()
            if timed_out:
                with suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
        status = await end_future
        reports = read_reports(folder / "3")
        line = last_line(folder / "2")
        shutil.rmtree(folder, ignore_errors=True)
        return Ended(status, timed_out, line, reports)


@functools.cache
def agents_of(agent: str, python: str | None, visible_variables: tuple[str, ...]) -> Agents:
    """Return the worker of an agent. Training and validation share it."""
    agents = Agents(agent, python, list(visible_variables))
    atexit.register(agents.stop)
    return agents


def agent_environment(visible_variables: list[str]) -> dict[str, str]:
    """Return this process's environment without keys and addresses of other models."""
    environment: dict[str, str] = {}
    for name, value in os.environ.items():
        if name in visible_variables or not name.upper().endswith(SECRETS):
            environment[name] = value
    # A proxy of the machine would not find 127.0.0.1.
    return environment | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def read_reports(file: Path) -> list[dict[str, Any]]:
    """Read the JSON objects that an agent wrote, one per line; other lines are ignored."""
    reports: list[dict[str, Any]] = []
    if not file.exists():
        return reports
    with file.open("rb") as lines:
        for line in lines.read(1_000_000).splitlines():
            with suppress(ValueError, RecursionError):
                report = json.loads(line)
                if isinstance(report, dict):
                    reports.append(report)
    return reports


def last_line(file: Path) -> str:
    """Return the last line that is not blank, of at most 300 characters."""
    if not file.exists():
        return ""
    with file.open("rb") as text:
        size = text.seek(0, os.SEEK_END)
        text.seek(max(0, size - 4096))
        lines = text.read().decode("utf-8", "replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
