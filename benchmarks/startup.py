"""Measure the CPU seconds of commands that compute nothing.

    .venv/bin/python benchmarks/startup.py                        help, plans
    .venv/bin/python benchmarks/startup.py grpo --preset smoke    stages that are done already

CPU time is user and system time of the whole process. The least of five calls counts, with bytecode
cached.
"""

from __future__ import annotations

import resource
import subprocess
import sys

PLANS = ("discover", "smoke", "pocket", "tinyquest", "hotpotqa-4xh100")
STAGES = (
    "doctor",
    "data",
    "index",
    "cold-start",
    "eval --before",
    "train --plain",
    "eval",
    "report",
)


def cpu_seconds(words: list[str]) -> float:
    """Return the least CPU seconds of five calls, after one to fill the caches."""
    found = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "agent_r1", *words], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found[1:])


if __name__ == "__main__":
    lines = ["--help", *(f"train --preset {preset} --dry-run" for preset in PLANS)]
    if run := sys.argv[1:]:
        lines = [" ".join([stage, *run]) for stage in STAGES]
    for line in lines:
        print(f"{cpu_seconds(line.split()):.2f} s   agent-r1 {line}", flush=True)
