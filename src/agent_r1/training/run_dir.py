"""Find a run's files on disk, and refuse a run that other settings began.

In: the folder of a run. Out: its files, which `run.py` and the engines write. PyTorch is not
needed.

    runs/<name>/config.yaml            the resolved configuration
                metrics.jsonl          one line per step
                rollouts/*.jsonl       trajectories: ids, masks, log-probs, rewards, advantages
                checkpoints/step_*/    see checkpoint.py
                eval_before.json       the model that RL started from, on the test split
                eval.json              the trained one
                report.html
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.config import (
    Config,
    fingerprint,
    fingerprint_values,
    from_yaml,
    keep_choices,
    keep_spelling,
    plugins,
    to_yaml,
    user_code,
)
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import hold_lock, write_whole, writing
from agent_r1.ground.ui import say
from agent_r1.training.checkpoint import list_checkpoints
from agent_r1.watch.log import MetricsFile


@dataclass(frozen=True)
class RunDir:
    """Paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """The file with hashes of user-defined code at the start of the run, if any."""
        return self.path / "code.json"

    @property
    def card(self) -> Path:
        """The eval card of the trained model."""
        return self.path / "eval.json"

    @property
    def card_before(self) -> Path:
        """The eval card of the model that RL starts from."""
        return self.path / "eval_before.json"

    @property
    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    def latest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        return (list_checkpoints(self.checkpoints) or [None])[-1]

    def has_begun(self) -> bool:
        """Return whether anything has run here. A refused run may leave an empty folder."""
        return any(
            (self.path / name).exists()
            for name in ("metrics.jsonl", "checkpoints", "eval_before.json")
        )

    def stored_config(self) -> Config | None:
        """Return the configuration of a run that has begun, or None."""
        return from_yaml(self.config) if self.config.exists() and self.has_begun() else None

    def is_finished(self, steps: int) -> bool:
        """Return whether the last step has a checkpoint."""
        latest = self.latest_checkpoint()
        return latest is not None and latest.name == f"step_{steps:06d}"


def check_run(run: RunDir, config: Config, resume: bool) -> None:
    """Raise AgentR1Error if the run exists and this configuration cannot continue it."""
    check_same_settings(run, config, resume=resume)
    latest = run.latest_checkpoint()
    can_continue = latest is not None and not run.is_finished(config.trainer.steps)
    if latest and can_continue and not resume:
        with only_trainer(run):
            # raises if another process is training the run: --resume would be the wrong advice
            pass
        raise AgentR1Error(
            f"{run.path} has an unfinished run ({latest.name}); add --resume to continue it, or "
            "choose another name with --run NAME",
            code="run_exists",
        )
    if (
        can_continue
        and (threads := from_yaml(run.config).trainer.threads) != config.trainer.threads
    ):
        say(
            f"trainer.threads: {threads} there, {config.trainer.threads} now. Sums are rounded in "
            "another order, so the last bits of weights and metrics may differ from those of an "
            "uninterrupted run"
        )


def open_run(run: RunDir, config: Config) -> None:
    """Make the run's folder with its configuration, and the hashes of user-defined code.

    Call it with `only_trainer`. Raises AgentR1Error if another process has trained here meanwhile,
    with other settings.
    """
    check_same_settings(run, config, resume=True)  # `check_run` has asked for it where it matters
    if old_config := run.stored_config():
        # A script that is called again evaluates before training: a choice must survive that.
        config = keep_choices(config, old_config)
    with writing(run.path):
        (run.path / "rollouts").mkdir(parents=True, exist_ok=True)
        write_whole(run.config, to_yaml(config))
        if code := plugins.code_hashes(user_code(config)):
            write_whole(run.code, json.dumps(code, indent=2) + "\n")


ANOTHER_RUN = "choose another name with --run NAME, or delete the folder"
OWN_SETTINGS = "an evaluation takes the run's own settings, so leave this one out"


