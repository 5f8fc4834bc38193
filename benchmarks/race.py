"""A table of the runs whose names begin alike: the last lines of race.sh.

python benchmarks/race.py race-laptop-      score after RL, episodes and seconds until validation reached .8, cost of a step
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import yaml

from agent_r1.files import read_jsonl
from agent_r1.training.log import STEP, VAL_EM, with_val_em

REACHED = 0.8


def figures(run: Path) -> dict[str, float | None]:
    """What the table says of one run; None for what it did not reach."""
    config, lines = (
        yaml.safe_load((run / "config.yaml").read_text()),
        list(map(with_val_em, read_jsonl(run / "metrics.jsonl"))),
    )
    rollout = config["rollout"]
    greedy = rollout["prompts_per_step"] * (config["algorithm"] == "remax")
    episodes = rollout["prompts_per_step"] * rollout["samples_per_prompt"] + greedy
    there = next((n for n, line in enumerate(lines, 1) if (line.get(VAL_EM) or 0) >= REACHED), None)
    return {
        "score": json.loads((run / "eval.json").read_text())["score"],
        "episodes": episodes * lines[there - 1][STEP] if there else None,
        "seconds": sum(line["timing_s/step"] for line in lines[:there]) if there else None,
        "s_step": fmean(line["timing_s/step"] for line in lines),
        "credit": sum(line["timing_s/adv"] for line in lines) / sum(line["timing_s/step"] for line in lines),
        "idle": fmean(line["groups/zero_advantage"] for line in lines),
        "gb": max(line["perf/memory_gb"] for line in lines),
    }


def table(runs: list[Path]) -> str:
    """Markdown, one line an arm: means over its seeds."""
    arms: dict[str, list[dict[str, float | None]]] = defaultdict(list)
    for run in runs:
        arms[re.sub(r"-s\d+$", "", run.name)].append(figures(run))
    lines = [
        f"| arm | seeds | score (worst to best) | episodes to {REACHED} | seconds to it | s a step | in advantages | rows "
        "without advantage | GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, found in arms.items():
        scores = [f["score"] for f in found]

        def mean(key: str, digits: int, found=found) -> str:
            values = [f[key] for f in found if f[key] is not None]
            short = f" ({len(values)} of {len(found)})" * (len(values) < len(found))
            return f"{fmean(values):,.{digits}f}{short}" if values else "not reached"

        lines.append(
            f"| {arm} | {len(found)} | {fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f}) | {mean('episodes', 0)} | "
            f"{mean('seconds', 0)} | {mean('s_step', 2)} | {mean('credit', 4)} | {mean('idle', 2)} | {mean('gb', 2)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    home = Path(os.environ.get("AGENT_R1_HOME", "."))
    print(table(sorted(run.parent for run in (home / "runs").glob(f"{sys.argv[1]}*/eval.json"))))
