"""Draw a run's learning curves, or those of several seeds: score and calls per question.

The scores before and after RL are included.

bash lab/experiments/seeds.sh ppo 0 && python lab/pictures/curve.py docs/images/laptop.png
runs/bench-laptop-ppo-s0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agent_r1.watch.log import VAL_EM
from agent_r1.watch.report import load_run, marks, training_score

SHADES = ("#0f766e", "#2563eb", "#7c3aed", "#be185d", "#6b7280")
"""One a run."""
NAMES = {"em": "Exact match"}


def main(out: Path, folders: list[Path]) -> None:
    runs = sorted(map(load_run, folders), key=lambda run: run.config["seed"])
    # The object interface with its own canvas: pyplot would keep global state and choose a backend
    # for the screen.
    figure = Figure(figsize=(10, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for run, colour in zip(runs, SHADES, strict=False):
        seed = f"seed {run.config['seed']}: " if len(runs) > 1 else ""
        left.plot(
            *zip(*training_score(run), strict=True),
            color=colour,
            alpha=0.3,
            label=f"{seed}train, sampled",
        )
        style = dict(color=colour, linewidth=2.2, marker="o")
        left.plot(
            *zip(*run.series(VAL_EM), strict=True), **style, label=f"{seed}validation, greedy"
        )
        for mark in marks(run):
            error = [[mark.y - mark.low], [mark.high - mark.y]]
            label = f"{seed}test, {mark.name}: {mark.y:.3f}"
            left.errorbar(
                [mark.x],
                [mark.y],
                yerr=error,
                fmt="D",
                color=colour,
                mfc="#b45309",
                capsize=4,
                label=label,
            )
        calls = zip(*run.series("tool_calls/mean"), strict=True)
        right.plot(*calls, color=colour, linewidth=2, label=f"{seed}train, sampled")
    config = runs[0].config
    seeds = ", ".join(str(run.config["seed"]) for run in runs)
    score = NAMES.get(runs[0].score_name, runs[0].score_name.capitalize())
    left.set_title(
        f"{score} ({config['preset']}, {config['algorithm']}, seed{'s' * (len(runs) > 1)} {seeds})",
        loc="left",
    )
    left.set_ylim(0, 1)
    right.set_title("Tool calls per question", loc="left")
    for axis in (left, right):
        axis.set_xlabel("RL step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right", fontsize=9 if len(runs) == 1 else 6)
    about = []
    for run in runs:
        if run.before is None or run.after is None:
            sys.exit(f"seed {run.config['seed']} has no eval_before.json or no eval.json")
        facts = {key: run.config[key] for key in ("preset", "algorithm", "seed")}
        facts |= {"steps": len(run.metrics)}
        facts |= {"before": run.before["score"], "after": run.after["score"]}
        about.append(facts)
    figure.savefig(
        out, metadata={"agent-r1": json.dumps(about)}
    )  # tests/test_docs.py compares it with the preset


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))