def check_same_settings(
    run: RunDir, config: Config, remedy: str = ANOTHER_RUN, resume: bool = False
) -> None:
    """Raise AgentR1Error if an existing run was started with settings that give other weights.

    Args:
        remedy: What to do about it. An evaluation trains nothing, so it never advises deletion.
        resume: Whether more steps may be added to the run.
    """
    old_config = run.stored_config()
    if old_config is None:
        return
    # `auto` takes what the run has chosen. A run that was only evaluated may still choose.
    config = keep_spelling(keep_choices(config, old_config), old_config)
    old_config = keep_choices(old_config, config)
    if fingerprint(old_config) != fingerprint(config):
        way = remedy
        if remedy == ANOTHER_RUN and _only_adds_steps(old_config, config):
            way = _way_to_more_steps(run, old_config, resume)
        if way:
            raise AgentR1Error(
                f"{run.path} was started with other settings "
                f"({_first_difference(old_config, config)}); {way}",
                code="other_settings",
            )
    changes = changed_code(run, config)
    if not changes:
        return
    cause = f"{', '.join(changes)} changed since {run.path} was started"
    is_evaluation = remedy == OWN_SETTINGS
    if is_evaluation and all(plugins.is_shipped(name) for name in user_code(config)):
        # A newer version of this project has other files. Its users did not change any.
        say(f"  {cause}; today's code evaluates it")
        return
    way = " to evaluate what was trained" if is_evaluation else f", {remedy}"
    raise AgentR1Error(f"{cause}; undo the change{way}", code="other_code")


def _only_adds_steps(old: Config, new: Config) -> bool:
    steps = new.trainer.steps
    longer = old.trainer.model_copy(update={"steps": steps})
    return steps > old.trainer.steps and fingerprint(
        old.model_copy(update={"trainer": longer})
    ) == fingerprint(new)


def _way_to_more_steps(run: RunDir, old: Config, resume: bool) -> str:
    """Say what is needed to add steps to a run; nothing is: empty.

    Only the learning rate depends on the number of steps. An unfinished run's checkpoints have the
    fingerprint of the old number, and nothing in its folder would keep that number.
    """
    if old.actor.lr_final != 1:
        return (
            f"with actor.lr_final={old.actor.lr_final:g} the learning rate falls over all "
            "steps, so those that are done would have had another one: only a run with "
            f"actor.lr_final=1 can be extended. Else {ANOTHER_RUN}"
        )
    if not run.is_finished(old.trainer.steps):
        return f"first finish it with --resume trainer.steps={old.trainer.steps}, or {ANOTHER_RUN}"
    return "" if resume else f"add --resume to add the steps, or {ANOTHER_RUN}"


def fingerprints_of_checkpoint(run: RunDir, config: Config) -> list[str]:
    """List the fingerprints that the newest checkpoint's configuration may have.

    A run that gets more steps begins from its last step, with the configuration that ended there.
    """
    fingerprints = [fingerprint(config)]
    latest = run.latest_checkpoint()
    if latest and config.actor.lr_final == 1:
        steps = int(latest.name.removeprefix("step_"))
        ended = config.trainer.model_copy(update={"steps": steps})
        fingerprints.append(fingerprint(config.model_copy(update={"trainer": ended})))
    return fingerprints


def changed_code(run: RunDir, config: Config) -> list[str]:
    """List the files of user-defined code that differ since the run's start."""
    then = bounds.read_json(run.code) if run.code.exists() else {}
    now = plugins.code_hashes(user_code(config))
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


def only_trainer(run: RunDir) -> AbstractContextManager[None]:
    """Lock the run against training by another process."""
    return hold_lock(
        run.path / ".lock",
        f"another process is training {run.path}; wait for it, or choose --run NAME",
    )


def _first_difference(old: Config, new: Config) -> str:
    """Describe the first setting that differs and matters: `actor.lr: 0.0003 there, 0.001 now`."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix[:-1]: value}
        settings: dict[str, Any] = {}
        for key, inner in value.items():
            settings |= flat(inner, f"{prefix}{key}.")
        return settings

    a = flat(fingerprint_values(old))
    b = flat(fingerprint_values(new))
    key = next(k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k))
    return f"{key}: {a.get(key)} there, {b.get(key)} now"
