"""What the finished runs of race.sh came to: docs/race/PRESET.json, a picture, and a table.

python benchmarks/race.py laptop      takes runs/race-laptop-*, keeps what is known of others, prints Markdown

The picture is docs/images/race-PRESET.svg: greedy validation against episodes and against seconds. A line is the mean over an
arm's seeds, its band goes from the worst to the best.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import matplotlib
import yaml
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from agent_r1.config import ALGORITHMS
from agent_r1.files import read_jsonl, write_whole
from agent_r1.settings import RolloutConfig
from agent_r1.training.log import VAL_EM, spent, time_to

DOCS = Path(__file__).parents[1] / "docs"
REACHED = (0.8, 0.85, 0.9)
COLOURS = ("#0f766e", "#2563eb", "#c2570c", "#be185d", "#7c3aed", "#6b7280", "#ca8a04", "#111827")
HEAD = ("arm", "seeds", "score (worst to best)", "deviation", *(f"episodes to {r}" for r in REACHED), "seconds to 0.85",
        "s a step", "in advantages", "rows without advantage", "GB")  # fmt: skip


def figures(run: Path) -> dict[str, Any]:
    """What is kept of one run. `curve` has [episodes, seconds, greedy validation] of each step that was validated."""
    config, card = yaml.safe_load((run / "config.yaml").read_text()), json.loads((run / "eval.json").read_text())
    lines, of = read_jsonl(run / "metrics.jsonl"), (RolloutConfig(**config["rollout"]), config["algorithm"])
    seconds = sum(line["timing_s/step"] for line in lines)
    return {
        "arm": config["algorithm"],
        "seed": config["seed"],
        "score": card["score"],
        "reached": {str(score): time_to(score, lines, *of) for score in REACHED},
        "cold_start_seconds": card["time_to_agent"]["cold_start_seconds"],
        "s_step": seconds / len(lines),
        "credit": sum(line["timing_s/adv"] for line in lines) / seconds,
        "idle": fmean(line["groups/zero_advantage"] for line in lines),
        "gb": max(line["perf/memory_gb"] for line in lines),
        "made_by": {"command": card["command"], "commit": card["code"]["commit"], "hardware": card["hardware"]},
        "curve": [[n, round(s, 1), line[VAL_EM]] for line, n, s in spent(lines, *of) if VAL_EM in line],
    }


def arms(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {arm: mine for arm in ALGORITHMS if (mine := [run for run in runs if run["arm"] == arm])}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown, one line an arm: means over its seeds."""
    lines = [" | ".join(HEAD), "|".join("---" for _ in HEAD)]
    for arm, mine in arms(runs).items():
        scores = [run["score"] for run in mine]

        def mean(values: list[float | None], digits: int) -> str:
            known = [value for value in values if value is not None]
            some = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
            return f"{fmean(known):,.{digits}f}{some}" if known else "not reached"

        cells = [
            arm,
            str(len(mine)),
            f"{fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})",
            f"{pstdev(scores):.3f}",
        ]
        cells += [mean([run["reached"][str(r)]["episodes"] for run in mine], 0) for r in REACHED]
        cells += [mean([run["reached"]["0.85"]["seconds"] for run in mine], 0)]
        cells += [
            mean([run[key] for run in mine], n) for key, n in (("s_step", 2), ("credit", 4), ("idle", 2), ("gb", 2))
        ]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def picture(runs: list[dict[str, Any]], out: Path) -> None:
    """Learning curves with bands. The same bytes for the same runs."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for (arm, mine), colour in zip(arms(runs).items(), COLOURS, strict=False):
        points = [list(zip(*same, strict=True)) for same in zip(*(run["curve"] for run in mine), strict=False)]
        low, mean, high = ([pick(values) for _, _, values in points] for pick in (min, fmean, max))
        for axis, column in zip(axes, (0, 1), strict=True):
            xs = [fmean(point[column]) for point in points]
            axis.plot(xs, mean, color=colour, linewidth=1.8, label=f"{arm} ({len(mine)})")
            axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
    for axis, word in zip(axes, ("episodes", "seconds of RL"), strict=True):
        axis.set_xlabel(word)
        axis.axhline(0.85, color="#6b7280", linewidth=0.8, linestyle=":")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("greedy validation")
    axes[1].legend(frameon=False, loc="lower right", title="arm (seeds)", fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "race"}):
        figure.savefig(out, metadata={"Date": None, "Creator": "benchmarks/race.py"})


def main(preset: str) -> None:
    home, file = Path(os.environ.get("AGENT_R1_HOME", ".")), DOCS / "race" / f"{preset}.json"
    known = {(run["arm"], run["seed"]): run for run in (json.loads(file.read_text()) if file.exists() else [])}
    for card in sorted((home / "runs").glob(f"race-{preset}-*/eval.json")):
        run = figures(card.parent)
        known[run["arm"], run["seed"]] = run
    runs = [known[key] for key in sorted(known)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    picture(runs, DOCS / "images" / f"race-{preset}.svg")
    print(table(runs))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
