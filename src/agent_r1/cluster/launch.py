"""Run verl's trainer in a child process, watch it and clean up (`--engine verl`).

In: a configuration and a run directory. Out: the same files as the local loop's. The raw output of
Ray, vLLM and verl goes to `runs/<name>/logs/`. Next: `driver.py` is the child.

A run never hangs silently. The trainer reports its phase (`verl/phase.json`) and each worker its
progress (`verl/progress/`). The run ends seconds after a worker is gone, or when nothing moved for
`verl.stall_timeout_s` (`watchdog.py`). Its error has the phase, the log and the last good
checkpoint. In any case the processes, shared memory and temporary files of *this* run are removed.
A variable in their environment identifies them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import OmegaConf

from agent_r1.chat.tokenizer import load_chat
from agent_r1.cluster.checkpoints import finish, newest_shards
from agent_r1.cluster.compose import (
    Sources,
    attention_name,
    compose,
    overrides,
    ray_environment,
)
from agent_r1.cluster.watchdog import (
    ENDED,
    LESS_MEMORY,
    PROGRESS_VARIABLE,
    RUN_VARIABLE,
    Watchdog,
    living_workers,
    read_progress,
    run_processes,
    size_of,
)
from agent_r1.config import Config, keep_choices, shareable, tables
from agent_r1.data.storage import read_rows
from agent_r1.env import dialect_of
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error, ConfigError, StalledError, first_line
from agent_r1.ground.files import hold_lock, home, write_whole
from agent_r1.ground.machine import ALLOCATOR, VLLM_ON_CUDA, cores, flash_attn_error
from agent_r1.ground.ui import say
from agent_r1.model import files as model_files
from agent_r1.rollout.rollouts import prompts_of_step
from agent_r1.training.checkpoint import read_checkpoint
from agent_r1.training.run import graceful_interrupt
from agent_r1.training.run_dir import (
    RunDir,
    fingerprints_of_checkpoint,
    only_trainer,
    open_run,
)
from agent_r1.watch.dashboard import Dashboard
from agent_r1.watch.log import trackers
from agent_r1.workspace import Workspace

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that vLLM 0.27 has CPU kernels for.

Another width crashes the first batch, and not the start.
"""
POLL_S = 0.5
UNVERIFIED_NOTE = (
    "this step's checkpoint is UNVERIFIED: its model is further from the trained one than rounding "
    "explains (checkpoint/logprob_diff in metrics.jsonl); evaluate it before you rely on it"
)


def train_with_verl(
    run: RunDir, config: Config, start_model: Path, resume: bool, plain: bool
) -> Path:
    """Train to the end, with `resume` from the newest checkpoint; return the last one's folder."""
    device, _ = resolve_device(config.trainer.device, config.trainer.dtype)
    config = choose_attention(run, config, device)
    check_runnable(config, device, start_model)
    with only_trainer(run), only_one_here():
        open_run(run, config)
        shards = newest_shards(run)
        if shards:
            if not resume:
                raise AgentR1Error(
                    f"{shards} has an unfinished run; add --resume to continue it, or choose --run "
                    "NAME",
                    code="run_exists",
                )
            finish(run, config, start_model, shards)
        if run.is_finished(config.trainer.steps):
            return run.latest_checkpoint()
        latest = run.latest_checkpoint()
        step = 0
        state = None
        if latest:  # every file's hash is checked before verl unpickles any
            step, _ = read_checkpoint(latest, *fingerprints_of_checkpoint(run, config))
            state = latest / f"global_step_{step}"
        run.metrics.truncate_after(step)
        sources = prepare(run, config, start_model, state)
        verl_config = compose(overrides(config, sources, device))
        write_whole(sources.folder / "runtime.json", json.dumps(ray_environment(verl_config)))
        OmegaConf.save(verl_config, sources.folder / "config.yaml")
        count_from_first_start(sources.folder / "config.yaml")
        about = f"preset {config.preset} · {config.algorithm} · verl · {device}"
        with (
            trackers(
                config.trainer.loggers, run.path, shareable(config).model_dump(), step + 1
            ) as track,
            Dashboard(
                run.path.name,
                about,
                config.trainer.steps,
                history=run.metrics.read(),
                parts=dialect_of(config.env).parts,
                plain=plain,
            ) as dashboard,
        ):
            watch(run, config, device, dashboard, track)
    if not run.is_finished(config.trainer.steps):
        raise AgentR1Error(
            f"verl ended before step {config.trainer.steps}; {resume_hint(run)}", code="verl_failed"
        )
    return run.latest_checkpoint()


