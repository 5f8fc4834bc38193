"""Run verl's trainer in a Ray of its own, as the child process of `launch.py`.

    python -m agent_r1.cluster.driver VERL_CONFIG.yaml RAY_TEMP_DIR CPUS GPUS

All output of this process and its descendants goes to the run's log. A failure gives exit code 1,
with the cause as the last line of `verl/cause.txt`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray.exceptions import OutOfMemoryError, RayActorError

from agent_r1.cluster.watchdog import (
    LESS_MEMORY,
    PROGRESS_VARIABLE,
    RUN_VARIABLE,
    note_end,
)
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.machine import VLLM_ON_CUDA

PROCESS_LOSS = (
    "{} crashed or was killed, or its machine has left Ray (bring it back); if it was for want of "
    "memory, dmesg says so: " + LESS_MEMORY
)
EVERYWHERE = (
    "AGENT_R1_HOME",
    RUN_VARIABLE,
    PROGRESS_VARIABLE,
    "HF_HUB_OFFLINE",
    "VLLM_NO_USAGE_STATS",
    *VLLM_ON_CUDA,
    "VERL_USE_EXTERNAL_MODULES",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)
"""Our variables (launch.py) that a worker in a user's own Ray does not inherit."""


@ray.remote(num_cpus=1)
class AgentTaskRunner:
    """Replace the trainer in verl's TaskRunner by ours."""

    def run(self, config) -> None:
        import transfer_queue as tq
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ
        from verl.utils.logging_utils import configure_verl_logging

        from agent_r1.cluster.trainer import AgentR1Trainer

        configure_verl_logging()
        tq.init(config.transfer_queue)
        try:
            trainer = AgentR1Trainer(config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=None,  # our environment computes rewards, not verl
            )
            trainer.fit(manager)
        finally:
            note_end(Path(config.trainer.default_local_dir))  # before our own end ends others
            tq.close()


def check_cluster(config, cpus: int) -> None:
    """Check that the machines in Ray suffice; otherwise it would wait silently for more."""
    have = {name: int(ray.cluster_resources().get(name, 0)) for name in ("GPU", "CPU")}
    nodes = config.trainer.nnodes
    ranks = nodes * config.trainer.n_gpus_per_node
    if have["GPU"] < ranks or have["CPU"] < cpus:
        raise AgentR1Error(
            f"the Ray cluster at RAY_ADDRESS has {have['GPU']} GPUs and {have['CPU']} CPUs, and "
            f"the run needs {ranks} and {cpus}; add all {nodes} machines, each started with "
            f"--num-cpus={-(-cpus // nodes)} or more (a number for Ray, which may exceed the "
            "number of cores)",
            code="too_few_gpus",
        )


def one_line_cause(cause: BaseException) -> str:
    """Shorten what ended the run to a line for cause.txt, without Ray's long advice."""
    text = str(cause).strip()
    name = re.search(r"class_name: (?:\S*\.)?(\w+)", text)
    process = "a process of the run"
    if name:
        process += f" ({name[1]})"
    if isinstance(cause, OutOfMemoryError):
        return (
            f"AgentR1Error: the machine's memory was nearly full, so Ray ended {process}; "
            f"{LESS_MEMORY}"
        )
    # "creation task" errors tell what failed in __init__.
    if isinstance(cause, RayActorError) and "creation task" not in text:
        return f"AgentR1Error: {PROCESS_LOSS.format(process)}"
    return f"{type(cause).__name__}: {(text.splitlines() or [''])[-1]}"


def main(file: str, ray_folder: str, cpus: str, gpus: str) -> int:
    """Train and return the exit code: 0 when done, 1 with the cause in cause.txt."""
    # PR_SET_PDEATHSIG (1): if the launcher is killed, this process ends too.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    config = OmegaConf.load(file)
    config.transfer_queue.enable = True
    # The launcher, which has imported verl, wrote this: importing verl here takes longer than Ray's
    # start.
    runtime = json.loads(Path(file).with_name("runtime.json").read_text())
    unset = {name: value for name, value in runtime["env_vars"].items() if name not in os.environ}
    runtime["env_vars"] = unset | {"TRANSFER_QUEUE_ENABLE": "1"}
    several = config.trainer.nnodes > 1
    if several:
        runtime["env_vars"] |= {name: os.environ[name] for name in EVERYWHERE if name in os.environ}
    try:
        if several:  # the Ray of all machines, which knows their resources
            ray.init(address=os.environ["RAY_ADDRESS"], runtime_env=runtime)
            check_cluster(config, int(cpus))
        else:
            ray.init(
                address="local",  # never another Ray that is running here
                num_cpus=int(cpus),
                num_gpus=int(gpus) or None,
                include_dashboard=False,
                _temp_dir=ray_folder,
                runtime_env=runtime,
            )
        OmegaConf.resolve(config)
        runner = AgentTaskRunner.remote()
        ray.get(runner.run.remote(config))
    except Exception as error:
        cause = getattr(error, "cause", None) or error  # ray wraps what a remote method raised
        Path(file).with_name("cause.txt").write_text(one_line_cause(cause))
        raise
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
