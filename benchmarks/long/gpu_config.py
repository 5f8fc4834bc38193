"""The GPU's own configuration on four gloo ranks: grpo and ppo, packed rows, checkpoint, kill, resume, eval, export.

Preset hotpotqa-4xh100 as `_as_on_a_gpu.py` gives it to verl: four ranks and four samplers, bf16, dynamic batches, rows
without padding, the environment of a GPU run. Scaled down are the model, the batch and the context.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from agent_r1.config import load_config
from agent_r1.stages import Places

ROOT = Path(__file__).parents[2]
TINY = [
    *("--preset=hotpotqa-tiny", "data.train=200", "data.val=8", "data.test=16", "data.cold=400", "trainer.threads=2"),
    *("cold_start.copy_steps=60", "cold_start.mix_steps=40"),
]
SMALL = [
    *("--preset=hotpotqa-4xh100", "data.train=200", "data.val=8", "data.test=16", "data.corpus=contexts"),
    *("search.encoder=ngram", "search.top_k=2", "rollout.max_context=512", "rollout.max_tokens_per_turn=48"),
    *("rollout.prompts_per_step=8", "rollout.slots=32", "trainer.micro_tokens=1024", "trainer.loggers=[]"),
    *("verl.agent_workers=2", "verl.patience_s=900", "env.episode_timeout_s=240"),
]


def run() -> dict[str, Any]:
    """Figures of both runs. Raises when a step, a checkpoint, the kill or the resume is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-gpu-") as folder:
        home = Path(folder)
        environment = os.environ | {
            "AGENT_R1_HOME": str(home),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        environment.pop("OMP_NUM_THREADS", None)  # a GPU run has none
        subprocess.run([sys.executable, ROOT / "tests/hotpotqa_tiny/make.py", home / "files"], check=True)
        source = f"data.source={home / 'files'}"
        for stage in ("data", "index", "cold-start"):
            agent(environment, stage, *TINY, source)
        os.environ["AGENT_R1_HOME"] = str(home)
        start = Places.of(load_config("hotpotqa-tiny", [*TINY[1:], source])).start_model
        common = [*SMALL, source, f"model.path={start}"]
        for stage in ("data", "index"):
            agent(environment, stage, *common)
        figures = grpo(home, environment, common)
        return figures | ppo(home, environment, common)


def grpo(home: Path, environment: dict[str, str], common: list[str]) -> dict[str, Any]:
    """Four steps with a checkpoint at the second; a rank is killed in the third; `--resume` goes on."""
    run = home / "runs" / "gpu-grpo"
    argv = ["train", "grpo", *common, "--run=gpu-grpo", "--plain", "trainer.steps=4", "trainer.save_every=2"]
    argv += ["trainer.eval_every=2", "trainer.rollouts_every=2"]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.long._as_on_a_gpu", *argv], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (run / "checkpoints/step_000002").exists() and process.poll() is None:
        time.sleep(0.5)
    until_checkpoint = time.monotonic() - began
    print(f"  grpo: checkpoint after {until_checkpoint:.0f} s; killing a rank", flush=True)
    for pid in processes("WorkerDict")[:1]:
        os.kill(pid, signal.SIGKILL)
    said = process.communicate(timeout=300)[1].strip().splitlines()[-1:]
    if process.returncode != 1 or "continue from step_000002" not in "".join(said):
        raise RuntimeError(f"after the kill: exit code {process.returncode}, {said}")
    as_on_a_gpu(environment, *argv, "--resume")
    lines = sound(run, steps=4)
    composed = yaml.safe_load((run / "verl/config.yaml").read_text())
    actor = composed["actor_rollout_ref"]
    wanted = {
        "packed rows": actor["model"]["use_remove_padding"],
        "flash-attn": actor["model"]["override_config"]["attn_implementation"] == "flash_attention_2",
        "dynamic batches": actor["actor"]["use_dynamic_bsz"],
        "four ranks": composed["trainer"]["n_gpus_per_node"] == 4,
        "bf16": actor["actor"]["fsdp_config"]["dtype"] == "bfloat16",
    }
    if not all(wanted.values()):
        raise RuntimeError(f"this was not the configuration of a GPU run: {wanted}")
    agent(environment, "eval", *common, "--model", str(run / "checkpoints/step_000004/model"), "trainer.device=cpu")
    agent(environment, "export", "--run", "gpu-grpo", "--out", str(home / "exported"))
    return {
        "grpo_s_to_checkpoint": round(until_checkpoint),
        "grpo_steps": len(lines),
        "probs_diff_mean": round(max(line["training/rollout_probs_diff_mean"] for line in lines), 5),
        "parity_mean": round(max(line.get("checkpoint/logprob_diff_mean", 0) for line in lines), 5),
    }


def ppo(home: Path, environment: dict[str, str], common: list[str]) -> dict[str, Any]:
    """Three steps with a critic; the second and third train the actor as well."""
    argv = ["train", "ppo", *common, "--run=gpu-ppo", "--plain", "trainer.steps=3", "critic.warmup_steps=1"]
    argv += ["trainer.save_every=3", "trainer.eval_every=0"]
    print("  ppo ...", flush=True)
    as_on_a_gpu(environment, *argv)
    lines = sound(home / "runs" / "gpu-ppo", steps=3)
    if ["actor/pg_loss" in line for line in lines] != [False, True, True]:
        raise RuntimeError("the critic's warm-up is not one step long")
    return {"ppo_steps": len(lines), "critic_loss": round(lines[-1]["critic/vf_loss"], 4)}


def sound(run: Path, steps: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: all steps, all finite, the sampler with the trainer's weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [line["training/global_step"] for line in lines] != list(range(1, steps + 1)):
        raise RuntimeError(f"{run.name}: steps {[line['training/global_step'] for line in lines]}")
    for line in lines:
        if not all(math.isfinite(v) for v in line.values() if isinstance(v, float)):
            raise RuntimeError(f"{run.name}: a metric is not finite in step {line['training/global_step']}")
        if line["training/rollout_probs_diff_mean"] > 0.02:
            raise RuntimeError(f"{run.name}: sampler and trainer differ in step {line['training/global_step']}")
    return lines


def processes(title: str) -> list[int]:
    """Processes with `title` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if title in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def agent(environment: dict[str, str], *argv: str) -> None:
    _checked([sys.executable, "-m", "agent_r1.cli", *argv], environment)


def as_on_a_gpu(environment: dict[str, str], *argv: str) -> None:
    _checked([sys.executable, "-m", "benchmarks.long._as_on_a_gpu", *argv], environment)


def _checked(command: list, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        raise RuntimeError(f"{' '.join(command[3:6])}: {(done.stderr.strip().splitlines() or [''])[-1]}")
