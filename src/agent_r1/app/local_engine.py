"""Adapt the local loop to the program: one process, a CPU or one GPU (`training/run.py`)."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.app.checks import CheckRow, Needs
from agent_r1.config import Config
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.files import home
from agent_r1.ground.units import GIB
from agent_r1.training import plan_local

# For the type checker only: doctor must run where a broken FAISS cannot be imported.
if TYPE_CHECKING:
    from agent_r1.training.run_dir import RunDir
    from agent_r1.workspace import Workspace

SMALLEST = 2 * GIB
"""Bytes of memory, and of disk, that every run needs."""


class LocalEngine:
    """The local loop, which needs nothing beyond the core's own packages."""

    checks: tuple[CheckRow, ...] = ()

    def needs(self, config: Config) -> Needs:
        """Return bytes of memory, and of disk in each folder."""
        memory = 0.0
        disk = 0.0
        with suppress(ConfigError):  # the model is not downloaded yet
            shape = plan_local.model_shape(config)
            memory = sum(plan_local.local_memory(config, shape).values())
            disk = plan_local.local_disk(config, shape)
        folders = {
            home() / "artifacts": SMALLEST + disk,
            home() / "runs": 0,
            Path(tempfile.gettempdir()): 0,
        }
        return Needs(max(SMALLEST, memory), folders)

    def plan(self, config: Config, gpu_hour: float | None) -> str:
        """Describe memory, disk and time on this machine."""
        return plan_local.local_plan(config)

    def settings_page(self, paths: Workspace, run: RunDir) -> str:
        """Return "": all settings of this engine are the project's own."""
        return ""

    def check(self, config: Config) -> None:
        """Raise ConfigError for an environment with pictures: the decoder reads tokens only."""
        from agent_r1.env import environment

        if getattr(environment(config.env.name), "shows_pictures", False):
            raise ConfigError(
                f"env.name={config.env.name} shows pictures, which the local loop cannot read; "
                "train with --engine verl and a model of Qwen2.5-VL's form (recipes/pictures)",
                code="pictures_not_read",
            )

    def train(self, paths: Workspace, run: RunDir, model: Path, resume: bool, plain: bool) -> Path:
        """Train `model`; a run with checkpoints continues."""
        from agent_r1.training.run import run_training

        return run_training(
            run,
            paths.config,
            model,
            paths.load_tools(),
            questions=paths.load_rows("train"),
            val_rows=paths.load_rows("val"),
            plain=plain,
        )


LOCAL = LocalEngine()
