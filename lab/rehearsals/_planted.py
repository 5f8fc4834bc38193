"""Run `agent-r1` with a fault in verl: `python -m lab.rehearsals._planted FAULT gpu-check ...`.

The launcher passes this module to verl (VERL_USE_EXTERNAL_MODULES), and each of verl's processes
imports it with the fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

NAME = "PLANTED_FAULT"
EXTENSIONS = {"engine": "broken", "deaf": "Deaf"}
"""Faults of vLLM's worker, which gets them as its extension: it does not start, or it accepts new
weights and keeps the old ones."""


def __getattr__(name: str) -> Any:
    """Make the extension when vLLM asks for it, as cpu.py does."""
    if name == "broken":
        raise RuntimeError("Failed to find C compiler")
    if name != "Deaf":
        raise AttributeError(name)
    from agent_r1.cluster.cpu import CpuWorkerExtension

    class Deaf(CpuWorkerExtension):
        def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
            runner, self.model_runner = (
                self.model_runner,
                SimpleNamespace(reload_weights=lambda **_: None),
            )
            try:
                super().update_weights_from_ipc(*args, **kwargs)
            finally:
                self.model_runner = runner

    return Deaf


def replace(module: ModuleType, name: str, fault: Callable[..., Any]) -> None:
    """Replace a function.

    Raise AttributeError if it has moved, so that no fault is planted where nothing looks.
    """
    getattr(module, name)
    setattr(module, name, fault)


def episodes() -> None:
    """Lose every episode."""
    from agent_r1.rollout import setup

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("rollout server failed")

    replace(setup, "make_loop", fail)


def gradient() -> None:
    """Make the loss NaN."""
    from agent_r1.training import losses

    real = losses.policy_loss

    def without_number(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = real(*args, **kwargs)
        return loss * float("nan"), metrics

    replace(losses, "policy_loss", without_number)


def shards() -> None:
    """Convert another model than the trained one."""
    import torch

    from agent_r1.model import policies

    real = policies.load_transformers

    def other(*args: Any, **kwargs: Any) -> Any:
        network = real(*args, **kwargs)
        with torch.no_grad():
            next(network.parameters()).mul_(1.5)
        return network

    replace(policies, "load_transformers", other)


PATCHES = {"episodes": episodes, "gradient": gradient, "shards": shards}


def main(fault: str, argv: list[str]) -> int:
    """Run the command with the fault in verl."""
    from agent_r1.app import cli
    from agent_r1.cluster import launch

    def environment(real: Callable[..., dict[str, str]], *args: Any) -> dict[str, str]:
        paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
        ours = {
            "VERL_USE_EXTERNAL_MODULES": "lab.rehearsals._planted",
            NAME: fault,
            "PYTHONPATH": ":".join(paths),
        }
        return real(*args) | ours

    def overrides(real: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        settings = real(*args)
        if fault in EXTENSIONS:
            vllm = settings["added"]["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
            vllm["worker_extension_cls"] = f"lab.rehearsals._planted.{EXTENSIONS[fault]}"
        return settings

    launch.driver_environment = partial(environment, launch.driver_environment)
    launch.overrides = partial(overrides, launch.overrides)
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
elif NAME in os.environ:
    import agent_r1.cluster.cpu  # noqa: F401

    PATCHES.get(os.environ[NAME], lambda: None)()
