"""The learning curve of one run: exact match with the evaluations before and after, and calls a question.

bash benchmarks/seeds.sh ppo 0 && python benchmarks/curve_picture.py docs/images/laptop.png runs/bench-laptop-ppo-s0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agent_r1.inspect.report import load_run, marks
from agent_r1.training.log import VAL_EM


def main(out: Path, folder: Path) -> None:
    run = load_run(folder)
    # The object interface with its own canvas: pyplot would keep global state and choose a backend for the screen.
    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*run.series("reward/em"), strict=True), color="#9ccfc4", label="train, sampled")
    left.plot(
        *zip(*run.series(VAL_EM), strict=True),
        color="#0f766e",
        linewidth=2.2,
        marker="o",
        label="validation, greedy",
    )
    for mark in marks(run):
        error = [[mark.y - mark.low], [mark.high - mark.y]]
        label = f"held-out test, {mark.name}: {mark.y:.3f}"
        left.errorbar([mark.x], [mark.y], yerr=error, fmt="D", color="#b45309", capsize=4, label=label)
    right.plot(*zip(*run.series("tool_calls/mean"), strict=True), color="#7c3aed", linewidth=2, label="train, sampled")
    config = run.config
    left.set_title(f"Exact match ({config['preset']}, {config['algorithm']}, seed {config['seed']})", loc="left")
    left.set_ylim(0, 1)
    right.set_title("Tool calls per question", loc="left")
    for axis in (left, right):
        axis.set_xlabel("RL step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
    made_of = {"preset": config["preset"], "algorithm": config["algorithm"], "seed": config["seed"]}
    made_of |= {"steps": len(run.metrics), "em_before": run.before["em"], "em_after": run.after["em"]}
    figure.savefig(out, metadata={"agent-r1": json.dumps(made_of)})  # tests/test_docs.py holds it against the preset


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
