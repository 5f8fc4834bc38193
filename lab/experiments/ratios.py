"""What the clip looks at (`actor.ratio_level`), compared: two tables of docs/lab/estimators.md.

    python -m lab.experiments.ratios          # ratios that are nothing but noise, and the kept runs
    python -m lab.experiments.ratios 2        # train two seeds first; finished runs are only read

The runs are GRPO on the preset small: 32 steps, one thread. The runs of an arm differ in cold start
and seed, and the runs of a seed share both. Their figures are kept in docs/lab/race/ratios.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import torch

from agent_r1.training.losses import policy_loss
from agent_r1.training.parts import get_ratios
from lab.experiments.sentinel import train

FILE = Path(__file__).parents[2] / "docs" / "lab" / "race" / "ratios.json"
ARMS = {
    "token": [],
    "step": ["actor.ratio_level=step"],
    "sequence": ["actor.ratio_level=sequence"],
    "sequence, clip 0.05": [
        "actor.ratio_level=sequence",
        "actor.span_clip_low=0.05",
        "actor.span_clip_high=0.05",
    ],
}


def row_of(lines: list[dict[str, Any]]) -> dict[str, float]:
    figures = {
        "sampled EM": fmean(line["reward/em"] for line in lines[-8:]),
        "clipped": fmean(line["actor/pg_clipfrac"] for line in lines),
        "KL": max(line["actor/ppo_kl"] for line in lines),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    out = [
        "| `actor.ratio_level` | seeds | sampled EM, last 8 steps | tokens clipped | largest KL of "
        "an update |",
        "|---|---|---|---|---|",
    ]
    for arm, runs in rows.items():
        scores = [run["sampled EM"] for run in runs]
        clip_share, kl = fmean(run["clipped"] for run in runs), max(run["KL"] for run in runs)
        out.append(
            f"| {arm} | {len(runs)} | {fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f}) "
            f"| {clip_share:.3f} | {kl:.3f} |"
        )
    return "\n".join(out)


NOISE, LENGTHS = (0.02, 0.1, 0.3), (30, 300)


def clip_by_noise(noise: float, length: int, clip: float) -> float:
    """Return the share of tokens that are clipped if log-ratios are normal noise.

    For a positive advantage the clip acts above 1 + `clip`. A mean over `length` tokens has the
    standard deviation `noise` / sqrt(length); a single token is a mean of length 1.
    """
    return 1 - NormalDist(0, noise / math.sqrt(length)).cdf(math.log(1 + clip))


def clip_in_simulation(noise: float, length: int, ratio: str, clip: float) -> float:
    """Return the same share as `policy_loss` counts it, for 500 random sequences."""
    log_ratios_BT = noise * torch.randn(500, length, generator=torch.Generator().manual_seed(0))
    ones_BT = torch.ones_like(log_ratios_BT)
    _, metrics = policy_loss(
        log_ratios_BT, 0 * ones_BT, ones_BT, ones_BT, clip, clip, 3.0, get_ratios(ratio)
    )
    return metrics["actor/pg_clipfrac"]


def noise_table() -> str:
    out = [
        "| noise of a log-ratio | token, clip 0.28 | "
        + " | ".join(f"sequence of {n}, clip 0.05" for n in LENGTHS)
        + " |"
    ]
    out.append("|---" * (2 + len(LENGTHS)) + "|")
    for noise in NOISE:
        shares = [clip_by_noise(noise, 1, 0.28)]
        for length in LENGTHS:
            shares.append(clip_by_noise(noise, length, 0.05))
        out.append(f"| {noise} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    return "\n".join(out)


def main(seeds: int = 0) -> None:
    rows = {arm: [] for arm in ARMS} if seeds else json.loads(FILE.read_text())
    for seed in range(seeds):
        for arm, settings in ARMS.items():
            name = f"ratio {arm}" if settings else "sentinel healthy"  # the same runs
            rows[arm].append(row_of(train(name, settings, seed, seed)))
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(noise_table(), table(rows), sep="\n\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
