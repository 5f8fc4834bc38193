"""Make the canonical run, whose figures every page quotes, and record them.

.venv/bin/python -m lab.experiments.canonical HOME      about six minutes

The run is `bash speedrun-nodocker.sh grpo`: the default preset, grpo, seed 0, as many threads as
the machine has cores. HOME is an empty folder, which keeps the run: README's pictures are made from
it. Nothing else should be running: the seconds are recorded, too. The figures are in
docs/lab/canonical.json, and tests/test_canonical.py compares the pages with it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agent_r1.config.presets import DEFAULT
from agent_r1.ground.machine import cores
from lab.experiments.ten_seeds import read_validation

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "lab" / "canonical.json"
COMMAND = ["bash", "speedrun-nodocker.sh", "grpo"]


def figures(card: dict[str, Any]) -> dict[str, Any]:
    """Select the figures of an eval card that pages quote."""
    return {
        "em": card["em"],
        "interval": [round(bound, 3) for bound in card["em_ci95"]],
        "sampled": card["sampled"]["em"],
        "pass^8": round(card["reliability"]["pass^8"], 3),
        "calls": round(card["mean_tool_calls"], 2),
        "hops": {kind: scores["em"] for kind, scores in card["by_kind"].items()},
    }


def processor() -> str:
    """Return the processor's name, without the operating system's other words."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()


def record(home: Path) -> dict[str, Any]:
    """Run the command in `home`, and return what pages quote."""
    start = time.perf_counter()
    settings = os.environ | {"AGENT_R1_HOME": str(home)}
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=settings, text=True, stdout=subprocess.PIPE, check=True
    )
    whole = time.perf_counter() - start
    run = home / "runs" / f"{DEFAULT}-grpo"
    cards = {
        name: json.loads((run / f"{name}.json").read_text()) for name in ("eval_before", "eval")
    }
    # Each stage prints its seconds and its folder: `  49.1 s, in .../checkpoints/step_000220`.
    stages = re.findall(r"^  (\d+\.\d) s, in .*/([\w-]+)$", done.stdout, re.MULTILINE)
    seconds = {folder: float(duration) for duration, folder in stages}
    return {
        "command": " ".join(COMMAND),
        "machine": f"{cores()} cores of {processor()}",
        "code": cards["eval"]["code"]["commit"],
        "questions": cards["eval"]["n"],
        "seconds": {
            "whole": round(whole),
            "cold start": next(s for name, s in seconds.items() if name.startswith("cold-start")),
            "RL": next(s for name, s in seconds.items() if name.startswith("step_")),
        },
        "validation": read_validation(run / "metrics.jsonl"),
        "before": figures(cards["eval_before"]),
        "after": figures(cards["eval"]),
    }


def main() -> None:
    """Make the run in an empty folder, and record it."""
    if len(sys.argv) != 2 or any(Path(sys.argv[1]).glob("*")):
        sys.exit(f"{__doc__}\nName an empty folder.")
    facts = record(Path(sys.argv[1]).resolve())
    FILE.write_text(json.dumps(facts, indent=2) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
