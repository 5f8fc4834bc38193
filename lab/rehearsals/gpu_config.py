"""Run a GPU preset's whole life in the GPU's own configuration on four gloo ranks.

`_as_on_a_gpu.py` passes the preset hotpotqa-4xh100 to verl: four ranks and four samplers, bf16,
dynamic batches, rows without padding. Model, data, batch, context and steps are smaller.
speedrun-nodocker.sh runs its stages, from doctor and gpu-check to train. A rank is killed after the
first checkpoint. Called again with `--resume`, the script continues with train, eval and report.
Export, serve and chat follow.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from agent_r1.config import load_config
from agent_r1.data.storage import read_rows
from agent_r1.workspace import Workspace

ROOT = Path(__file__).parents[2]
TINY = [
    "--preset=hotpotqa-tiny",
    "data.train=200",
    "data.val=8",
    "data.test=16",
    "data.cold=400",
    "trainer.threads=2",
    *("cold_start.copy_steps=60", "cold_start.mix_steps=40"),
]
SMALL = [
    "data.train=200",
    "data.val=8",
    "data.test=16",
    "data.corpus=contexts",
    "search.encoder=ngram",
    "search.top_k=2",
    "rollout.max_context=512",
    "rollout.max_tokens_per_turn=48",
    "rollout.prompts_per_step=8",
    "rollout.max_concurrent_episodes=32",
    "trainer.max_tokens_per_microbatch=1024",
    "trainer.loggers=[]",
    "verl.agent_workers=2",
    "verl.stall_timeout_s=900",
    *("env.episode_timeout_s=240", "trainer.stop_on_collapse=false"),
    "cold_start.warm_steps=0",  # the tiny model has had its cold start
]
GRPO = [
    "trainer.steps=3",
    "trainer.save_every=2",
    "trainer.eval_every=2",
    "trainer.rollouts_every=2",
]
PROGRAMS = {
    "bin/nvidia-smi": "#!/bin/sh\nfor gpu in 1 2 3 4; do "
    'echo "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06"; done\n',
    "venv/bin/agent-r1": '#!/bin/sh\nexec {python} -m lab.rehearsals._as_on_a_gpu "$@"\n',
    # `python - REQUIREMENTS` checks for GPU packages, and here they are a CPU's.
    "venv/bin/python": "#!/bin/sh\n"
    'if [ "$1" = - ]; then cat >/dev/null; else exec {python} "$@"; fi\n',
}
"""Stand-ins for a GPU machine's programs."""


