"""Adapt verl to the program (`app/engine.py`): checks, plan and training of `--engine verl`.

Imported when a run names this engine. The modules that need verl, Ray and vLLM are imported inside
the methods, because a plan and doctor work without these packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.app.checks import Needs
from agent_r1.app.local_engine import LOCAL
from agent_r1.cluster import doctor, plan
from agent_r1.config import Config
from agent_r1.ground.errors import ConfigError, extra
from agent_r1.ground.preflight import Finding
from agent_r1.ground.shapes import check_context
from agent_r1.training import plan_local

# For the type checker only: doctor must run where a broken FAISS cannot be imported.
if TYPE_CHECKING:
    from agent_r1.training.run_dir import RunDir
    from agent_r1.workspace import Workspace


class VerlEngine:
    """verl on GPUs or, for tests and rehearsals, on a CPU."""

    checks = doctor.CHECKS

    def needs(self, config: Config) -> Needs:
        """Return bytes of memory and disk, and for GPUs the model's sizes."""
        if not config.verl.gpu:
            return LOCAL.needs(config)
        try:
            shape = plan_local.model_shape(config)
        except ConfigError as error:
            return LOCAL.needs(config)._replace(problem=_unknown_model(error))
        memory, folders = doctor.needs_of_gpus(config, shape)
        problem = None
        try:
            check_context(config.rollout.max_context, config.verl.tensor_parallel, shape)
        except ConfigError as error:
            # The shape stays: the other tests for GPUs still apply.
            problem = _unknown_model(error)
        return Needs(memory, folders, shape, problem)

    def plan(self, config: Config, gpu_hour: float | None) -> str:
        """Describe memory, disk, time and cost on GPUs."""
        if not config.verl.gpu:
            return LOCAL.plan(config, gpu_hour)
        return plan.gpu_plan(config, gpu_hour)

    def settings_page(self, paths: Workspace, run: RunDir) -> str:
        """Return verl's settings for this run. Raise AgentR1Error without verl."""
        with extra("verl", "a plan of verl's settings"):
            from agent_r1.cluster import compose

        return compose.page(paths.config, paths.start_model, paths.data, run.path)

    def check(self, config: Config) -> None:
        """Require verl, and memory to merge a checkpoint."""
        with extra("verl", "--engine verl"):
            from agent_r1.cluster.compose import require_verl

        require_verl()
        plan.check_conversion(config)

    def train(self, paths: Workspace, run: RunDir, model: Path, resume: bool, plain: bool) -> Path:
        """Train `model` in processes of verl."""
        from agent_r1.cluster import launch

        return launch.train_with_verl(run, paths.config, model, resume, plain)


def _unknown_model(error: ConfigError) -> Finding:
    return Finding("fail", str(error), "set model.path to a model that the plan knows")


VERL_ENGINE = VerlEngine()
