"""Runs of the real command line for tests, in seconds: a very small configuration, processes that
die at a chosen moment, and what a run directory holds, in a form that can be compared."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from agent_r1.app import cli

ROOT = Path(__file__).parents[1]
AGENT = Path(sys.prefix) / "bin" / "agent-r1"
TINY = [
    "--preset=small",
    "data.train=64",
    "data.val=8",
    "data.test=12",
    "data.cold=200",
    "data.cold_entities=200",
    "search.dim=256",
    "model.vocab_size=400",
    "model.hidden_size=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.intermediate_size=48",
    "model.max_position=512",
    "cold_start.copy_steps=120",
    "cold_start.mix_steps=60",
    "cold_start.lr=5e-3",
    # Such a model answers nothing, so a probe would refuse it.
    "cold_start.probe=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens_per_turn=48",
    "rollout.max_context=400",
    "rollout.max_concurrent_episodes=16",
    "trainer.steps=8",
    "trainer.save_every=2",
    "trainer.keep_checkpoints=2",
    "trainer.eval_every=4",
    "trainer.eval_samples=2",
    "trainer.rollouts_every=3",
    "trainer.threads=1",
    "trainer.device=cpu",
    "critic.warmup_steps=2",
    # A model this small makes some valid calls and answers nothing. These see to it that every step
    # moves its weights.
    "actor.entropy_coef=0.01",
    "actor.kl_coef=0.05",
    "env.call_reward=0.1",
]
"""Options and overrides of a run that takes a second or two."""
SMOKE = ["grpo", "--preset", "smoke", "trainer.threads=1"]
"""Of the run that all slow tests share. One thread, because another test runs beside it."""
CHECK = [
    "grpo",
    "--preset=small",
    "engine=verl",
    "trainer.threads=1",
    "rollout.samples_per_prompt=4",
    "actor.minibatches=2",
    "actor.kl_coef=0.05",
    "trainer.dtype=bfloat16",
]
"""Of the gpu-check that the slow tests of verl share: one rank."""
STAGES = ("data", "index", "cold-start")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As small instruct models have it: turns, and nothing about tools."""
CARD_KEYS = (
    *(
        "model",
        "dataset",
        "split",
        "n",
        "seed",
        "em",
        "em_ci95",
        "sub_em",
        "f1",
        "search_rate",
        "mean_turns",
    ),
    *(
        "mean_tool_calls",
        "invalid_call_rate",
        "truncated_rate",
        "stop_reasons",
        "retriever",
        "prompt_hash",
    ),
    "wall_seconds",
)
"""DESIGN.md, section 3."""


def main(*argv: str) -> int:
    """`agent-r1 ARGV` in this process; the exit code, also where argparse leaves by SystemExit."""
    try:
        return cli.main(list(argv))
    except SystemExit as exit:
        return exit.code or 0


def prepare(home: Path, *overrides: str) -> None:
    """Data, index and cold start of the tiny configuration. AGENT_R1_HOME must be `home`."""
    assert os.environ["AGENT_R1_HOME"] == str(home)
    for stage in STAGES:
        assert main(stage, *TINY, *overrides) == 0


