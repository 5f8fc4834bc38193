"""Lose one of two machines during a run, and resume (two Ray nodes, one box).

The preset is hotpotqa-4xh100 as in gpu_config, with one rank and one sampler on each node. The
nodes start as in docs/cloud/slurm.sh, with their own addresses, ports and temporary folders. They
need a token, because a Ray of several machines would otherwise answer anyone. All processes of the
second node are killed at once; the run must report it and end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.rehearsals._as_on_a_gpu import NEEDS
from lab.rehearsals.gpu_config import (
    ROOT,
    check_output,
    home_agent,
    machine,
    processes,
    small,
    sound,
    until_step_three,
)

RAY = Path(sys.executable).with_name("ray")
PORT = 6389
WORDS = [
    "--preset=hotpotqa-4xh100",
    "verl.nodes=2",
    "verl.ranks=2",
    "trainer.steps=4",
    "trainer.save_every=2",
    *("trainer.eval_every=0", "rollout.samples_per_prompt=2"),
]


class Node:
    """Run a machine of the cluster. A variable that its processes inherit identifies them."""

    def __init__(self, number: int, environment: dict[str, str], *argv: str):
        self.mark, self.folder = (
            f"AGENT_R1_NODE={number}",
            Path(tempfile.mkdtemp(prefix=f"r1-node-{number}-")),
        )
        self.address = f"127.0.0.{number + 1}"
        command = [
            RAY,
            "start",
            "--block",
            f"--node-ip-address={self.address}",
            "--num-gpus=1",
            "--num-cpus=12",
        ]
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--temp-dir={self.folder}", *argv], stdout=log, stderr=log,
                env=environment | NEEDS | dict([self.mark.split("=")]),
            )  # fmt: skip
        while "Ray runtime started" not in (self.folder / "log").read_text():
            if self.process.poll() is not None:
                raise RuntimeError(f"no Ray: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.5)

    def lose(self) -> None:
        """Kill everything, as a power failure would."""
        while pids := processes(self.mark):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def run() -> dict[str, Any]:
    """Return figures. Raises if the run does not end correctly, or does not continue."""
    with (
        tempfile.TemporaryDirectory(prefix="agent-r1-nodes-") as folder,
        contextlib.ExitStack() as stack,
    ):
        home = Path(folder)
        environment = machine(home) | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        }
        (home / "token").touch(mode=0o600)
        (home / "token").write_text(secrets.token_hex(32))
        words = [*WORDS, *small(home, environment)]
        for stage in ("data", "index"):
            check_output([home_agent(environment), stage, *words], environment)
        return lose_a_node(home, environment, words, stack)


def lose_a_node(
    home: Path, environment: dict[str, str], words: list[str], stack: contextlib.ExitStack
) -> dict[str, Any]:
    run = home / "runs" / "nodes"
    head = Node(1, environment, "--head", f"--port={PORT}", "--include-dashboard=false")
    stack.callback(head.lose)
    environment["RAY_ADDRESS"] = f"{head.address}:{PORT}"
    second = Node(2, environment, f"--address={environment['RAY_ADDRESS']}")
    stack.callback(second.lose)
    command = [home_agent(environment), "train", "grpo", "--run=nodes", "--plain", *words]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    until_step_three(run, process)
    until_checkpoint, began = time.monotonic() - began, time.monotonic()
    print(f"  checkpoint after {until_checkpoint:.0f} s; losing a machine", flush=True)
    there = [len(processes(node.mark, "WorkerDict")) for node in (head, second)]
    second.lose()
    last_line = (process.communicate(timeout=400)[1].strip().splitlines() or [""])[-1]
    until_end = time.monotonic() - began
    print(f"  {last_line}", flush=True)
    if process.returncode != 1 or "continue from step_000002 with --resume" not in last_line:
        raise RuntimeError(
            f"without its second machine: exit code {process.returncode}, {last_line}"
        )
    survivors = [pid for name in ("WorkerDict", "vllm") for pid in processes(head.mark, name)]
    if there != [1, 1] or survivors:
        raise RuntimeError(f"ranks on the machines: {there}; still there: {survivors}")
    second = Node(2, environment, f"--address={environment['RAY_ADDRESS']}")
    stack.callback(second.lose)
    check_output([*command, "--resume"], environment)
    lines = sound(run, steps=4)
    time.sleep(5)
    if survivors := [
        pid
        for node in (head, second)
        for name in ("WorkerDict", "vllm")
        for pid in processes(node.mark, name)
    ]:
        raise RuntimeError(f"a run that is done has left processes on the machines: {survivors}")
    return {
        "ranks_of_each": there,
        "s_to_checkpoint": round(until_checkpoint),
        "s_from_loss_to_end": round(until_end),
        "probs_diff_mean": round(
            max(line["training/rollout_probs_diff_mean"] for line in lines), 5
        ),
    }
