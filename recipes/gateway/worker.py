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
import ctypes
import gc
import http.server
import importlib
import importlib.util
import inspect
import json
import os
import select
import shlex
import signal
import socket
import ssl
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

EPISODE = "AGENT_R1_EPISODE"
"""Variable with an episode's number, by which its processes are found."""


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
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    adopt_orphans()
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
                kill_orphans(0, [])
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
            number = numbers.pop(process)
            kill_orphans(number, list(numbers))
            tell(channel, number=number, status=code)


def kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes whose agent has ended. They may have sessions of their own.

    Linux only; elsewhere such a process lives on.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(number: int, agents: list[int]) -> None:
    """End what episode `number` left in other sessions. `agents` are still running.

    An orphan belongs to the episode whose variable it has. One that never called `exec` shows the
    variables of this process, and is ended when no agent is left.
    """
    mark = f"{EPISODE}={number}".encode()
    with contextlib.suppress(OSError):
        while True:
            orphans: list[int] = []
            for process in children():
                if process not in agents and (not agents or mark in variables_of(process)):
                    orphans.append(process)
            if not orphans:
                return
            for process in orphans:  # their children come here next
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def variables_of(process: int) -> list[bytes]:
    """Return the variables that a process began with; none if it has ended."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


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
        os.environ[EPISODE] = str(request["number"])
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
    warm_up()
    return getattr(module, name)


# --------------------------------------------------------------------------------------- warming up

CANNED_CALL = {"id": "c", "type": "function", "function": {"name": "none", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "none", "parameters": {"type": "object"}}}
QUESTION: dict[str, Any] = {"model": "none", "messages": [{"role": "user", "content": "?"}]}
QUESTION["tools"] = [TOOL]


class Canned(http.server.BaseHTTPRequestHandler):
    """Answer every request with the same turn, which clients then know how to read."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        streams = body.get("stream") is True
        turn = {"role": "assistant", "content": "!", "tool_calls": [{"index": 0} | CANNED_CALL]}
        answer: dict[str, Any] = {"id": "a", "created": 0, "model": "none"}
        answer["object"] = "chat.completion.chunk" if streams else "chat.completion"
        answer["choices"] = [
            {"index": 0, "finish_reason": "tool_calls", "delta" if streams else "message": turn}
        ]
        answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = json.dumps(answer)
        if streams:
            text = f"data: {text}\n\ndata: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streams else "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def warm_up() -> None:
    """Let client libraries build what their first call in each fork would build again.

    For `openai` that is 55 of 70 ms of CPU: classes of its answers, and a client's certificates.
    The agent's own function is not called: each episode must begin with fresh state.
    """
    arguments_of_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    make = ssl.create_default_context

    def record_context(*words: Any, **options: Any) -> ssl.SSLContext:
        arguments_of_calls.append((words, options))
        return make(*words, **options)

    ssl.create_default_context = record_context
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        for module, ask in ASK.items():
            if module in sys.modules:
                with contextlib.suppress(Exception):  # of another version: the forks do it then
                    ask(sys.modules[module], address)
    finally:
        server.shutdown()
        thread.join()  # a fork while another thread runs may inherit a lock that nothing frees
        server.server_close()
        ssl.create_default_context = make
    give_contexts(arguments_of_calls)


def give_contexts(arguments_of_calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Make the TLS contexts of the warm-up again, and hand each out once per fork.

    Reading all certificates takes 20 ms, for a client that then speaks plain HTTP to 127.0.0.1.
    """
    make = ssl.create_default_context
    variables = [os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
    stock = [(request, make(*request[0], **request[1])) for request in arguments_of_calls]

    def reuse_context(*words: Any, **options: Any) -> ssl.SSLContext:
        same = [os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")] == variables
        for number, (request, context) in enumerate(stock):
            if same and request == (words, options):
                del stock[number]
                return context
        return make(*words, **options)

    ssl.create_default_context = reuse_context


def ask_openai(openai: Any, address: str) -> None:
    """Ask with both clients, streaming and not."""
    with openai.OpenAI(api_key="none", base_url=address, max_retries=0) as client:
        client.chat.completions.create(**QUESTION)
        list(client.chat.completions.create(**QUESTION, stream=True))

    async def ask() -> None:
        async with openai.AsyncOpenAI(api_key="none", base_url=address, max_retries=0) as client:
            await client.chat.completions.create(**QUESTION)

    asyncio.run(ask())


def ask_urllib(urllib: Any, address: str) -> None:
    """Ask with the standard library, which then keeps its opener."""
    with urllib.urlopen(address, json.dumps(QUESTION).encode()) as reply:
        reply.read()


def ask_langchain(langchain: Any, address: str) -> None:
    """Ask with LangChain's model, which imports more at its first call."""
    model = langchain.ChatOpenAI(model="none", api_key="none", base_url=address, max_retries=0)
    model.bind_tools([TOOL]).invoke("?")


ASK: dict[str, Callable[[Any, str], None]] = {
    "openai": ask_openai,
    "langchain_openai": ask_langchain,
    "urllib.request": ask_urllib,
}
"""Module that an agent imported -> how to ask with it."""


if __name__ == "__main__":
    main()