def environment(home: Path) -> dict[str, str]:
    here = {
        name: value for name, value in os.environ.items() if name != "PYTHON"
    }  # of `make quick PYTHON=python3.12`
    return here | {"AGENT_R1_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def speedrun(
    home, *argv: str, cwd=None, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess:
    """`bash speedrun-nodocker.sh ARGV` in this environment."""
    variables = {"AGENT_R1_VENV": sys.prefix} | variables
    command = ["bash", ROOT / "speedrun-nodocker.sh", *argv]
    settings = {"env": environment(home) | variables, "cwd": cwd or home, "timeout": timeout}
    return subprocess.run(command, capture_output=True, text=True, **settings)


DRIVER = """
import os, signal, sys, time
kind, part, count, act = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def hook(event, args):
    global count
    if event != kind or part not in str(args[0]):
        return
    if event == "open" and not set("wa") & set(str(args[1])):
        return
    count -= 1
    if count == 0 and act == "hang":
        os.write(2, b"it hangs\\n")
        time.sleep(1000)
    elif count == 0:
        os.kill(os.getpid(), getattr(signal, act))

sys.addaudithook(hook)
from agent_r1.app.cli import main
sys.exit(main(sys.argv[5:]))
"""
"""Python tells an audit hook of each file that it opens, renames and removes: the moments at which
a death hurts."""


def struck(home: Path, kind: str, part: str, count: int, act: str, *argv: str) -> subprocess.Popen:
    """Start `agent-r1 ARGV`, which gets signal `act` (or hangs) just before event `kind` hits a
    path with `part` in it for the `count`-th time. Kinds: open (for writing), os.rename,
    shutil.rmtree."""
    command = [sys.executable, "-c", DRIVER, kind, part, str(count), act, *argv]
    return subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def killed_at(home: Path, kind: str, part: str, count: int, *argv: str) -> None:
    """SIGKILL at that event; it must have come to it."""
    process = struck(home, kind, part, count, "SIGKILL", *argv)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, f"never came to {kind} {part}: {errors}"


def killed_sometime(home: Path, run: Path, moment: random.Random, *argv: str) -> None:
    """SIGKILL at a random moment of the training proper; also fine if it was faster."""
    process = subprocess.Popen([AGENT, *argv], env=environment(home), stdout=subprocess.DEVNULL)
    before, deadline = len(lines(run)), time.monotonic() + 60
    while process.poll() is None and len(lines(run)) <= before and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(moment.uniform(0, 0.3))
    process.kill()
    process.wait()


def lines(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def curve(run: Path) -> list[dict]:
    """metrics.jsonl without what a clock or the memory says."""
    records = [json.loads(line) for line in lines(run)]
    return [{k: v for k, v in r.items() if not k.startswith(("timing_", "perf/"))} for r in records]


def rollouts(run: Path) -> dict[str, list[dict]]:
    """The trajectories in rollouts/, without the seconds that a tool call took."""

    def timeless(value):
        if isinstance(value, dict):
            return {key: timeless(inner) for key, inner in value.items() if key != "seconds"}
        return [timeless(inner) for inner in value] if isinstance(value, list) else value

    files = sorted((run / "rollouts").iterdir())
    return {
        file.name: [timeless(json.loads(line)) for line in file.read_text().splitlines()]
        for file in files
    }


def steps(run: Path) -> list[str]:
    """Everything in checkpoints/, leftovers included."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / steps(run)[-1] / "model" / "model.safetensors").read_bytes()


def tree(folder: Path) -> dict[str, str]:
    """Path to SHA-256 of every file below `folder`, locks and noted times excepted."""
    aside = (".lock", ".seconds")
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(aside)
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def processes_of(folder: Path) -> list[int]:
    """Ids of the processes that were started with a path below `folder` in their environment, and
    of what they started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(folder) in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def orphans(since: float) -> list[str]:
    """Shared memory younger than `since` (seconds of the epoch) that no living process has mapped.
    Other tests run beside this one and have theirs, which may be without an owner for a moment
    while they end: only what stays counts."""
    deadline = time.monotonic() + 20
    while True:
        mapped = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                mapped |= {
                    int(line.split()[4])
                    for line in maps.read_text().splitlines()
                    if "/dev/shm/" in line
                }
            except OSError:
                continue
        try:
            files = [(path, path.stat()) for path in Path("/dev/shm").iterdir()]
        except FileNotFoundError:
            continue
        found = [
            str(path) for path, stat in files if stat.st_mtime > since and stat.st_ino not in mapped
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def leftovers(folder: Path) -> list[str]:
    """What an interrupted stage may leave for a while: half-written files and folders."""
    return [
        str(path) for path in folder.rglob("*") if "part" in path.suffix or ".part" in path.name
    ]


def undocumented(keys) -> list[str]:
    """Keys of metrics.jsonl that docs/metrics.md says nothing about."""
    named = metric_patterns()
    return sorted(key for key in keys if not any(fnmatch.fnmatchcase(key, name) for name in named))


def metric_patterns() -> dict[str, str]:
    """What docs/metrics.md names, and its letters: which engine writes it, and when."""
    rows = re.findall(
        r"^\| (`.*?`) \| ([LV].*?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    return {name: where for names, where in rows for name in re.findall(r"`([^`]+)`", names)}
