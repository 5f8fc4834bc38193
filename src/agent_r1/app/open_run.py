"""Train, evaluate and chat from Python, by the stages of the command line.

In: a preset and settings. Out: a `Run`; its methods call `app/stages.py` in this process.

    from agent_r1 import open_run

    run = open_run("discover", "grpo", seed=0)
    run.train()              # makes data, index and start model first, if they are missing
    print(run.evaluate())    # EM with its 95 % interval, and the number of questions
    run.chat()

A run is a name and a configuration. Everything else is on disk, where `agent-r1` finds it, too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.config import Config, load_config
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.event_loop import own_event_loop
from agent_r1.ground.machine import choose_waiting, raise_file_limit
from agent_r1.workspace import Workspace, run_name

# The stages are imported by the methods: they load PyTorch, which takes seconds.


@dataclass(frozen=True)
class Training:
    """What `Run.train` returns."""

    checkpoint: Path  # folder of the last step; `model/` in it is in Hugging Face's format
    metrics: list[dict[str, Any]]  # one entry per step, as in metrics.jsonl (docs/metrics.md)


@dataclass(frozen=True)
class Evaluation:
    """What `Run.evaluate` returns: the score of a model on the test questions, greedily decoded."""

    score: float  # mean score; with right or wrong answers the share of exact matches (EM)
    interval: tuple[float, float]  # 95 % interval over questions
    questions: int
    card: dict[str, Any]  # the whole eval card (docs/architecture.md)

    def __str__(self) -> str:
        from agent_r1.evaluation.evaluate import score_line

        return f"{score_line(self.card)}, {self.questions} questions"


@dataclass(frozen=True)
class Run:
    """A training run: a configuration and the name of a folder below `runs/`."""

    config: Config
    name: str
    resume: bool = False

    @property
    def workspace(self) -> Workspace:
        """The run's artefacts: rows, tools and the start model, after `prepare`."""
        return Workspace(self.config)

    def prepare(self) -> Workspace:
        """Make data, index and start model, unless they exist. Return the workspace.

        Prints one line with the seconds if anything was missing, and how far cloning is.
        """
        from agent_r1.app import stages

        with own_event_loop():
            stages.prepare(self.workspace)
        return self.workspace

    def train(self) -> Training:
        """Train, after `prepare`. A finished run is not trained again: its result is returned.

        Ctrl-C finishes and saves the step. Raises AgentR1Error for an unfinished run, unless it was
        opened with `resume=True`.
        """
        from agent_r1.app import stages

        with own_event_loop():
            stages.run_train(self.config, self.name, self.resume, plain=False)
        folder = stages.run_dir(self.config, self.name)
        checkpoint = folder.latest_checkpoint()
        assert checkpoint is not None  # run_train raises otherwise
        return Training(checkpoint, folder.metrics.read())

    def evaluate(self, before: bool = False) -> Evaluation:
        """Evaluate the trained model on the test questions; with `before`, the start model.

        The card is stored in the run's folder, and read from there the next time. Raises
        AgentR1Error unless the run is finished.
        """
        from agent_r1.app import stages

        with own_event_loop():
            if before:
                self.prepare()
            card = stages.evaluate_run(self.config, self.name, before)
        low, high = card["score_ci95"]
        return Evaluation(card["score"], (low, high), card["n"], card)

    def chat(self, question: str | None = None) -> None:
        """Talk to the trained agent in the terminal, or print its answer to `question`.

        Raises ConfigError without a terminal, such as in a notebook, unless there is a question.
        """
        if question is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise ConfigError(
                'chat() needs a terminal; pass a question, as in run.chat("..."), or use '
                f"`agent-r1 chat --run {self.name}`",
                code="no_terminal",
            )
        from agent_r1.inference.agent import find_model
        from agent_r1.inference.chat import run_chat

        model, config = find_model(self.name)
        with own_event_loop():
            run_chat(model, config, question=question)


def open_run(
    preset_or_path: str | Path,
    algorithm: str | None = None,
    seed: int = 0,
    run: str | None = None,
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Open a run, new or existing, of a preset or of a file with settings.

    Args:
        algorithm: grpo, ppo, ... (default: the preset's).
        run: Name of the folder in `runs/` (default: as on the command line, e.g. discover-grpo).
        resume: Whether `train` may continue an unfinished run.
        settings: Any other setting, by its dotted name: `open_run("discover", "grpo",
            **{"trainer.steps": 20, "actor.lr": 1e-4})`.

    Raises ConfigError for an unknown setting or value, and AgentR1Error if `run` was started with
    other settings.
    """
    overrides = []
    for key, value in settings.items():  # written as on the command line
        text = str(value) if isinstance(value, str | Path) else json.dumps(value)
        overrides.append(f"{key}={text}")
    config = load_config(str(preset_or_path), overrides, algorithm=algorithm, seed=seed)
    raise_file_limit()
    choose_waiting()
    opened_run = Run(config, run_name(config, run), resume)
    from agent_r1.training.run_dir import RunDir, check_same_settings

    check_same_settings(RunDir(opened_run.workspace.run(opened_run.name)), config, resume=resume)
    return opened_run
