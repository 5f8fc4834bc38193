"""Draw one preset's learning curves with the local loop and with verl.

python lab/pictures/engines.py docs/images/engines.png runs/laptop-grpo runs/laptop-verl
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agent_r1.ground.files import read_jsonl

PANELS = {"reward/em": "Exact match, sampled", "tool_calls/mean": "Tool calls per question"}
STYLES = {"local loop": "#0f766e", "verl": "#b45309"}
WINDOW = 5


def main(out: Path, local: Path, verl: Path) -> None:
    curves = [read_jsonl(run / "metrics.jsonl") for run in (local, verl)]
    steps = min(map(len, curves))
    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (key, title) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for (name, colour), lines in zip(STYLES.items(), curves, strict=True):
            values = [line[key] for line in lines[:steps]]
            windows = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(steps)]
            axis.plot(range(1, steps + 1), values, color=colour, alpha=0.3, linewidth=1)
            means = [sum(window) / len(window) for window in windows]
            axis.plot(
                range(1, steps + 1),
                means,
                color=colour,
                linewidth=2.2,
                label=f"{name} (mean of {WINDOW} steps)",
            )
        axis.set_title(title, loc="left")
        axis.set_xlabel("RL step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
    figure.savefig(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