def run() -> dict[str, Any]:
    """Return figures. Raises if a stage, a step, a checkpoint, the kill or the resume fails."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-gpu-") as folder:
        home = Path(folder)
        environment = machine(home)
        return life(home, environment, small(home, environment))


def small(home: Path, environment: dict[str, str]) -> list[str]:
    """Return the overrides: `SMALL`, questions in HotpotQA's format, a tiny start model.

    The model has learned the format, and replaces the hub's.
    """
    source = f"data.source={home / 'files'}"
    check_output(
        [sys.executable, ROOT / "tests/hotpotqa_tiny/make.py", home / "files"], environment
    )
    for stage in ("data", "index", "cold-start"):
        check_output([sys.executable, "-m", "agent_r1.app.cli", stage, *TINY, source], environment)
    os.environ["AGENT_R1_HOME"] = str(home)
    model = Workspace(load_config("hotpotqa-tiny", [*TINY[1:], source])).start_model
    return [*SMALL, source, f"model.path={model}"]


def machine(home: Path) -> dict[str, str]:
    """Return the variables of a machine with four faked H100."""
    for name, text in PROGRAMS.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("{python}", sys.executable))
        (home / name).chmod(0o755)
    environment = os.environ | {
        "AGENT_R1_HOME": str(home),
        "AGENT_R1_STACK": "gpu",
        "AGENT_R1_VENV": str(home / "venv"),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }
    environment.pop("OMP_NUM_THREADS", None)  # a GPU run has none
    return environment


def life(home: Path, environment: dict[str, str], words: list[str]) -> dict[str, Any]:
    """Run the script's stages in order, and use the result."""
    script = [
        "bash",
        ROOT / "speedrun-nodocker.sh",
        "grpo",
        "--preset",
        "hotpotqa-4xh100",
        "--run",
        "life",
        *words,
    ]
    run, figures = home / "runs" / "life", {}
    figures["s_to_checkpoint"] = kill_after_a_checkpoint([*script, *GRPO], environment, run)
    began = time.monotonic()
    output = check_output([*script, *GRPO, "--resume"], environment)
    figures["s_resume_eval_report"] = round(time.monotonic() - began)
    stages = re.findall(r"^(train|evaluate after RL|report)\b", output, re.MULTILINE)
    if stages != ["train", "evaluate after RL", "report"] or output.count("already done") < 3:
        raise RuntimeError(f"the second call of the speedrun did something else: {output[-1000:]}")
    lines = sound(run, steps=3)
    the_gpus_configuration(run)
    before, after = (
        json.loads((run / f"{name}.json").read_text())["em"] for name in ("eval_before", "eval")
    )
    model, question = (
        home / "exported",
        read_rows(data(words) / "test.parquet")[0]["prompt"][-1]["content"],
    )
    agent(environment, "export", "--run", "life", "--target-dir", str(model))
    serve_and_ask(environment, model, question)
    answer = chat_once(environment, model, question)
    return figures | {
        "em_before_after": f"{before:.2f}, {after:.2f}",
        "probs_diff_mean": round(
            max(line["training/rollout_probs_diff_mean"] for line in lines), 5
        ),
        "parity_mean": round(max(line.get("checkpoint/logprob_diff_mean", 0) for line in lines), 5),
        "parity_p99": round(max(line.get("checkpoint/logprob_diff_p99", 0) for line in lines), 5),
        "chat_stop_reason": answer["stop_reason"],
    }


def kill_after_a_checkpoint(
    command: Sequence[str | Path], environment: dict[str, str], run: Path
) -> int:
    """Run the script until a rank is killed in the step after the first checkpoint.

    Returns the seconds until that checkpoint.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=out, stderr=out
        )
        until_step_three(run, process)
        seconds = round(time.monotonic() - began)
        print(f"  grpo: checkpoint after {seconds} s; killing a rank", flush=True)
        for pid in processes(f"AGENT_R1_HOME={run.parents[1]}", "ray::WorkerDict")[:1]:
            os.kill(pid, signal.SIGKILL)
        code = process.wait(timeout=300)
        out.seek(0)
        output = out.read()
    last = output.strip().splitlines()[-1]
    if code != 1 or "continue from step_000002 with --resume" not in last:
        print(output[-3000:], file=sys.stderr)
        raise RuntimeError(f"after the kill: exit code {code}, {last}")
    return seconds


def until_step_three(run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a checkpoint, a validation and their line in metrics.jsonl exist.

    Also returns when the process has ended.
    """
    phase = run / "verl/phase.json"
    while process.poll() is None and not (
        phase.exists() and json.loads(phase.read_text())["step"] == 3
    ):
        time.sleep(0.5)


def the_gpus_configuration(run: Path) -> None:
    """Check that verl and the agents got a GPU run's settings."""
    verl_config, ours = (
        yaml.safe_load((run / name).read_text()) for name in ("verl/config.yaml", "config.yaml")
    )
    actor = verl_config["actor_rollout_ref"]
    correction = verl_config["algorithm"]["rollout_correction"]
    facts = {
        "packed rows": actor["model"]["use_remove_padding"],
        "flash-attn": actor["model"]["override_config"]["attn_implementation"]
        == "flash_attention_2",
        "dynamic batches": actor["actor"]["use_dynamic_bsz"],
        "four ranks": verl_config["trainer"]["n_gpus_per_node"] == 4,
        "bf16": actor["actor"]["fsdp_config"]["dtype"] == "bfloat16",
        "truncated importance sampling": correction["rollout_is"] == "token",
        "search service": ours["search"]["url"] == "http://127.0.0.1:8100",
    }
    if not all(facts.values()):
        raise RuntimeError(f"this was not the configuration of a GPU run: {facts}")