def count_from_first_start(file: Path) -> None:
    """Let trainer.max_hours count from the script's first start, also after a hang.

    The trainer counts from this file's time, and the script passes seconds of the epoch.
    """
    first_start = os.environ.get("AGENT_R1_FIRST_START", "")
    if first_start.isdecimal():
        os.utime(file, (int(first_start), int(first_start)))


def choose_attention(run: RunDir, config: Config, device: str) -> Config:
    """Resolve `verl.attention=auto`: as the run was started, or by what loads on this machine."""
    if old_config := run.stored_config():
        config = keep_choices(config, old_config)
    attention = config.verl.attention
    if attention == "auto" and device == "cuda":
        error = flash_attn_error()
        if error is None:
            attention = "flash_attention_2"
        else:
            attention = "varlen"
            say(
                f"verl.attention=varlen, because flash-attn does not load "
                f"({type(error).__name__}: {first_line(error)}); PyTorch's own kernel packs rows "
                "too"
            )
    verl = config.verl.model_copy(update={"attention": attention})
    return config.model_copy(update={"verl": verl})


def check_runnable(config: Config, device: str, model: Path) -> None:
    """Raise ConfigError for what this machine or this model cannot run."""
    v = config.verl
    if device == "cuda" and torch.cuda.device_count() < v.ranks // v.nodes:
        machines = f" on {v.nodes} machines" if v.nodes > 1 else ""
        raise ConfigError(
            f"verl.ranks={v.ranks} needs as many GPUs{machines}, and "
            f"{torch.cuda.device_count()} are here",
            code="too_few_gpus",
        )
    if v.nodes > 1 and "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            f"verl.nodes={v.nodes} needs a Ray cluster on all nodes; start one (docs/cloud.md) and "
            "set RAY_ADDRESS",
            code="missing_ray",
        )
    if device == "cpu" and v.tensor_parallel > 1:
        raise ConfigError("verl.tensor_parallel is for GPUs; on a CPU use 1", code="gpu_only")
    load_chat(model)  # raises for a missing template
    shape = model_files.read_config(model)
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    if device == "cpu" and width not in CPU_HEADS:
        raise ConfigError(
            f"vLLM on a CPU supports the head widths {CPU_HEADS}, and this model has {width}",
            code="unsupported_model",
        )


def prepare(run: RunDir, config: Config, model: Path, resume: Path | None) -> Sources:
    """Write what verl reads: questions, our environments' names, a clean `verl/` folder."""
    folder = Workspace(config).data
    sources = Sources(
        model, run.path / "verl" / "train.parquet", folder / "val.parquet", run.path, resume
    )
    shutil.rmtree(sources.folder, ignore_errors=True)
    (sources.folder / "progress").mkdir(parents=True)
    (run.path / "logs").mkdir(exist_ok=True)
    write_questions(folder / "train.parquet", config, sources.train)
    target = "agent_r1.cluster.agent_loop.AgentR1Loop"
    place = str(run.path.resolve())
    loops = [
        {"name": name, "_target_": target, "env_name": name, "run": place}
        for name in {*tables.names("env"), config.env.name}
    ]
    OmegaConf.save(OmegaConf.create(loops), sources.folder / "agent_loops.yaml")
    return sources


