"""What a run writes down: `metrics.jsonl`, always, and Weights & Biases or TensorBoard, if asked.

In: one dict of numbers a step, from the loop, or from the file itself while verl's processes write it. Out:
`runs/<name>/metrics.jsonl`, which `viewer/report.py` draws and `--resume` cuts back to its checkpoint. `dashboard.py` shows
the same numbers to whoever watches.
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

from agent_r1.config.settings import RolloutConfig
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.files import RESUME, json_line, read_jsonl, write_whole, writing
from agent_r1.ground.hardware import GIB
from agent_r1.ground.machine import available_memory
from agent_r1.ground.ui import say

STEP = "training/global_step"
"""The key that numbers the lines of metrics.jsonl."""
VAL_EM = "val/em"
"""What `with_val_em` adds."""
HOST_FREE = "perf/host_free_gib"
"""Memory of the machine that can still be used: what a leak in any of its processes takes away."""


def host_memory() -> dict[str, float]:
    """What this machine has left, for either engine; nothing where the system does not say."""
    free = available_memory()
    return {} if free is None else {HOST_FREE: free / GIB}


def process_memory() -> dict[str, float]:
    """The most memory that this process has taken so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"perf/memory_gb": most / (2**30 if sys.platform == "darwin" else 2**20)}


def with_val_em(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics`, and the validation's exact match under one name: verl's holds the name of the data set."""
    found = [value for key, value in metrics.items() if key.startswith("val-core/") and key.endswith("/acc/mean@1")]
    return dict(metrics) | ({VAL_EM: found[0]} if found else {})


def spent(
    lines: Iterable[Mapping[str, Any]], rollout: RolloutConfig, algorithm: str
) -> Iterator[tuple[dict[str, Any], int, float]]:
    """Each line of metrics.jsonl with the episodes and seconds that RL had taken when its step was over.

    Episodes are all that were sampled: to be learnt from, for a baseline (remax), or to be replaced (a refill); not those of
    validations. Seconds are those of the steps: without validations, and without anything before the first step.
    """
    episodes, seconds = 0, 0.0
    planned = rollout.prompts_per_step * rollout.samples_per_prompt
    for line in map(with_val_em, lines):
        episodes += int(line.get("rollout/episodes_played") or planned) + rollout.greedy_episodes(algorithm)
        seconds += line["timing_s/step"]
        yield line, episodes, seconds


def time_to(score: float, lines: Iterable[Mapping[str, Any]], rollout: RolloutConfig, algorithm: str) -> dict[str, Any]:
    """What was `spent` until greedy validation first reached `score`; None where it never did."""
    for line, episodes, seconds in spent(lines, rollout, algorithm):
        if (line.get(VAL_EM) or 0.0) >= score:
            return {"val": score, "step": line[STEP], "episodes": episodes, "seconds": round(seconds, 1)}
    return {"val": score, "step": None, "episodes": None, "seconds": None}


def step_times(metrics: Mapping[str, Any]) -> dict[str, float]:
    """`timing_s/step` in parts that add up to it, in seconds, in the order of the step.

    `timing_s/env` lies inside `timing_s/gen`. verl does not measure it, so there "rollout" holds both. "other" is what
    no part accounts for: records, and with verl the checkpoint and the weights' way to the sampler.
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
    """`metrics.jsonl`: one JSON object a line, one line a step.

    kill -9 or a full disk can leave half a line at the end, and only there. Readers leave it out, and a run that goes on
    begins with `truncate_after`, which removes it.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Write one line. Raises AgentR1Error when the disk is full or the file may not be written.

        Numbers may be Python, NumPy or one-element tensors; NaN and infinity become null, since JSON has neither.
        """
        with writing(self.path, RESUME), self.path.open("a", encoding="utf-8") as file:
            file.write(json_line(metrics))

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first; an empty list when there is no file."""
        return read_jsonl(self.path)

    def truncate_after(self, step: int) -> None:
        """Forget the lines of later steps, which a resumed run does again. Atomic: the old file or the new one."""
        if self.path.exists():
            kept = [line for line in self.read() if line.get(STEP, 0) <= step]
            write_whole(self.path, "".join(map(json_line, kept)))


# ------------------------------------------------------------------------------------------- trackers, by choice

Track = Callable[[Mapping[str, Any]], None]
"""Takes one line of metrics.jsonl."""


@contextmanager
def trackers(names: Iterable[str], run_dir: Path, config: dict[str, Any], first: int = 0) -> Iterator[Track]:
    """A function that sends one line of metrics.jsonl to all trackers, for either engine; of a resumed run, from the step
    `first` on.

    Raises ConfigError for one that is not installed.
    """
    with ExitStack() as stack:
        tracks = []
        for name in names:
            try:
                tracks.append(stack.enter_context(TRACKERS[name](run_dir, config, first)))
            except ImportError:
                raise ConfigError(
                    f"trainer.loggers names {name}, which is not installed; pip install 'agent-r1[{name}]'",
                    code="missing_extra",
                ) from None

        def track(metrics: Mapping[str, Any]) -> None:
            for each in tracks:
                each(metrics)

        yield track


@contextmanager
def _wandb(run_dir: Path, config: dict[str, Any], first: int) -> Iterator[Track]:
    """Weights & Biases. A resumed run keeps its id, by which W&B puts the recordings of an offline run together."""
    identity = run_dir / "wandb.id"  # the same for every process of a run, another for a new run of the same name
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
        yield lambda metrics: run.log(_numbers(metrics), step=metrics[STEP])
    finally:
        run.finish()


def _start_wandb(settings: dict[str, Any]) -> tuple[Any, str]:
    """wandb's run, and why it is offline, if it is: WANDB_MODE, no key, or a server that cannot be used."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=30)
    wandb.setup(quiet)
    mode, why = os.environ.get("WANDB_MODE", "online"), "WANDB_MODE"
    if mode == "online":
        try:
            # Without a key, wandb.init would ask for one at the terminal, and an unattended run would hang there.
            if wandb.login(prompt=False, verify=False):
                return wandb.init(**settings, settings=quiet, mode="online"), ""
            why = "no key in WANDB_API_KEY or ~/.netrc"
        except Exception as error:  # a wrong key or no network: no reason to lose a training run
            why = f"the server cannot be used: {type(error).__name__}"  # its text may quote the key
            wandb.teardown()  # its helper process still holds the id
        mode = "offline"
    return wandb.init(**settings, settings=quiet, mode=mode), why if mode == "offline" else ""


@contextmanager
def _tensorboard(run_dir: Path, config: dict[str, Any], first: int) -> Iterator[Track]:
    """TensorBoard: `tensorboard --logdir runs` shows all runs."""
    from torch.utils.tensorboard import SummaryWriter

    # What an earlier process logged of these steps is purged: this one does them again.
    with SummaryWriter(str(run_dir / "tensorboard"), purge_step=first) as writer:

        def track(metrics: Mapping[str, Any]) -> None:
            for key, value in _numbers(metrics).items():
                writer.add_scalar(key, value, metrics[STEP])

        yield track


TRACKERS = {"wandb": _wandb, "tensorboard": _tensorboard}
"""By their names in `trainer.loggers`."""


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}
