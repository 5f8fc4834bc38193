"""Summarise the finished runs of race.sh: docs/lab/race/PRESET.json, a picture, a table.

    python lab/experiments/race.py laptop    reads runs/race-laptop-*, keeps known others, prints
                                             Markdown

The picture is docs/images/race-PRESET.svg: greedy validation against episodes and against seconds.
A line is the mean over an arm's seeds, and its band spans the worst to the best.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from statistics import fmean, median_high, stdev
from typing import Any

import matplotlib
import yaml
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from agent_r1.config import ALGORITHMS
from agent_r1.config.settings import RolloutConfig
from agent_r1.ground.files import read_jsonl, write_whole
from agent_r1.watch.log import VAL_EM, with_totals

DOCS = Path(__file__).parents[2] / "docs"
LEVELS = (0.8, 0.85, 0.9)
COLOURS = ("#0f766e", "#2563eb", "#c2570c", "#be185d", "#7c3aed", "#6b7280", "#ca8a04", "#111827")
STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t with so many degrees of freedom."""
HEAD = (
    "arm",
    "seeds",
    "score (95 % over seeds)",
    "worst to best",
    "deviation",
    *(f"episodes to {r}" for r in LEVELS),
    "seconds to 0.85",
    "s per step",
    "in advantages",
    "rows without advantage",
    "GB",
)


def figures(run: Path) -> dict[str, Any]:
    """Read what is kept of a run; `curve` has [episodes, seconds, greedy score] per validation."""
    config, card = (
        yaml.safe_load((run / "config.yaml").read_text()),
        json.loads((run / "eval.json").read_text()),
    )
    lines, of = (
        read_jsonl(run / "metrics.jsonl"),
        (RolloutConfig(**config["rollout"]), config["algorithm"]),
    )
    seconds = sum(line["timing_s/step"] for line in lines)
    return {
        "arm": config["algorithm"],
        "seed": config["seed"],
        "score": card["score"],
        "cold_start_seconds": card["time_to_agent"]["cold_start_seconds"],
        "s_step": seconds / len(lines),
        "credit": sum(line["timing_s/adv"] for line in lines) / seconds,
        "idle": fmean(line["groups/zero_advantage"] for line in lines),
        "gb": max(line["perf/memory_gb"] for line in lines),
        "made_by": {
            "command": card["command"],
            "commit": card["code"]["commit"],
            "hardware": card["hardware"],
        },
        "curve": [
            [n, round(s, 1), line[VAL_EM]]
            for line, n, s in with_totals(lines, *of)
            if VAL_EM in line
        ],
    }


def arms(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {arm: mine for arm in ALGORITHMS if (mine := [run for run in runs if run["arm"] == arm])}


def steps_to(run: dict[str, Any], score: float) -> tuple[float, float]:
    """Return episodes and seconds until two validations in a row reached `score`, else infinity."""
    for (episodes, seconds, first), (_, _, second) in zip(
        run["curve"], run["curve"][1:], strict=False
    ):
        if min(first, second) >= score:
            return episodes, seconds
    return math.inf, math.inf


def middle(values: list[float]) -> str:
    """Format the median, and the number of seeds that got there; others count as slowest."""
    there, half = sum(map(math.isfinite, values)), median_high(values)
    some = f" ({there} of {len(values)})" if there < len(values) else ""
    return f"{half:,.0f}{some}" if math.isfinite(half) else f"not reached{some}"


def spread(scores: list[float]) -> list[str]:
    """Format mean with interval over seeds (Student's t), worst to best, deviation.

    One seed has only its score.
    """
    mean, n = fmean(scores), len(scores)
    if n == 1:
        return [f"{mean:.3f}", "-", "-"]
    deviation = stdev(scores)
    half = STUDENT[n - 1] * deviation / math.sqrt(n)
    interval = f"{mean:.3f} ({mean - half:.3f} to {min(1, mean + half):.3f})"
    return [interval, f"{min(scores):.3f} to {max(scores):.3f}", f"{deviation:.3f}"]


def table(runs: list[dict[str, Any]]) -> str:
    """Format a line per arm in Markdown: means over its seeds, and median times."""
    lines = [" | ".join(HEAD), "|".join("---" for _ in HEAD)]
    for arm, mine in arms(runs).items():
        cells = [arm, str(len(mine)), *spread([run["score"] for run in mine])]
        cells += [middle([steps_to(run, score)[0] for run in mine]) for score in LEVELS]
        cells += [middle([steps_to(run, 0.85)[1] for run in mine])]
        cells += [
            f"{fmean(run[key] for run in mine):.{n}f}"
            for key, n in (("s_step", 2), ("credit", 4), ("idle", 2), ("gb", 2))
        ]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def picture(runs: list[dict[str, Any]], out: Path) -> None:
    """Draw learning curves with bands. Equal runs give equal bytes."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for (arm, mine), colour in zip(arms(runs).items(), COLOURS, strict=False):
        points = [
            list(zip(*same, strict=True))
            for same in zip(*(run["curve"] for run in mine), strict=False)
        ]
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
        figure.savefig(out, metadata={"Date": None, "Creator": "lab/experiments/race.py"})


def main(preset: str) -> None:
    home, file = (
        Path(os.environ.get("AGENT_R1_HOME", ".")),
        DOCS / "lab" / "race" / f"{preset}.json",
    )
    earlier = {
        (run["arm"], run["seed"]): run
        for run in (json.loads(file.read_text()) if file.exists() else [])
    }
    for card in sorted((home / "runs").glob(f"race-{preset}-*/eval.json")):
        run = figures(card.parent)
        earlier[run["arm"], run["seed"]] = run
    runs = [earlier[key] for key in sorted(earlier)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    picture(runs, DOCS / "images" / f"race-{preset}.svg")
    print(table(runs))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
