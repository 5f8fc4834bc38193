"""Print finished runs as a Markdown table: score before and after, calls, time, memory.

python lab/experiments/summary.py RUN [RUN ...]        names in runs/ (or in $AGENT_R1_HOME/runs)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import fmean

from agent_r1.ground.files import read_jsonl


def main(names: list[str]) -> None:
    root = Path(os.environ.get("AGENT_R1_HOME", ".")) / "runs"
    print("| run | before | after | sampled after | calls before → after | s per step | GiB |")
    print("|---|---|---|---|---|---|---|")
    after = []
    for name in names:
        cards = [
            json.loads((root / name / f"{card}.json").read_text())
            for card in ("eval_before", "eval")
        ]
        metrics = read_jsonl(root / name / "metrics.jsonl")
        step = fmean(m["timing_s/step"] for m in metrics)
        memory = max(m["perf/memory_gb"] for m in metrics)
        after.append(cards[1]["score"])
        print(
            f"| {name} | {cards[0]['score']:.3f} | {cards[1]['score']:.3f} | "
            f"{cards[1]['sampled']['score']:.3f} | {cards[0]['mean_tool_calls']:.2f} → "
            f"{cards[1]['mean_tool_calls']:.2f} | {step:.2f} | {memory:.2f} |"
        )
    print(f"\n{len(after)} runs: mean score {fmean(after):.3f}, worst {min(after):.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
