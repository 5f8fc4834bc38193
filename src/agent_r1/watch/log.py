"""Write a run's metrics: `metrics.jsonl`, and optionally Weights & Biases or TensorBoard.

In: one dict of numbers per step, from the loop, or from the file itself while verl's processes
write it. Out: `runs/<name>/metrics.jsonl`. `watch/report.py` draws it, and `--resume` cuts it back
to the checkpoint. `dashboard.py` shows the same numbers live.
"""

from __future__ import annotations

import math
import os
import resource
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agent_r1.config import tables
from agent_r1.config.settings import RolloutConfig
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.files import RESUME, json_line, read_jsonl, write_whole, writing
from agent_r1.ground.machine import available_memory
from agent_r1.ground.ui import say
from agent_r1.ground.units import GIB

STEP_KEY = "training/global_step"
"""Key of the step's number in metrics.jsonl."""
VAL_EM = "val/em"
"""Key that `with_val_em` adds."""
AGENT_SCORE = 0.9
"""Greedy validation score from which a run counts as an agent."""
HOST_FREE = "perf/host_free_gib"
"""Free memory of the machine; a leak in any of its processes lowers it."""


def free_host_memory() -> dict[str, float]:
    """Return the machine's free memory; nothing if the system does not report it."""
    free = available_memory()
    return {} if free is None else {HOST_FREE: free / GIB}


def process_memory() -> dict[str, float]:
    """Return this process's peak memory, in GiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"perf/memory_gb": most / (2**30 if sys.platform == "darwin" else 2**20)}


def with_val_em(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Add the validation's exact match under one name; verl's name contains the data set."""
    for key, value in metrics.items():
        if key.startswith("val-core/") and key.endswith("/acc/mean@1"):
            return {**metrics, VAL_EM: value}
    return dict(metrics)


