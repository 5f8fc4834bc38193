"""Run agents: import one once and fork it for each episode, or start its command.

In: requests on a socket, a JSON line each: the episode's number, folder, environment and task. Out:
the process ids and, later, the exit codes. `agents.py` is at the other end.

This file runs under the agent's own Python (`rollout.agent_python`), which may lack all of our
packages, so it imports only the standard library.

A fork has the modules that the agent imported, and nothing of other episodes. `import openai` costs
half a second of CPU and the first client another half; a fork costs milliseconds.

An episode has files with the numbers of its descriptors. 0 has the task, and the last line of 2 is
shown if the agent fails. 3 is read at its end: {"answer": ...} or {"reward": ...}, one JSON line
each. What it prints (1) is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import select
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any


def main() -> None:
    """Serve the socket whose number is argv[1] for the agent argv[2]. End with the socket."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    agent = sys.argv[2]
    del sys.path[0]  # this folder: the agent must not import our modules by accident
    function: Callable[[Any], Any] | None = None
    if is_function(agent):
        try:
            function = load(agent)
        except BaseException as error:  # also sys.exit in the file
            traceback.print_exc()
            tell(channel, broken=f"{type(error).__name__}: {error}")
            return
    tell(channel, ready=True)
    # A signal of an ended child makes the pipe readable, so one `select` waits for both.
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    numbers: dict[int, int] = {}  # process -> episode
    lines = b""
    while True:
        ready, _, _ = select.select([channel, reader], [], [])
        if reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 65536)
            reap(channel, numbers)
        if channel in ready:
            chunk = channel.recv(65536)
            if not chunk:  # training ended, perhaps by SIGKILL
                for process in numbers:
                    kill_group(process)
                return
            *complete, lines = (lines + chunk).split(b"\n")
            for line in complete:
                request = json.loads(line)
                process = os.fork()
                if process == 0:
                    play(request, agent, function)
                numbers[process] = request["number"]
                tell(channel, number=request["number"], process=process)


def tell(channel: socket.socket, **message: Any) -> None:
    """Send one line."""
    channel.sendall(json.dumps(message).encode() + b"\n")


def reap(channel: socket.socket, numbers: dict[int, int]) -> None:
    """Report the children that ended, and end what they left running."""
    while numbers:
        # Without WNOWAIT the number could belong to a stranger before its group is ended.
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if child is None:
            return
        process = child.si_pid
        kill_group(process)
        os.waitpid(process, 0)
        code = child.si_status if child.si_code == os.CLD_EXITED else -child.si_status
        if process in numbers:
            tell(channel, number=numbers.pop(process), status=code)


def kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def play(request: dict[str, Any], agent: str, function: Callable[[Any], Any] | None) -> None:
    """Be the agent of one episode; never return."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder = request["folder"]
        task = request["task"]
        with open(f"{folder}/0", "w") as file:
            file.write(json.dumps(task) + "\n")
        files = [
            os.open(f"{folder}/0", os.O_RDONLY),
            os.open(os.devnull, os.O_WRONLY),
            os.open(f"{folder}/2", os.O_WRONLY | os.O_CREAT, 0o600),
            os.open(f"{folder}/3", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        ]
        copies = [os.dup(os.dup(os.dup(os.dup(file)))) for file in files]  # all above 3
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        os.closerange(4, 1024)  # the socket and the pipes of the worker
        os.environ.update(request["environment"])
        if function is None:
            # Split first, fill in then: a question with blanks or quotes stays one argument.
            words = [w.replace("{question}", task["question"]) for w in shlex.split(agent)]
            os.execvp(words[0], words)
        answer = function(task)
        if inspect.isawaitable(answer):
            answer = asyncio.run(wait_for(answer))
        if answer is not None:
            os.write(3, json.dumps({"answer": str(answer)}).encode() + b"\n")
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


async def wait_for(answer: Awaitable[Any]) -> Any:
    return await answer


def is_function(agent: str) -> bool:
    """Return whether `agent` is FILE.py:FUNCTION or MODULE:FUNCTION; otherwise it is a command."""
    place, colon, name = agent.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or " " not in place)


def load(agent: str) -> Callable[[Any], Any]:
    """Import the function, and whatever its first call would import in each episode."""
    place, _, name = agent.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    if "openai" in sys.modules:
        # Its first client imports its resources, for .8 s of CPU. Once here, not in each fork.
        client = sys.modules["openai"].OpenAI(
            api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0
        )
        with contextlib.suppress(Exception):  # nothing listens there
            client.chat.completions.create(model="none", messages=[])
    return getattr(module, name)


if __name__ == "__main__":
    main()
