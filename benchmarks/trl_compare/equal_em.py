"""Measure the seconds until greedy EM is .90, here and in TRL.

python -m benchmarks.trl_compare.equal_em search       seven trials of settings for each side, once
python -m benchmarks.trl_compare.equal_em rounds 1 2 3 the best of each side, with these seeds
python -m benchmarks.trl_compare.equal_em pocket 0     SmolLM2, one trial a side with this seed
python -m benchmarks.trl_compare.equal_em table        the tables of equal_em.jsonl

Both sides begin with the same cold start, and look at the same validation questions every few
steps. The search uses seed 0, and other seeds decide: the shortest of seven trials is partly luck.
Seconds are from starting Python to the look that finds EM .90, less the seconds of looking. So
imports, loading and the first, slower steps count. A trial ends at that look, at the first look
past its task's limit, or after its steps. Needs TRL's environment (setup.sh; TRL_VENV names another
place).
Next: `run.py` and `../step_time.py` train; `../common.py` has their `Watch`, which looks.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trl_compare.table import ratio_text

from agent_r1.ground.machine import describe_machine

FILE = Path(__file__).with_suffix(".jsonl")
"""A line for each trial, added when it ends."""
TARGET = 0.9
"""The score from which the default run says that there is an agent."""
KEEP_MEMORY = {
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}
"""glibc keeps freed memory, on both sides. README.md says why that helps TRL."""
TRIALS: tuple[dict[str, Any], ...] = (
    {"lr": 3e-4, "prompts": 16, "threads": 2},
    {"lr": 3e-4, "prompts": 16, "threads": 1},
    {"lr": 1.5e-4, "prompts": 16, "threads": 2},
    {"lr": 6e-4, "prompts": 16, "threads": 2},
    {"lr": 1.2e-3, "prompts": 16, "threads": 2},
    {"lr": 3e-4, "prompts": 8, "threads": 2},
    {"lr": 6e-4, "prompts": 8, "threads": 2},
)
"""Settings: learning rate, questions of a step (eight samples each), and threads."""


@dataclass(frozen=True)
class Task:
    """What both sides learn, and when a trial ends."""

    preset: str
    start: tuple[str, ...]
    """Settings of the start model."""
    steps: int
    """At most, and the length of the learning rate's linear decay on both sides."""
    look_every: int
    limit: float
    """Seconds. The first look after them ends a trial, without test questions."""
    test: int
    """Test questions, asked when the target is reached or the steps are done."""
    trl_options: tuple[str, ...] = ()
    """Options that only `run.py` has."""


LAPTOP = Task("lab/laptop.yaml", start=(), steps=60, look_every=5, limit=150, test=500)
# A step of TRL takes minutes, so there is one trial a side. It has fewer and smaller steps than the
# preset, a shorter warm start, and twice its learning rate. Four rows a pass, because a copy of the
# logits of all 24 takes more than 1 GB.
POCKET = Task(
    "pocket",
    start=("cold_start.warm_steps=40",),
    steps=10,
    look_every=2,
    limit=3000,
    test=100,
    trl_options=("--rows-per-pass", "4"),
)
POCKET_TRIAL: dict[str, Any] = {"lr": 4e-5, "prompts": 6, "threads": 2}
"""As TRIALS, with four samples a question."""
SIDES = {
    "agent-r1": (".venv/bin/python", "benchmarks/step_time.py"),
    "TRL 1.16": (
        os.path.join(os.environ.get("TRL_VENV", "benchmarks/trl_compare/.venv"), "bin/python"),
        "benchmarks/trl_compare/run.py",
    ),
}

Trial = dict[str, Any]


def prepare(task: Task, seed: int) -> None:
    """Make data, index and cold start of a seed."""
    for stage in ("data", "index", "cold-start"):
        command = [".venv/bin/agent-r1", stage, "--preset", task.preset, "--seed", str(seed)]
        subprocess.run([*command, *task.start], check=True, stdout=subprocess.DEVNULL)


def run_trial(task: Task, side: str, settings: dict[str, Any], seed: int) -> Trial:
    """Train until the target or the limit. Return the trial with what it took.

    `seconds` is None if the target was not reached; `looks` has each look's step, EM and seconds.
    """
    python, script = SIDES[side]
    threads = str(settings["threads"])
    command = [
        *(python, script, "--preset", task.preset, "--warmup", "0", "--steps", str(task.steps)),
        *("--eval", str(task.test), "--until", str(TARGET), "--look-every", str(task.look_every)),
        *("--threads", threads, "--seed", str(seed)),
        *(task.trl_options if side.startswith("TRL") else ()),
        *(f"actor.lr={settings['lr']}", f"rollout.prompts_per_step={settings['prompts']}"),
        *task.start,
    ]
    environment = os.environ | KEEP_MEMORY
    environment |= {
        "PYTHONPATH": "src:benchmarks",
        "OMP_NUM_THREADS": threads,  # for FAISS
        "HF_HUB_OFFLINE": "1",
    }
    trial: Trial = {"side": side, "seed": seed, "settings": settings}
    trial |= {"seconds": None, "test_em": None, "looks": []}
    stopped = False
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            if "test_em" in found:
                trial["test_em"] = found["test_em"]
                continue
            seconds = round(time.perf_counter() - began - found["evaluation_seconds"], 2)
            trial["looks"].append([found["step"], found["em"], seconds])
            if found["em"] >= TARGET:
                trial["seconds"] = seconds
            elif seconds > task.limit and found["step"] < task.steps:
                stopped = True
                process.kill()
    if process.returncode and not stopped:
        sys.exit(f"{side} failed: {' '.join(command)}")
    return trial