def validation_kinds(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the kinds of validation questions: kind -> key of its greedy score."""
    kinds = {}
    for key in metrics:
        if key.startswith("val-aux/") and key.endswith("/acc/mean@1"):
            kinds[key.split("/")[2]] = key
    return kinds


def with_totals(
    lines: Iterable[Mapping[str, Any]], rollout: RolloutConfig, algorithm: str
) -> Iterator[tuple[dict[str, Any], int, float]]:
    """Yield each line of metrics.jsonl with the episodes and seconds used so far.

    Episodes are all sampled ones (for learning, for remax's baseline, or replaced by a refill),
    without validation. Seconds are those of the steps, without validation and start-up.
    """
    episodes = 0
    seconds = 0.0
    episodes_of_a_step = rollout.prompts_per_step * rollout.samples_per_prompt
    for line in map(with_val_em, lines):
        episodes += int(line.get("rollout/episodes_played") or episodes_of_a_step)
        episodes += tables.greedy_episodes(algorithm, rollout.prompts_per_step)
        seconds += line["timing_s/step"]
        yield line, episodes, seconds


def time_to(
    score: float, lines: Iterable[Mapping[str, Any]], rollout: RolloutConfig, algorithm: str
) -> dict[str, Any]:
    """Return when greedy validation first reached `score`: step, episodes, seconds.

    None if it never did.
    """
    for line, episodes, seconds in with_totals(lines, rollout, algorithm):
        if (line.get(VAL_EM) or 0.0) >= score:
            return {
                "val": score,
                "step": line[STEP_KEY],
                "episodes": episodes,
                "seconds": round(seconds, 1),
            }
    return {"val": score, "step": None, "episodes": None, "seconds": None}


def first_agent_step(lines: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the first step whose greedy validation is an agent's, or None."""
    for line in map(with_val_em, lines):
        if (line.get(VAL_EM) or 0.0) >= AGENT_SCORE:
            return line[STEP_KEY]
    return None


def step_times(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Split `timing_s/step` into its parts, in seconds, in the order of the step.

    `timing_s/env` is a part of `timing_s/gen`. With verl it is not measured, and "rollout" includes
    it. The part "other" is the rest: records, and with verl the checkpoint and the transfer of
    weights to the sampler.
    """

    def seconds(*names: str) -> float:
        return sum(metrics.get(f"timing_s/{name}") or 0.0 for name in names)

    parts = {
        "rollout": seconds("gen") - seconds("env"),
        "environment": seconds("env"),
        "log-probs and values": seconds("old_log_prob", "ref", "values", "adv"),
        "critic": seconds("update_critic"),
        "actor": seconds("update_actor"),
    }
    return parts | {"other": seconds("step") - sum(parts.values())}


class MetricsFile:
    """`metrics.jsonl`: one line of JSON per step.

    kill -9 or a full disk can leave half a line, only at the end. Readers skip it, and
    `truncate_after` removes it when a run is resumed.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Write one line. Raise AgentR1Error if the disk is full or the file cannot be written.

        Numbers may be Python, NumPy or one-element tensors. NaN and infinity become null, since
        JSON has neither.
        """
        with writing(self.path, RESUME), self.path.open("a", encoding="utf-8") as file:
            file.write(json_line(metrics))

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines, oldest first; an empty list without a file."""
        return read_jsonl(self.path)

    def truncate_after(self, step: int) -> None:
        """Delete the lines of later steps, which a resumed run repeats. Atomic."""
        if self.path.exists():
            lines = [json_line(line) for line in self.read() if line.get(STEP_KEY, 0) <= step]
            write_whole(self.path, "".join(lines))


# ------------------------------------------------------------------------------ trackers, by choice

Track = Callable[[Mapping[str, Any]], None]
"""Logs one line of metrics.jsonl."""


@contextmanager
def trackers(
    names: Iterable[str], run_dir: Path, config: dict[str, Any], first: int = 0
) -> Iterator[Track]:
    """Yield a function that sends a line of metrics.jsonl to all trackers.

    A resumed run logs from step `first` on. Raises ConfigError for a tracker that is not installed.
    """
    with ExitStack() as stack:
        tracks = []
        for name in names:
            try:
                tracks.append(stack.enter_context(TRACKERS[name](run_dir, config, first)))
            except ImportError:
                raise ConfigError(
                    f"trainer.loggers names {name}, which is not installed; pip install "
                    f"'agent-r1[{name}]'",
                    code="missing_extra",
                ) from None

        def track(metrics: Mapping[str, Any]) -> None:
            for each in tracks:
                each(metrics)

        yield track


@contextmanager
def _wandb(run_dir: Path, config: dict[str, Any], first: int) -> Iterator[Track]:
    """Log to Weights & Biases.

    A resumed run keeps its id, by which W&B joins the parts of an offline run.
    """
    identity = (
        run_dir / "wandb.id"
    )  # shared by all processes of a run; a new run of the same name gets another
    if not identity.exists():
        write_whole(identity, secrets.token_hex(4))
    settings = {
        "project": "agent-r1",
        "name": run_dir.name,
        "id": identity.read_text(),
        "dir": str(run_dir),
        "resume": "allow",
    }
    run, offline = _start_wandb(settings | {"config": config})
    if offline:
        say(f"W&B: offline ({offline}); upload with `wandb sync {run_dir / 'wandb'}/offline-run-*`")
    elif not run.disabled:
        say(f"W&B: {run.url}")

    try:
        yield lambda metrics: run.log(_numbers(metrics), step=metrics[STEP_KEY])
    finally:
        run.finish()


def _start_wandb(settings: dict[str, Any]) -> tuple[Any, str]:
    """Start wandb's run.

    Return it and why it is offline: WANDB_MODE, no key, or an unusable server.
    """
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=30)
    wandb.setup(quiet)
    mode = os.environ.get("WANDB_MODE", "online")
    why = "WANDB_MODE"
    if mode == "online":
        try:
            # Without a key, wandb.init would prompt at the terminal, and an unattended run would
            # hang.
            if wandb.login(prompt=False, verify=False):
                return wandb.init(**settings, settings=quiet, mode="online"), ""
            why = "no key in WANDB_API_KEY or ~/.netrc"
        except Exception as error:  # a wrong key or no network must not end a training run
            why = f"the server cannot be used: {type(error).__name__}"  # its text may quote the key
            wandb.teardown()  # its helper process still uses the id
        mode = "offline"
    return wandb.init(**settings, settings=quiet, mode=mode), why if mode == "offline" else ""


@contextmanager
def _tensorboard(run_dir: Path, config: dict[str, Any], first: int) -> Iterator[Track]:
    """Log to TensorBoard: `tensorboard --logdir runs` shows all runs."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step removes an earlier process's log of the steps that this one repeats.
    with SummaryWriter(str(run_dir / "tensorboard"), purge_step=first) as writer:

        def track(metrics: Mapping[str, Any]) -> None:
            for key, value in _numbers(metrics).items():
                writer.add_scalar(key, value, metrics[STEP_KEY])

        yield track


TRACKERS = {"wandb": _wandb, "tensorboard": _tensorboard}
"""Trackers by their names in `trainer.loggers`."""


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