def serve_and_ask(environment: dict[str, str], model: Path, question: str) -> None:
    """Query `agent-r1 serve` as an OpenAI client, and stop it with Ctrl-C."""
    print("  serve ...", flush=True)
    process = subprocess.Popen(
        [home_agent(environment), "serve", "--model", str(model)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # a job in the background inherits it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout
        announcement = next(line for line in process.stdout if "OPENAI_BASE_URL" in line)
        match = re.search(r'BASE_URL=(\S+) OPENAI_API_KEY="\$\(cat (.+)\)"', announcement)
        assert match, announcement
        url, key = match.groups()
        with httpx.Client(
            trust_env=False,
            timeout=60,
            headers={"Authorization": f"Bearer {Path(key).read_text()}"},
        ) as ask:
            body = {
                "model": "agent",
                "max_tokens": 48,
                "messages": [{"role": "user", "content": question}],
            }
            answer = ask.post(f"{url}/chat/completions", json=body).raise_for_status().json()
        if answer["usage"]["completion_tokens"] < 1:
            raise RuntimeError(f"the server answered {answer}")
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
    if code != 130 or processes(f"AGENT_R1_HOME={environment['AGENT_R1_HOME']}", "vllm"):
        raise RuntimeError(f"the server ended with code {code}, or something of it lives")


def chat_once(environment: dict[str, str], model: Path, question: str) -> dict[str, Any]:
    """Ask the trained agent one question, with its tools, through a vLLM server."""
    print("  chat ...", flush=True)
    words = [
        "chat",
        "--model",
        str(model),
        "--backend",
        "vllm",
        "--question",
        question,
        "--json",
        "search.url=null",
    ]
    answer = json.loads(
        agent(environment, *words, codes=(0, 1)).splitlines()[-1]
    )  # 1: it gave no answer
    return answer


def sound(run: Path, steps: int) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl: all steps, finite, with the trainer's weights sampled."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [line["training/global_step"] for line in lines] != list(range(1, steps + 1)):
        raise RuntimeError(f"{run.name}: steps {[line['training/global_step'] for line in lines]}")
    for line in lines:
        if not all(math.isfinite(v) for v in line.values() if isinstance(v, float)):
            raise RuntimeError(
                f"{run.name}: a metric is not finite in step {line['training/global_step']}"
            )
        if line["training/rollout_probs_diff_mean"] > 0.02:
            raise RuntimeError(
                f"{run.name}: sampler and trainer differ in step {line['training/global_step']}"
            )
        if line.get("checkpoint/unverified"):
            raise RuntimeError(
                f"{run.name}: the checkpoint of step {line['training/global_step']} is unverified"
            )
    return lines


def processes(setting: str, title: str = "") -> list[int]:
    """List processes with NAME=VALUE in their environment and `title` in their command line."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if setting.encode() in (folder / "environ").read_bytes().split(b"\0"):
                pids += (
                    [int(folder.name)]
                    if title.lower() in (folder / "cmdline").read_text().lower()
                    else []
                )
        except OSError:
            continue
    return pids


def data(words: list[str]) -> Path:
    return Workspace(load_config("hotpotqa-4xh100", words)).data


def home_agent(environment: dict[str, str]) -> str:
    return f"{environment['AGENT_R1_VENV']}/bin/agent-r1"


def agent(environment: dict[str, str], *argv: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run `agent-r1 ARGV` as on a GPU, and return its output."""
    return check_output([home_agent(environment), *argv], environment, codes)


def check_output(
    command: Sequence[str | Path], environment: dict[str, str], codes: tuple[int, ...] = (0,)
) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode not in codes:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
        raise RuntimeError(
            f"{' '.join(map(str, command[1:4]))}: {(done.stderr.strip().splitlines() or [''])[-1]}"
        )
    return done.stdout