def write_questions(train: Path, config: Config, out: Path) -> None:
    """Write the questions of all steps in the local loop's order.

    For verl this is one epoch, read in order. So both engines see the same questions in each step,
    and no resumed run is at the end of an epoch.
    """
    questions = [
        row | {"extra_info": row["extra_info"] | {"index": i}}
        for i, row in enumerate(read_rows(train))
    ]
    rows = []
    for step in range(1, config.trainer.steps + 1):
        rows += prompts_of_step(questions, step, config.rollout.prompts_per_step, config.seed)
    pq.write_table(pa.Table.from_pylist(rows), out)


def only_one_here() -> AbstractContextManager[None]:
    """Allow one run per machine.

    verl names its weight-transfer sockets after Ray's job, and the first job of every Ray has the
    same name. Two runs would mix up their weights. AGENT_R1_VERL_WAIT_S waits so long for another
    run, as our tests do.
    """
    lock = Path(tempfile.gettempdir()) / f"agent-r1-verl-{os.getuid()}.lock"
    patience_s = float(os.environ.get("AGENT_R1_VERL_WAIT_S", 0))
    busy = "another run with --engine verl is on this machine; wait for it"
    return hold_lock(lock, busy, patience_s)


# ------------------------------------------------------------------------------------- the watchdog


def watch(
    run: RunDir, config: Config, device: str, dashboard: Dashboard, track: Callable[[dict], None]
) -> None:
    """Run the driver, and pass its metrics to the dashboard and the trackers.

    The trackers run in this process, so verl's processes get no keys. The first Ctrl-C (or SIGTERM)
    finishes and saves the step. The second, or one before the first step, ends the run at once.
    Raises AgentR1Error if the driver fails or stalls.
    """
    stop = run.path / "verl" / "stop"
    line_count = len(run.metrics.read())
    state = None
    note = ""
    running = True
    watchdog = Watchdog(config.verl.stall_timeout_s, time.monotonic())
    dashboard.note("starting Ray, FSDP and vLLM (a minute or two)")
    with graceful_interrupt() as interrupts, driver_process(run, config, device) as child:
        while running:
            # Before the files are read, so that the last line is not missed.
            running = child.process.poll() is None
            phase = read_phase(run)
            if interrupts and not stop.exists():
                if not (phase and phase["step"]):
                    raise KeyboardInterrupt
                stop.touch()
                dashboard.note(
                    "finishing this step, then saving; Ctrl-C again ends the run at once"
                )
            new_note = read_note(run, "note.txt")
            if new_note and new_note != note:
                dashboard.note(new_note)
            note = new_note
            new_state = (phase, run.metrics.path.exists() and run.metrics.path.stat().st_size)
            if new_state != state:
                state = new_state
                child.shared_files |= files_in_shared_memory(run_processes(child.mark))
                lines = run.metrics.read()
                for line in lines[line_count:]:
                    dashboard.step(line)
                    track(line)
                    if line.get("checkpoint/unverified"):
                        dashboard.note(UNVERIFIED_NOTE)
                line_count = len(lines)
            now = time.monotonic()
            # After the driver's own end only the note of the training's end tells deaths apart.
            if running or (run.path / "verl" / ENDED).exists():
                look_at_run(watchdog, now, run, child.mark, state)
            if running:
                refuse_dead_run(watchdog, now, run, phase)
                time.sleep(POLL_S)
    code = child.process.returncode
    if code:
        raise failure(run, phase, f"the driver ended with code {code}", watchdog)
    if stop.exists() and not run.is_finished(config.trainer.steps):
        at = run.latest_checkpoint().name
        raise KeyboardInterrupt(f"{stop.read_text()}stopped after {at}; continue with --resume")


def look_at_run(watchdog: Watchdog, now: float, run: RunDir, mark: str, state: Hashable) -> None:
    """Show the watchdog the workers, and all that moves while the run does."""
    folder = run.path / "verl"
    # A checkpoint grows in verl's folder, then in ours.
    sizes = (size_of(folder), size_of(run.checkpoints))
    progress = (state, read_progress(folder / "progress"), sizes)
    watchdog.look(now, living_workers(folder, mark), progress)


