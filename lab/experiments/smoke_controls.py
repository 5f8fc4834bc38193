"""The controls of `discover_controls` with `smoke`, whose runs take about a minute.

python -m lab.experiments.smoke_controls "random plans" 1 2 3     a control, and its seeds
python -m lab.experiments.smoke_controls --table

Figures are added to docs/lab/smoke-controls.json. One thread, greedy evaluation on 300 test
questions.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from lab.experiments.discover_controls import CONTROLS, measure
from lab.experiments.seed_files import run_arms

FILE = Path(__file__).parents[2] / "docs" / "lab" / "smoke-controls.json"
KINDS = ("1-hop", "2-hop", "3-hop", "all")


def measure_smoke(name: str, seed: int) -> dict[str, Any]:
    """Train and evaluate one seed of a control."""
    return measure(name, seed, "smoke")


def table(controls: dict[str, dict[str, Any]]) -> str:
    """Return a line for each control: means over its seeds, and the extremes."""
    lines = [
        "| | seeds | before: 1, 2, 3 hops | after: 1, 2, 3 hops | all, after (least to most) |",
        "|---|---|---|---|---|",
    ]
    for name in CONTROLS:
        seeds = list(controls.get(name, {}).values())
        if not seeds:
            continue
        cells = []
        for when in ("before", "after"):
            hops = [fmean(cards[when][kind] for cards in seeds) for kind in KINDS[:3]]
            cells.append(", ".join(f"{em:.3f}" for em in hops))
        scores = [cards["after"]["all"] for cards in seeds]
        spread = f"{fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})"
        lines.append(f"| {name} | {len(seeds)} | {cells[0]} | {cells[1]} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_arms(__doc__ or "", CONTROLS, measure_smoke, FILE, table)
