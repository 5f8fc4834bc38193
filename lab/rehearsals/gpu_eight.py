"""Run presets of eight GPUs on eight gloo ranks; start Ray on two nodes.

Each such preset with grpo and ppo has three checks. They are its plan with verl's validation
(`train --dry-run`), the doctor on eight faked H100, and an update by verl's worker on eight ranks.
The rows, the limit of a pass and the configuration are a GPU run's, the model is narrow. Ray starts
with the lines of docs/cloud.md. Eight samplers of vLLM need more memory than such a machine has;
gpu_config.py runs the whole life of a preset on four ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.cluster.launch import driver_environment, ray_cpus
from agent_r1.config import Config, load_config, preset_names, to_yaml
from agent_r1.ground.shapes import MODELS, Shape
from lab.rehearsals._as_on_a_gpu import NEEDS
from lab.rehearsals.gpu_config import ROOT, agent, machine, processes

RANKS = 8
FULL = 0.9
"""Least share of trainer.max_tokens_per_microbatch that the largest pass must have."""
NARROW = {
    "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128,
    "vocab": 400,
}  # fmt: skip
CARD = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06, 9.0"
SMI = f"#!/bin/sh\nfor gpu in 1 2 3 4 5 6 7 8; do echo '{CARD}'; done\n"
PAGE = ROOT / "docs" / "cloud.md"
SECTION = "Two machines without a scheduler"
FIRST = "127.0.0.2"
SECOND = "127.0.0.3"
COUNT = (
    "import ray; ray.init(logging_level='ERROR', log_to_driver=False); "
    "import json; print(json.dumps(ray.cluster_resources()))"
)


def run() -> dict[str, Any]:
    """Return figures. Raises if a preset is refused, a pass is not full, or a node is missing."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="agent-r1-eight-") as folder:
        home = Path(folder)
        environment = machine(home)
        (home / "bin" / "nvidia-smi").write_text(SMI)
        for preset in eight_rank_presets():
            for algorithm in ("grpo", "ppo"):
                config = load_config(preset, algorithm=algorithm)
                plan = agent(environment, "train", algorithm, "--preset", preset, "--dry-run")
                if "DOES NOT FIT" in plan or "validated by verl" not in plan:
                    raise RuntimeError(f"{preset}, {algorithm}: the plan says {plan[-500:]}")
                agent(environment, "doctor", algorithm, "--preset", preset)
                figures[f"{preset} {algorithm}"] = update(config, home / preset / algorithm)
                print(f"  {preset} {algorithm}: {figures[f'{preset} {algorithm}']}", flush=True)
        figures["two nodes"] = two_nodes()
    return figures


def eight_rank_presets() -> list[str]:
    return [name for name in preset_names() if load_config(name).verl.ranks == RANKS]


def narrow_shape(config: Config) -> Shape:
    return dataclasses.replace(MODELS[config.model.path], **NARROW)


# ------------------------------------------------------------------------------------ eight ranks


def update(config: Config, folder: Path) -> str:
    """Update a narrow model on eight ranks; return the tokens of the ranks' largest passes."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    job = {"shape": dataclasses.asdict(narrow_shape(config)), "device": "cpu"}
    (folder / "job.json").write_text(json.dumps(job))
    environment = driver_environment(config, "cuda", "rehearsal", folder) | NEEDS
    paths = [str(ROOT / "src"), str(ROOT)]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "-m", "lab.rehearsals._eight_ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    if done.returncode:
        raise RuntimeError(f"eight ranks of {config.preset}: {errors or done.stderr[-500:]}")
    ranks = [json.loads(file.read_text()) for file in folder.glob("rank_*.json")]
    limit = config.trainer.max_tokens_per_microbatch
    passes = [rank["largest_pass"] for rank in ranks]
    if len(ranks) != RANKS or min(passes) < FULL * limit or max(passes) > limit:
        raise RuntimeError(f"{config.preset}: passes of {passes} tokens, the limit is {limit}")
    return f"largest passes {min(passes)} to {max(passes)} of {limit} tokens on {RANKS} ranks"


# -------------------------------------------------------------------------------------- two nodes


def page_blocks() -> list[str]:
    """Return the commands of cloud.md's section, a block for each place where they are typed."""
    section = PAGE.read_text().split(f"## {SECTION}\n")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


def start_lines(folder: Path) -> list[str]:
    """Return the page's lines that start Ray, for each of two nodes.

    Changed are addresses and folders. Added are eight GPUs, which Ray cannot count here, and
    for the second node an address of its own, because both are on one machine.
    """
    both, head, worker = page_blocks()[:3]
    programs = Path(sys.executable).parent
    changes = {
        "/shared/agent-r1": str(folder / "shared"),
        "FIRST": FIRST,
        ".venv-gpu/bin/": f"{programs}/",
        "ray start --head": f"ray start --head --num-gpus={RANKS}",
        "ray start --address": (
            f"ray start --node-ip-address={SECOND} --num-gpus={RANKS} --address"
        ),
    }
    lines = []
    for text in (both + head, both + worker):
        for old, new in changes.items():
            text = text.replace(old, new)
        lines.append(text)
    return lines


@contextlib.contextmanager
def page_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start Ray as the page says; yield the environment of the first node's shell."""
    mark = f"AGENT_R1_TWO_NODES={folder.name}"
    environment = os.environ | dict([mark.split("=")]) | {"WANDB_API_KEY": "secret"}
    environment.pop("RAY_ADDRESS", None)
    variables = environment
    try:
        for number, lines in enumerate(start_lines(folder)):
            # As a shell in which the user types them; Ray's files of each node are apart.
            script = f"set -e\nexport RAY_TMPDIR={folder}/ray{number}\n{lines}\nenv -0"
            (folder / f"ray{number}").mkdir()
            done = subprocess.run(
                ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"node {number}: {done.stderr[-500:]}")
            if number == 0:
                words = done.stdout.split("\0")[:-1]
                words[0] = words[0].rsplit("\n", 1)[-1]
                variables = dict(word.split("=", 1) for word in words)
        yield variables | {"RAY_ADDRESS": f"{FIRST}:6379"}
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def two_nodes() -> str:
    """Start the page's Ray; compare it with what 16 ranks need."""
    [command] = [line for line in page_blocks()[3].splitlines() if "speedrun" in line]
    words = command.split()
    settings = [word for word in words if "." in word and "=" in word]
    config = load_config(words[words.index("--preset") + 1], settings, algorithm="grpo")
    with (
        tempfile.TemporaryDirectory(prefix="r1-") as folder,  # sockets have short paths
        page_cluster(Path(folder)) as environment,
    ):
        listing = subprocess.run(
            [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True
        )
        if listing.returncode:
            raise RuntimeError(f"no Ray: {listing.stderr[-500:]}")
        have = json.loads(listing.stdout.splitlines()[-1])
        ours = set(processes(f"AGENT_R1_TWO_NODES={Path(folder).name}", "ray"))
        with_key = ours & set(processes("WANDB_API_KEY=secret", "ray"))
    need = ray_cpus(config)
    if have.get("GPU", 0) != config.verl.ranks or have["CPU"] < need or with_key:
        raise RuntimeError(f"Ray has {have}, the run needs {need} CPUs; with a key: {with_key}")
    return f"{have['GPU']:.0f} GPUs, {have['CPU']:.0f} CPUs for {need}"
