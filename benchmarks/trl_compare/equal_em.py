"""Measure the seconds until greedy EM is .90, here and in TRL.

python -m benchmarks.trl_compare.equal_em search       seven trials of settings for each side, once
python -m benchmarks.trl_compare.equal_em rounds 1 2 3 the best of each side, with these seeds
python -m benchmarks.trl_compare.equal_em table        the tables of equal_em.json

Both sides begin with the same cold start, and look at the same 200 validation questions every five
steps. The search uses seed 0, so that other seeds decide. A trial lasts at most 150 s. Seconds are
from starting Python to the look that finds EM .90, less the seconds of looking. So imports, loading
and the first, slower steps count. Each trial is a process of its own. Needs what compare.sh needs;
TRL_VENV names TRL's environment.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trl_compare.table import ratio_text

from agent_r1.ground.files import write_whole
from agent_r1.ground.machine import describe_machine

HERE = Path(__file__).parent
FILE = HERE / "equal_em.json"
TARGET = 0.9
LIMIT = 150
"""Seconds of a trial, after which no look is waited for."""
STEPS = 60
"""Of the learning rate's linear decay, on both sides."""
KEEP_MEMORY = {
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}
"""glibc keeps freed memory. That makes TRL's steps shorter, and ours not longer."""
TRIALS: tuple[dict[str, Any], ...] = (
    {"lr": 3e-4, "prompts": 16, "threads": 2},
    {"lr": 3e-4, "prompts": 16, "threads": 1},
    {"lr": 1.5e-4, "prompts": 16, "threads": 2},
    {"lr": 6e-4, "prompts": 16, "threads": 2},
    {"lr": 1.2e-3, "prompts": 16, "threads": 2},
    {"lr": 3e-4, "prompts": 8, "threads": 2},
    {"lr": 6e-4, "prompts": 8, "threads": 2},
)
"""Learning rate, questions of a step (eight samples each), and threads."""
SIDES = {
    "agent-r1": (".venv/bin/python", "benchmarks/step_time.py"),
    "TRL 1.16": (
        os.path.join(os.environ.get("TRL_VENV", "benchmarks/trl_compare/.venv"), "bin/python"),
        "benchmarks/trl_compare/run.py",
    ),
}

Trial = dict[str, Any]


def prepare(seed: int) -> None:
    """Make data, index and cold start of a seed."""
    for stage in ("data", "index", "cold-start"):
        command = [".venv/bin/agent-r1", stage, "--preset", "laptop", "--seed", str(seed)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_trial(side: str, trial: Trial, seed: int = 0) -> Trial:
    """Train until the target or the limit. Return the trial with what it took.

    `seconds` is None if the target was not reached; `looks` has each look's step, EM and seconds.
    """
    python, script = SIDES[side]
    threads = str(trial["threads"])
    command = [
        *(python, script, "--preset", "laptop", "--warmup", "0", "--steps", str(STEPS)),
        *("--eval", "500", "--until", str(TARGET), "--threads", threads),
        *("--seed", str(seed)),
        *(f"actor.lr={trial['lr']}", f"rollout.prompts_per_step={trial['prompts']}"),
    ]
    environment = os.environ | KEEP_MEMORY
    environment |= {
        "PYTHONPATH": "src:benchmarks",
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
    }
    result: Trial = {
        "side": side,
        "seed": seed,
        **trial,
        "seconds": None,
        "test_em": None,
        "looks": [],
    }
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            look = json.loads(line)
            if "test_em" in look:
                result["test_em"] = look["test_em"]
                continue
            seconds = time.perf_counter() - began - look["evaluation_seconds"]
            result["looks"].append([look["step"], look["em"], round(seconds, 2)])
            if look["em"] >= TARGET:
                result["seconds"] = round(seconds, 2)
            elif seconds > LIMIT:
                process.kill()
    if process.returncode and result["seconds"] is None and not result["looks"]:
        sys.exit(f"{side} failed: {' '.join(command)}")
    return result


def read() -> dict[str, Any]:
    if FILE.exists():
        return json.loads(FILE.read_text())
    return {"target": TARGET, "machine": describe_machine(), "search": [], "rounds": []}


def keep(kind: str, result: Trial) -> None:
    """Add a result to the file, and show it."""
    results = read()
    results[kind].append(result)
    lines = []
    for key in ("search", "rounds"):
        rows = ",\n".join("  " + json.dumps(row) for row in results[key])
        lines.append(f' "{key}": [\n{rows}\n ]' if rows else f' "{key}": []')
    head = "".join(f" {json.dumps(k)}: {json.dumps(results[k])},\n" for k in ("target", "machine"))
    write_whole(FILE, "{\n" + head + ",\n".join(lines) + "\n}\n")
    print({key: value for key, value in result.items() if key != "looks"}, flush=True)


def best(side: str) -> Trial:
    """Return the settings of a side's shortest trial."""
    trials = [t for t in read()["search"] if t["side"] == side and t["seconds"] is not None]
    if not trials:
        sys.exit(f"no trial of {side} reached EM {TARGET}; run `search` first")
    shortest = min(trials, key=lambda trial: trial["seconds"])
    return {key: shortest[key] for key in TRIALS[0]}


def print_table() -> None:
    """Print both searches, then the rounds and their ratio."""
    results = read()
    print("| learning rate | questions | threads | " + " | ".join(SIDES) + " |")
    print("| --- " * (3 + len(SIDES)) + "|")
    for trial in TRIALS:
        cells = []
        for side in SIDES:
            [found] = [
                t
                for t in results["search"]
                if t["side"] == side and all(t[key] == trial[key] for key in trial)
            ]
            cells.append(describe(found))
        print(f"| {trial['lr']:g} | {trial['prompts']} | {trial['threads']} | ", end="")
        print(" | ".join(cells) + " |")
    ours, theirs = ([t for t in results["rounds"] if t["side"] == side] for side in SIDES)
    pairs = list(zip(ours, theirs, strict=True))
    for our, their in pairs:
        print(f"seed {our['seed']}: {describe(our)} here, {describe(their)} in TRL")
    logs = [
        math.log(their["seconds"] / our["seconds"])
        for our, their in pairs
        if our["seconds"] and their["seconds"]
    ]
    if logs:
        print(f"TRL's seconds over ours, where both reached it: {ratio_text(logs)}")


def describe(trial: Trial) -> str:
    """Say when the target was reached, or how far the trial came."""
    step, _, seconds = trial["looks"][-1]
    if trial["seconds"] is None:
        return f"not in {step} steps, {seconds:.0f} s"
    return f"{trial['seconds']} s, {step} steps"


def main(words: Sequence[str]) -> None:
    if words[:1] == ["search"]:
        prepare(0)
        for trial in TRIALS:
            for side in SIDES:
                keep("search", run_trial(side, trial))
    elif words[:1] == ["rounds"]:
        for seed in map(int, words[1:]):
            prepare(seed)
            for side in SIDES:
                keep("rounds", run_trial(side, best(side), seed))
    elif words[:1] != ["table"]:
        sys.exit(__doc__)
    print_table()


if __name__ == "__main__":
    main(sys.argv[1:])
