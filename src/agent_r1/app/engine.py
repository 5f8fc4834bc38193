"""Define what the stages, the plan and doctor ask of a training engine.

In: a configuration. Out: its engine, by the table `[engine]`: the local loop (`local_engine.py`) or
verl (`cluster/engine.py`). Nothing of an engine that a run does not name is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from agent_r1.app.checks import CheckRow, Needs
from agent_r1.config import Config, tables

# For the type checker only: doctor must run where a broken FAISS cannot be imported.
if TYPE_CHECKING:
    from agent_r1.training.run_dir import RunDir
    from agent_r1.workspace import Workspace


class Engine(Protocol):
    """A training engine, as the program sees it."""

    checks: Sequence[CheckRow]
    """Rows of doctor for this engine, after those of every run."""

    def needs(self, config: Config) -> Needs:
        """Return what a run needs of a machine. Never raises."""
        ...

    def plan(self, config: Config, gpu_hour: float | None) -> str:
        """Describe memory, disk, time and cost. Raise ConfigError for a model of unknown size.

        Args:
            gpu_hour: Price of one GPU for one hour.
        """
        ...

    def settings_page(self, paths: Workspace, run: RunDir) -> str:
        """Return the engine's own settings of this run; "" if it has none."""
        ...

    def check(self, config: Config) -> None:
        """Raise AgentR1Error if packages or memory that the engine requires are missing."""
        ...

    def train(self, paths: Workspace, run: RunDir, model: Path, resume: bool, plain: bool) -> Path:
        """Train `model`, and return the last checkpoint."""
        ...


def engine_of(config: Config) -> Engine:
    """Return the engine that `config.engine` names."""
    return cast(Engine, tables.resolve("engine", config.engine, "engine"))
