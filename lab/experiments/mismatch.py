"""Measure a sampler that differs from the trainer, and its correction by truncated weights.

    python lab/experiments/mismatch.py [--only NAME] [section.key=value ...]

Finished runs are only read.

See docs/lab/estimators.md, "The mismatch dial". Each run is GRPO on the preset small, seed 0, from
one cold start, with another `rollout.mismatch`. Prints a table, and keeps it in
docs/lab/race/mismatch.json next to rows from other machines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from agent_r1.core import SAMPLER_GAP
from agent_r1.ground.files import read_jsonl, write_whole
from agent_r1.watch.log import VAL_EM, with_val_em

FILE = Path(__file__).parents[2] / "docs" / "lab" / "race" / "mismatch.json"
DIALS = {
    "exact": "{}",
    "bf16": "{bf16: true}",
    "top_p 0.9": "{top_p: 0.9}",
    "1 step old": "{steps_old: 1}",
    "4 steps old": "{steps_old: 4}",
    "4 steps old, weights": "{steps_old: 4, tis_cap: 2}",
    "8 steps old": "{steps_old: 8}",
    "8 steps old, weights": "{steps_old: 8, tis_cap: 2}",
    "top_p 0.5": "{top_p: 0.5}",
    "top_p 0.5, weights": "{top_p: 0.5, tis_cap: 2}",
}
COLUMNS = {
    "gap": (SAMPLER_GAP, max),
    "KL": ("training/rollout_kl", max),
    "largest ratio": ("training/rollout_ratio_max", max),
    "mean weight": ("actor/rollout_is_weight", fmean),
    "entropy at the end": ("actor/entropy", lambda values: fmean(values[-4:])),
    "sampled EM, last 8 steps": ("reward/em", lambda values: fmean(values[-8:])),
    "validation, best": (VAL_EM, max),
    "validation, last": (VAL_EM, lambda values: values[-1]),
}


def row_of(run: Path) -> dict[str, float]:
    lines = list(map(with_val_em, read_jsonl(run / "metrics.jsonl")))
    return {
        name: of([line[key] for line in lines if key in line])
        for name, (key, of) in COLUMNS.items()
    }


def main(words: list[str]) -> None:
    names = [words[1]] if words[:1] == ["--only"] else list(DIALS)
    settings = words[2:] if words[:1] == ["--only"] else words
    runs = Path(os.environ.get("AGENT_R1_HOME", ".")) / "runs"
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        run = "mismatch-" + name.replace(",", "").replace(" ", "-")
        command = [
            sys.executable,
            "-m",
            "agent_r1.app.cli",
            "train",
            "grpo",
            "--preset",
            "small",
            "--run",
            run,
            "--plain",
            "--resume",
        ]
        command += [f"rollout.mismatch={DIALS[name]}", "trainer.eval_every=4", *settings]
        if not (runs / run / "checkpoints" / "step_000032").exists():
            subprocess.run(command, check=True)
        rows[name] = row_of(runs / run)
        FILE.parent.mkdir(parents=True, exist_ok=True)
        write_whole(FILE, json.dumps(rows, indent=1) + "\n")
    print(" | ".join(["| sampler", *COLUMNS]) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|")
    for name in filter(rows.get, DIALS):
        print(f"| {name} | " + " | ".join(f"{rows[name][column]:.4g}" for column in COLUMNS) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
