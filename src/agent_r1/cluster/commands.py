"""Define the command of the cluster: `agent-r1 gpu-check`."""

from __future__ import annotations

from argparse import Namespace

from agent_r1.app.cli import config_of
from agent_r1.app.parser import CONFIG_OPTIONS, command, flag
from agent_r1.ground.errors import extra


@command(
    "gpu-check", "rehearse a verl preset with a tiny model, in about ten minutes",
    ["grpo --preset hotpotqa-4xh100", "--preset small --engine verl --json"],
    *CONFIG_OPTIONS, flag("--json", "print the result as JSON in the last line (see docs/verl.md)"),
)  # fmt: skip
def gpu_check(a: Namespace) -> None:
    config = config_of(a)
    with extra("verl", "gpu-check"):
        from agent_r1.cluster.gpu_check import check_machine

    check_machine(config, a.json)
