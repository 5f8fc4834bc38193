"""Measure the sentinel's false alarms and hits: docs/lab/estimators.md, "the sentinel".

    python -m lab.experiments.sentinel record 10    # 10 rounds of four runs (finished runs are
                                                    # only read), then the tables
    python -m lab.experiments.sentinel              # the tables, from sentinel_runs.jsonl

Each run is GRPO on the preset small with one thread: 32 steps, or 20 if it is broken on purpose.
Two cold starts serve all runs, and the seed of RL differs. The thresholds were chosen on the runs
from cold start 0; those from 1 were held out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agent_r1.app.stages import make_missing
from agent_r1.config import load_config
from agent_r1.core import SAMPLER_GAP
from agent_r1.evaluation.evaluate import wilson_interval
from agent_r1.ground.files import read_jsonl
from agent_r1.ground.machine import set_threads
from agent_r1.training import loop
from agent_r1.training.run import run_training, start_model
from agent_r1.training.run_dir import RunDir
from agent_r1.watch import sentinel as rule
from agent_r1.watch.log import STEP_KEY
from agent_r1.watch.sentinel import Line
from agent_r1.workspace import Workspace

FILE = Path(__file__).with_name("sentinel_runs.jsonl")
HEALTHY, LR, KL = "healthy", "learning rate x 10", "KL with the wrong sign"
SETTINGS = {
    HEALTHY: [],
    LR: ["actor.lr=5e-3", "trainer.steps=20"],
    KL: ["actor.kl_coef=0.2", "trainer.steps=20"],
}
CHOSEN_ON, HELD_BACK = 0, 1
"""Cold starts."""
COLUMNS = (
    "critic/score/mean",
    "reward/em",
    "tool_calls/mean",
    "tool_calls/invalid_rate",
    "groups/zero_advantage",
    "actor/entropy",
    "response_length/mean",
    SAMPLER_GAP,
)
"""Fields that the sentinel reads of a line, next to `stop/*`."""


def plan(rounds: int) -> list[tuple[str, int, int]]:
    """List arm, cold start and RL seed of each run.

    The first is seed 0 of the preset small.
    """
    return [
        (arm, cold, cold + 10 * number)
        for number in range(rounds)
        for cold in (CHOSEN_ON, HELD_BACK)
        for arm in (HEALTHY, (LR, KL)[(number + cold) % 2])
    ]


def train(
    name: str, settings: list[str], cold: int, seed: int, kl_sign: int = 1
) -> list[dict[str, Any]]:
    """Train a run from the cold start of seed `cold`, unless it is finished.

    Returns the lines of its metrics.jsonl.
    """
    quick = [
        "trainer.threads=1",
        "trainer.eval_every=0",
        "trainer.save_every=32",
        "trainer.rollouts_every=0",
    ]
    config = load_config("small", [*quick, *settings], algorithm="grpo", seed=cold)
    run = RunDir(Workspace(config).run(f"{name}-{cold}-{seed}".replace(" ", "-").replace(",", "")))
    if not run.is_finished(config.trainer.steps):
        set_threads(1)
        make_missing(Workspace(config))
        model, tools, rows = (
            start_model(Workspace(config)),
            Workspace(config).load_tools(),
            Workspace(config).load_rows("train"),
        )
        config = config.model_copy(update={"seed": seed})
        right = loop.kl_penalty
        with patch.object(loop, "kl_penalty", lambda *inputs: kl_sign * right(*inputs)):
            run_training(run, config, model, tools, rows, [], plain=True)
    return run.metrics.read()


def record(rounds: int) -> None:
    records = []
    for arm, cold, seed in plan(rounds):
        lines = train(f"sentinel {arm}", SETTINGS[arm], cold, seed, -1 if arm == KL else 1)
        keys = sorted(
            {key for line in lines for key in line if key in COLUMNS or key.startswith("stop/")}
        )
        columns = {key: [float(f"{line.get(key, 0):.4g}") for line in lines] for key in keys}
        records.append(
            json.dumps({"arm": arm, "cold": cold, "seed": seed, "lines": columns}) + "\n"
        )
    FILE.write_text("".join(records))


def read_records() -> list[tuple[str, int, int, list[Line]]]:
    """Read arm, cold start, seed and lines of each kept run."""
    runs = []
    for run in read_jsonl(FILE):
        steps = zip(*run["lines"].values(), strict=True)
        lines = [
            {STEP_KEY: step} | dict(zip(run["lines"], values, strict=True))
            for step, values in enumerate(steps, 1)
        ]
        runs.append((run["arm"], run["cold"], run["seed"], lines))
    return runs


def first_alarms(runs: list[list[Line]], noise: float) -> list[int]:
    """List the step of the first sign of collapse, for the runs that have one."""
    with patch.object(rule, "NOISE", noise):
        alarms = [[sign.step for sign in rule.signs(lines) if sign.collapse] for lines in runs]
    return sorted(min(steps) for steps in alarms if steps)


def table(cold_start: int) -> str:
    """Format each arm's share of runs with a sign of collapse, with a 95 % interval.

    The last column is the rule without noise.
    """
    out = [
        "| runs | with an alarm | share, 95 % interval | first alarm after step | with an alarm, "
        "if noise were ignored |",
        "|---|---|---|---|---|",
    ]
    for arm in SETTINGS:
        runs = [
            lines for kind, cold, _, lines in read_records() if kind == arm and cold == cold_start
        ]
        steps = first_alarms(runs, rule.NOISE)
        low, high = wilson_interval(len(steps) / len(runs), len(runs))
        cells = (
            f"{arm}: {len(runs)}",
            len(steps),
            f"{len(steps) / len(runs):.2f} ({low:.2f} to {high:.2f})",
        )
        out.append(
            f"| {' | '.join(map(str, cells))} | {', '.join(map(str, steps)) or '-'} | "
            f"{len(first_alarms(runs, 0))} |"
        )
    return "\n".join(out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(int(sys.argv[2]))
    for name, cold in (("chosen on", CHOSEN_ON), ("held back", HELD_BACK)):
        print(f"\n{name}\n{table(cold)}")
