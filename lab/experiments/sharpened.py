"""Measure pass@k before and after RL: is a start sharpened, or taught?

python -m lab.experiments.sharpened "discover" 1 2 3          a start, and its seeds
python -m lab.experiments.sharpened "whole chains" 1 2 3
python -m lab.experiments.sharpened --table

Two starts differ in one thing. The plays that `discover` clones contain no solution of two or three
hops; those of `whole chains` contain the ones that the explorer happened to find. All settings of
RL are equal, and so is the number of episodes. Before and after RL, 60 test questions (20 of each
kind) are sampled 256 times at temperature 1. Figures are added to docs/lab/sharpened.json: for each
question, how many of the 256 samples are right. One thread.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agent_r1 import Row, Run, Sampling, Task, derive_seed, make_loop, open_run, run_episodes
from agent_r1.evaluation.reliability import pass_at
from agent_r1.inference.agent import find_model, open_agent
from lab.experiments.discover_controls import CONTROLS
from lab.experiments.seed_files import run_arms

FILE = Path(__file__).parents[2] / "docs" / "lab" / "sharpened.json"
STARTS = {"discover": "as it is", "whole chains": "nothing dropped"}
"""Start -> the control of `discover_controls.py` that makes its demonstrations."""
KINDS = ("1-hop", "2-hop", "3-hop")
QUESTIONS = 20
"""Of each kind."""
SAMPLES = 256
KS = (1, 4, 16, 64, 256)


def choose_questions(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the first test questions of each kind."""
    return {
        kind: [row for row in rows if row["extra_info"]["kind"] == kind][:QUESTIONS]
        for kind in KINDS
    }


def count_right(run: Run, model: Path) -> dict[str, list[int]]:
    """Sample each question; return by kind how many samples of each question are right."""
    counts: dict[str, list[int]] = {}
    config = run.config
    sampling = Sampling(max_tokens=config.rollout.max_tokens_per_turn)
    with open_agent(model, config, "local") as agent:
        loop = make_loop(agent.policy, agent.chat, agent.tools, config.rollout, config.env)
        for kind, rows in choose_questions(run.workspace.load_rows("test")).items():
            counts[kind] = []
            for number, row in enumerate(rows):
                tasks = []
                for sample in range(SAMPLES):
                    name = f"{kind}/{number}/{sample}"
                    tasks.append(Task(row, str(number), name, seed=derive_seed(config.seed, name)))
                episodes = asyncio.run(run_episodes(loop, tasks, sampling))
                counts[kind].append(sum(episode.reward == 1 for episode in episodes))
    return counts


def measure(start: str, seed: int) -> dict[str, dict[str, list[int]]]:
    """Train one seed from a start; return its counts before and after RL."""
    exchange, _ = CONTROLS[STARTS[start]]
    exchange()
    quick = {"trainer.threads": 1, "trainer.eval_samples": 1, "cold_start.probe": 0}
    with tempfile.TemporaryDirectory() as home:
        os.environ["AGENT_R1_HOME"] = home
        run = open_run("discover", "grpo", seed=seed, run="sharpened", **quick)
        run.prepare()
        before = count_right(run, run.workspace.start_model)
        run.train()
        last_model, _ = find_model(run.name)
        return {"before": before, "after": count_right(run, last_model)}


def mean_over_questions(k: int, counts: list[int]) -> tuple[float, float]:
    """Return pass@k and half of its 95 % interval over questions."""
    values = [pass_at(k, right, SAMPLES) for right in counts]
    return fmean(values), 1.96 * stdev(values) / len(values) ** 0.5


def table(seeds: dict[str, Any]) -> str:
    """Return pass@k of each start and kind, before and after RL, over all its seeds."""
    heads = " | ".join(f"pass@{k}" for k in KS)
    lines = [f"| start | hops | | {heads} |", "|---|---|---|" + "---|" * len(KS)]
    for start in STARTS:
        of_start = seeds.get(start, {}).values()
        for kind in KINDS if of_start else ():
            for when in ("before", "after"):
                counts = [count for row in of_start for count in row[when][kind]]
                cells = []
                for k in KS:
                    mean, half = mean_over_questions(k, counts)
                    cells.append(f"{mean:.3f} ± {half:.3f}")
                lines.append(f"| {start} | {kind[0]} | {when} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_arms(__doc__ or "", STARTS, measure, FILE, table)
