"""Sample the starts of controls: does longer cloning avoid what was dropped?

python -m lab.experiments.start_success "cloning four times as long" 1 2 3
python -m lab.experiments.start_success --table

A perfect clone would never solve a question of several hops, because right plays were dropped. The
start of `smoke` is sampled 256 times at temperature 1, on 60 test questions (20 of each kind).
Figures are added to docs/lab/smoke-starts.json: for each question, how many samples are right.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from lab.experiments.discover_controls import CONTROLS, LONGER, open_control
from lab.experiments.seed_files import run_arms
from lab.experiments.sharpened import KINDS, SAMPLES, count_right

FILE = Path(__file__).parents[2] / "docs" / "lab" / "smoke-starts.json"


def measure(name: str, seed: int) -> dict[str, list[int]]:
    """Make the start of a control; return by kind the counts of right samples."""
    with open_control(name, seed, "smoke") as run:
        return count_right(run, run.prepare().start_model)


def table(controls: dict[str, dict[str, dict[str, list[int]]]]) -> str:
    """Return the share of right samples by kind, and of questions that were ever solved."""
    lines = [
        "| | seeds | right samples: 1, 2, 3 hops | solved at least once: 1, 2, 3 hops |",
        "|---|---|---|---|",
    ]
    for name in CONTROLS:
        seeds = list(controls.get(name, {}).values())
        if not seeds:
            continue
        shares: list[float] = []
        ever: list[float] = []
        for kind in KINDS:
            counts = [count for seed in seeds for count in seed[kind]]
            shares.append(fmean(counts) / SAMPLES)
            ever.append(fmean(count > 0 for count in counts))
        cells = [", ".join(f"{share:.3f}" for share in row) for row in (shares, ever)]
        lines.append(f"| {name} | {len(seeds)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_arms(__doc__ or "", ["as it is", *LONGER], measure, FILE, table)
