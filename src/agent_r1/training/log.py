"""What a run writes down: `metrics.jsonl`, always, and Weights & Biases or TensorBoard, if asked.

In: one dict of numbers a step, from the loop, or from the file itself while verl's processes write it. Out:
`runs/<name>/metrics.jsonl`, which `inspect/report.py` draws and `--resume` cuts back to its checkpoint. `dashboard.py` shows
the same numbers to whoever watches.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.files import read_jsonl, write_whole
from agent_r1.ui import say

STEP = "training/global_step"
"""The key that numbers the lines of metrics.jsonl."""
VAL_EM = "val/em"
"""What `with_val_em` adds."""


def with_val_em(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`metrics`, and the validation's exact match under one name: verl's holds the name of the data set."""
    found = [value for key, value in metrics.items() if key.startswith("val-core/") and key.endswith("/acc/mean@1")]
    return dict(metrics) | ({VAL_EM: found[0]} if found else {})


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

    A line is whole when it ends in a newline. kill -9 or a full disk can leave half a line at the end, and only there;
    every method treats such a tail as never written.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Write one line and flush it to the operating system, where it survives our death (not the machine's).

        Numbers may be Python, NumPy or one-element tensors; NaN and infinity become null, since JSON has neither.
        Raises AgentR1Error when the disk is full or the file may not be written.
        """
        line = json.dumps({key: _plain(value) for key, value in metrics.items()}, allow_nan=False) + "\n"
        try:
            _cut_half_line(self.path)  # else our line would be glued to the half one, and both would be lost
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise AgentR1Error(
                f"cannot write {self.path} ({error.strerror}); make room or grant access, then go on with --resume"
            ) from None

    def read(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first; an empty list when there is no file."""
        return read_jsonl(self.path)

    def truncate_after(self, step: int) -> None:
        """Forget the lines of later steps, which a resumed run does again. Atomic: the old file or the new one."""
        kept = [line for line in self.read() if line.get(STEP, 0) <= step]
        if not self.path.exists():
            return
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    """A JSON value: strings, integers and None stay, everything else becomes a finite float or None."""
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


# ------------------------------------------------------------------------------------------- trackers, by choice


class Logger(Protocol):
    """A tracker beside metrics.jsonl."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Its public server, under the old name and the new one."""


class WandbLogger:
    """Weights & Biases: online where there is a key, otherwise offline, in the run directory.

    A resumed run keeps its id. An offline recording cannot be added to a run that was uploaded, it replaces it; so each one
    begins with the whole history, and the newest is all there is to upload. Online, what the server has is not sent again.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], history: Iterable[Mapping[str, Any]]):
        try:
            import wandb
        except ImportError:
            raise ConfigError("trainer.loggers names wandb, which is not installed; run `pip install wandb`") from None
        # wandb asks for a key at the terminal, and an unattended run would hang there: never let it come to that.
        mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        reason = "WANDB_MODE" if "WANDB_MODE" in os.environ else "no key in WANDB_API_KEY or ~/.netrc"
        settings = {"project": "agent-r1", "name": run_dir.name, "id": _wandb_id(run_dir), "dir": str(run_dir)}
        quiet = wandb.Settings(silent=True, console="off", init_timeout=30, login_timeout=1)
        settings |= {"config": config, "settings": quiet}
        self._run = None
        if mode == "online":
            try:
                self._run = wandb.init(**settings, mode=mode, resume="allow")
            except Exception as error:  # a wrong key or no network: no reason to lose a training run
                # Only the exception's name: its text may quote what it was given.
                mode, reason = "offline", f"the server cannot be used: {type(error).__name__}"
                wandb.teardown()  # its helper process still holds the id
        self._run = self._run or wandb.init(**settings, mode=mode)
        self._first = self._run.starting_step  # 0, or behind what the server has of a resumed run
        if mode == "offline":
            say(f"W&B: offline ({reason}); upload with `wandb sync {run_dir / 'wandb' / 'latest-run'}`")
        elif mode == "online":
            say(f"W&B: {self._run.url}")
        for metrics in history:
            self.log(metrics, metrics[STEP])

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step >= self._first:
            self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def has_wandb_key() -> bool:
    """In the environment, or in ~/.netrc, where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    base = os.environ.get("WANDB_BASE_URL")
    hosts = [urlsplit(base).netloc] if base else WANDB_HOSTS
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(host) for host in hosts)


def _wandb_id(run_dir: Path) -> str:
    """The same for every process of a run, and another for a new run of the same name."""
    path = run_dir / "wandb.id"
    if not path.exists():
        write_whole(path, secrets.token_hex(4))
    return path.read_text()


class TensorBoardLogger:
    """TensorBoard: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run_dir: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "trainer.loggers names tensorboard, which is not installed; run `pip install tensorboard`"
            ) from None
        self._make = lambda step: SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)
        self._writer = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        # Made at the first step, because only then we know where a resumed run sets in: what an earlier process
        # logged from there on is purged.
        self._writer = self._writer or self._make(step)
        for key, value in _numbers(metrics).items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def make_loggers(
    names: Iterable[str], run_dir: Path, config: dict[str, Any], history: Iterable[Mapping[str, Any]] = ()
) -> list[Logger]:
    """The trackers called `names` (wandb, tensorboard). Raises ConfigError for an unknown or uninstalled one."""
    loggers: list[Logger] = []
    for name in names:
        if name == "wandb":
            loggers.append(WandbLogger(run_dir, config, history))
        elif name == "tensorboard":
            loggers.append(TensorBoardLogger(run_dir))
        else:
            raise ConfigError(f"trainer.loggers: unknown logger {name!r}; choose from wandb, tensorboard")
    return loggers


@contextmanager
def trackers(
    names: Iterable[str], run_dir: Path, config: dict[str, Any], history: Iterable[Mapping[str, Any]]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that sends one line of metrics.jsonl to all trackers, for either engine. `history`: the lines so far."""
    loggers = make_loggers(names, run_dir, config, history)

    def track(metrics: Mapping[str, Any]) -> None:
        for logger in loggers:
            logger.log(metrics, metrics[STEP])

    try:
        yield track
    finally:
        for logger in loggers:
            logger.close()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    plain = {key: _plain(value) for key, value in metrics.items()}
    return {key: value for key, value in plain.items() if isinstance(value, int | float)}