def refuse_dead_run(
    watchdog: Watchdog, now: float, run: RunDir, phase: dict[str, Any] | None
) -> None:
    """Raise AgentR1Error if a worker is gone, or if nothing has moved for too long."""
    if watchdog.has_lost_a_worker(now):
        raise failure(run, phase, f"if it was for want of memory, {LESS_MEMORY}", watchdog)
    if watchdog.is_stalled(now):
        raise StalledError(
            f"nothing has moved for {watchdog.stall_timeout_s:g} s (verl.stall_timeout_s), "
            f"{describe_phase(phase)}; {resume_hint(run)}",
            code="verl_stalled",
        )


@dataclass
class Child:
    """Hold the driver process, and what its descendants leave to remove."""

    process: subprocess.Popen
    mark: str
    scratch: Path
    shared_files: set[Path] = field(default_factory=set)
    """Files in /dev/shm that processes of this run had mapped."""


@contextmanager
def driver_process(run: RunDir, config: Config, device: str) -> Iterator[Child]:
    """Start the driver, and remove everything of it after the block."""
    mark = uuid.uuid4().hex
    # Not in the run's folder: Ray makes sockets there, whose paths may have at most 107 characters.
    scratch = Path(tempfile.mkdtemp(prefix="agent-r1-ray-"))
    # Access to a Ray permits to run code in it. By default Ray keeps one token in the user's home,
    # for all runs.
    token = scratch / "auth_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    gpus = config.verl.ranks if device == "cpu" else 0  # on a CPU they are nominal, not hardware
    command = [
        sys.executable,
        "-m",
        "agent_r1.cluster.driver",
        str(run.path / "verl" / "config.yaml"),
        str(scratch),
        str(ray_cpus(config)),
        str(gpus),
    ]
    with (run.path / "logs" / f"verl-{time.strftime('%Y%m%d-%H%M%S')}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=driver_environment(config, device, mark, scratch)
            | {PROGRESS_VARIABLE: str(run.path.resolve() / "verl" / "progress")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C reaches only this process, which ends the driver; its workers do not get it
            start_new_session=True,
        )
        child = Child(process, mark, scratch)
        try:
            yield child
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {resume_hint(run)}") from None
        finally:
            clean_up(child, run.path / "logs")


def ray_cpus(config: Config) -> int:
    """Return the CPUs to declare to Ray; for several machines, their sum.

    Ray waits silently if more are requested than declared. Threads are not bound to the number.
    Verl requests 3 per rank, 1 for `AgentTaskRunner`, 9 for the TransferQueue, and 1 per other
    actor at its start.
    """
    least = 3 * config.verl.ranks + 12 + config.verl.agent_workers
    if config.verl.nodes > 1:
        return least
    return max(cores(), least)


def driver_environment(config: Config, device: str, mark: str, scratch: Path) -> dict[str, str]:
    """Return the environment of the driver and its descendants.

    `scratch` is removed with the run.
    """
    ours = {
        RUN_VARIABLE: mark,
        "AGENT_R1_HOME": str(home().resolve()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # everything is in local folders
        "HF_DATASETS_CACHE": str(scratch / "datasets"),  # verl copies the questions there
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        # Ray 2.60 shows all GPUs to actors that asked for none; each might open a CUDA context.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    }
    hidden = {
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    }  # no worker needs one, and Ray shows its environment
    hidden |= {"RAY_TMPDIR"} | ALLOCATOR
    if (
        config.verl.nodes == 1
    ):  # otherwise it is the user's Ray, with its own address, token and network
        hidden |= {"RAY_ADDRESS", "RAY_AUTH_TOKEN"}
        ours |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(scratch / "auth_token"),
            # one machine: Ray, and with it vLLM, listens on 127.0.0.1 only
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
    if device == "cpu":
        hidden.add("CUDA_VISIBLE_DEVICES")
        ours |= {
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "agent_r1.cluster.cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered under this name only
            "TORCHDYNAMO_DISABLE": "1",  # compiling would cost more than a small model's whole run
            "OMP_NUM_THREADS": str(config.trainer.threads or cores()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    elif attention_name(config.verl.attention, device) != "flash_attention_2":
        ours["VERL_USE_EXTERNAL_MODULES"] = "agent_r1.cluster.no_flash_attn"
        ours["PYTHONPATH"] = hide_flash_attn(scratch)
    defaults = VLLM_ON_CUDA if device == "cuda" else {}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return defaults | inherited | ours


def hide_flash_attn(scratch: Path) -> str:
    """Hide a flash-attn that does not load from each process; return the new PYTHONPATH.

    verl, vLLM and transformers import it as soon as it is installed. They expect at most an
    ImportError, and verl does so before it imports our modules.
    """
    folder = scratch / "python"
    folder.mkdir(exist_ok=True)
    # Python imports a module of this name at its start. None in this table: "not installed".
    (folder / "sitecustomize.py").write_text('import sys\nsys.modules["flash_attn"] = None\n')
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def clean_up(child: Child, logs: Path) -> None:
    """End every process of the run, and remove its shared memory and temporary files."""
    child.shared_files |= files_in_shared_memory(
        run_processes(child.mark)
    )  # dead processes have nothing mapped
    child.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(10)
    while True:
        pids = run_processes(child.mark)
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    child.process.wait()
    for path in child.shared_files:
        path.unlink(missing_ok=True)
    for session in child.scratch.glob("session_*"):
        if not session.is_symlink():  # as session_latest is
            shutil.copytree(
                session / "logs", logs / "ray", dirs_exist_ok=True, ignore_dangling_symlinks=True
            )
    shutil.rmtree(child.scratch, ignore_errors=True)


def files_in_shared_memory(pids: list[int]) -> set[Path]:
    """List files in /dev/shm that these processes map, by inode, because semaphores get renamed."""
    inodes = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        inodes |= {
            int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if "/dev/shm/" in line
        }
    try:
        return {
            path for path in Path("/dev/shm").iterdir() if inodes and path.stat().st_ino in inodes
        }
    except OSError:  # a file vanished; the next call finds the others
        return set()


# ----------------------------------------------------------------------------------------- failures


def read_note(run: RunDir, file: str) -> str:
    """Read what a process of the run wrote to `verl/`, or nothing."""
    path = run.path / "verl" / file
    if not path.exists():
        return ""
    return path.read_text().strip()


def read_phase(run: RunDir) -> dict | None:
    """Read the phase that the trainer reported last."""
    return json.loads(read_note(run, "phase.json") or "null")


def describe_phase(phase: dict | None) -> str:
    if not phase:
        return "while Ray, FSDP and vLLM were starting"
    return f"in step {phase['step']}, {phase['phase']}"


def failure(run: RunDir, phase: dict | None, otherwise: str, watchdog: Watchdog) -> AgentR1Error:
    """Make the error with the best cause: the trainer's, else an episode's, else `otherwise`.

    A worker that was gone before is named with it.
    """
    prefix = "AgentR1Error: "
    lines = [read_note(run, "failure.txt"), read_note(run, "cause.txt")]
    ours = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    cause = next(filter(None, [*ours, *lines]), otherwise)
    if watchdog.gone:
        cause = f"{watchdog.describe_loss()} crashed or was killed: {cause}"
    return AgentR1Error(
        f"verl failed, {describe_phase(phase)}: {cause}; {resume_hint(run)}", code="verl_failed"
    )


def resume_hint(run: RunDir) -> str:
    """Return where the log is, and what to resume from."""
    logs = sorted((run.path / "logs").glob("verl-*.log"))
    latest = newest_shards(run) or run.latest_checkpoint()
    hint = "no checkpoint was saved yet"
    if latest:
        hint = f"continue from {latest.name} with --resume"
    log = logs[-1] if logs else run.path / "logs"
    return f"log: {log}; {hint}"