def read() -> list[Trial]:
    """Return all trials so far."""
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def keep(part: str, trial: Trial) -> None:
    """Add a trial to the file, and show it. A stopped search loses only the trial that runs."""
    with FILE.open("a") as file:
        file.write(json.dumps({"part": part, **trial, "machine": describe_machine()}) + "\n")
    print(f"{part}, {trial['side']}, {trial['settings']}: {describe(trial)}", flush=True)


def best(side: str) -> dict[str, Any]:
    """Return the settings of a side's shortest trial."""
    trials = [t for t in read() if t["part"] == "search" and t["side"] == side and t["seconds"]]
    if not trials:
        sys.exit(f"no trial of {side} reached EM {TARGET}; run `search` first")
    return min(trials, key=lambda trial: trial["seconds"])["settings"]


def describe(trial: Trial) -> str:
    """Say when the target was reached, or how far the trial came."""
    step, em, seconds = trial["looks"][-1]
    if trial["seconds"] is None:
        test = f", test EM {trial['test_em']}" if trial["test_em"] is not None else ""
        return f"not in {step} steps ({seconds:.0f} s, EM {em}{test})"
    return f"{seconds} s, {step} steps, test EM {trial['test_em']}"


def print_table() -> None:
    """Print a row for each trial, the ratio of the rounds, and pocket's looks."""
    print("| part | seed | settings | " + " | ".join(SIDES) + " |")
    print("| --- " * (3 + len(SIDES)) + "|")
    rows: dict[tuple[str, int, str], dict[str, Trial]] = {}
    for trial in read():
        # A round gives each side its own best settings.
        settings = str(trial["settings"]) if trial["part"] != "rounds" else "each side's best"
        rows.setdefault((trial["part"], trial["seed"], settings), {})[trial["side"]] = trial
    logs = []
    for (part, seed, settings), trials in rows.items():
        cells = [describe(trials[side]) if side in trials else "" for side in SIDES]
        print(f"| {part} | {seed} | {settings} | " + " | ".join(cells) + " |")
        seconds = [trials[side]["seconds"] for side in SIDES if side in trials]
        if part == "rounds" and len(seconds) == len(SIDES) and all(seconds):
            ours, theirs = seconds
            logs.append(math.log(theirs / ours))
    if logs:
        print(f"TRL's seconds over ours, where both reached it: {ratio_text(logs)}")
    for seed in sorted({trial["seed"] for trial in read() if trial["part"] == "pocket"}):
        print(f"\nThe looks of pocket, seed {seed}:\n{looks_table('pocket', seed)}")


def looks_table(part: str, seed: int) -> str:
    """Return a Markdown table: a row for each look of a seed, then test EM.

    A look has its seconds and greedy EM. A side that ended earlier or was not run has empty cells.
    """
    trials = {t["side"]: t for t in read() if t["part"] == part and t["seed"] == seed}
    looks = {
        side: {step: f"{seconds:.0f} s, EM {em:.3f}" for step, em, seconds in trial["looks"]}
        for side, trial in trials.items()
    }
    lines = ["| after step | " + " | ".join(SIDES) + " |", "| --- " * (1 + len(SIDES)) + "|"]
    for step in sorted(set().union(*looks.values())):
        cells = [looks.get(side, {}).get(step, "") for side in SIDES]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    tests = {side: trial["test_em"] for side, trial in trials.items()}
    cells = [f"EM {tests[side]}" if tests.get(side) is not None else "" for side in SIDES]
    lines.append("| test questions | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    if words[:1] == ["search"]:
        prepare(LAPTOP, 0)
        for settings in TRIALS:
            for side in SIDES:
                keep("search", run_trial(LAPTOP, side, settings, 0))
    elif words[:1] == ["rounds"]:
        for seed in map(int, words[1:]):
            prepare(LAPTOP, seed)
            for side in SIDES:
                keep("rounds", run_trial(LAPTOP, side, best(side), seed))
    elif words[:1] == ["pocket"]:
        for seed in map(int, words[1:]):
            prepare(POCKET, seed)
            for side in SIDES:
                keep("pocket", run_trial(POCKET, side, POCKET_TRIAL, seed))
    elif words[:1] != ["table"]:
        sys.exit(__doc__)
    print_table()


if __name__ == "__main__":
    main(sys.argv[1:])
