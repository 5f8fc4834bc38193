"""Evaluate whole runs of the preset `pocket` on 500 questions: docs/lab/pocket.json.

agent-r1 train grpo --preset pocket --seed 1       first: it makes runs/pocket-grpo-s1
python -m lab.experiments.pocket pocket-grpo-s1    40 minutes with one thread; continues
python -m lab.experiments.pocket                   only print the table of recipes/pocket/README.md

A run's own evaluation has 100 questions, which leaves an interval of ±.06. Here the agent answers
500 test questions greedily, the model before RL the first 100 of them. The agent also samples the
first 32 eight times at temperature 1. The corpus is larger than the run's own: it has the passages
of all these questions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1 import load_config
from agent_r1.evaluation.reliability import interval_over_runs, values_of
from agent_r1.inference.agent import model_folder
from agent_r1.training.run_dir import RunDir
from agent_r1.workspace import Workspace
from lab.experiments.seed_files import keep_seed, read_seeds
from lab.experiments.ten_seeds import AGENT, line

FILE = Path(__file__).parents[2] / "docs" / "lab" / "pocket.json"
EVALUATIONS = {
    "before": ["--limit", "100"],
    "after": [],
    "samples": ["--limit", "32", "--samples", "8", "--temperature", "1"],
}
"""Name -> options of `agent-r1 eval`."""
COLUMNS = {
    "EM before RL": ("before", "em"),
    "EM after": ("after", "em"),
    "mean@8": ("samples", "mean@8"),
    "pass@8": ("samples", "pass@8"),
    "pass^8": ("samples", "pass^8"),
}
"""Column of the table -> evaluation, measure."""
GROUPS = {
    "one place": ("1-hop", "2-hop capital", "2-hop currency", "2-hop language"),
    "comparisons": ("compare",),
    "common neighbours": ("2-hop neighbour",),
}
"""Column of the table (greedy, after RL) -> how the names of its kinds of question begin."""


def evaluate(run: RunDir) -> dict[str, Any]:
    """Make the evaluations of a finished run that do not exist yet. Return their figures."""
    config = run.stored_config()
    checkpoint = run.latest_checkpoint()
    if config is None or checkpoint is None or not run.is_finished(config.trainer.steps):
        sys.exit(f"{run.path} is no finished run; run `agent-r1 train grpo --preset pocket` first")
    paths = Workspace(config)
    # `eval` makes the data and index of the 500 questions, if they do not exist.
    words = ["eval", "grpo", "--preset", "pocket", "--seed", str(config.seed), "data.test=500"]
    figures: dict[str, Any] = {"seed": config.seed}
    for name, options in EVALUATIONS.items():
        model = paths.start_model if name == "before" else model_folder(checkpoint)
        out = paths.root / "evals" / f"{run.path.name}-{name}"
        command = [*AGENT, *words, "--model", str(model), *options, "--out", str(out)]
        subprocess.run(command, check=True)
        figures[name] = read_card(out / "1.json")
    return figures | {"code": json.loads(run.code.read_text())}


def read_card(file: Path) -> dict[str, Any]:
    """Return the figures of an eval card that the table shows."""
    card = json.loads(file.read_text())
    figures = {
        "questions": card["n"],
        "em": card["em"],
        "interval": [round(bound, 3) for bound in card["em_ci95"]],
        "calls": card["mean_tool_calls"],
        "of_and_right": {
            kind: [of["n"], round(of["n"] * of["em"])] for kind, of in card["by_kind"].items()
        },
        "machine": card["hardware"],
    }
    reliability = card.get("reliability")
    if reliability:
        figures["samples"] = reliability["samples"]
        figures["right"] = reliability["right"]
    return figures


def question_values(run: dict[str, Any], column: str) -> list[float]:
    """Return the value of each question in a column of the table."""
    name, measure = COLUMNS[column]
    evaluation = run[name]
    if measure != "em":
        return values_of(evaluation, measure)
    n = evaluation["questions"]
    right = round(n * evaluation["em"])
    return [1.0] * right + [0.0] * (n - right)


def group_score(of_and_right: dict[str, list[int]], names: tuple[str, ...]) -> str:
    """Return `52 of 61` for the kinds of question that begin with `names`."""
    members = [counts for kind, counts in of_and_right.items() if kind.startswith(names)]
    return f"{sum(right for _, right in members)} of {sum(of for of, _ in members)}"


def table(seeds: dict[str, dict[str, Any]]) -> str:
    """Return the table: a line for each seed, then mean and interval."""
    runs = [seeds[number] for number in sorted(seeds, key=int)]
    values = {column: [question_values(run, column) for run in runs] for column in COLUMNS}
    lines = ["| seed | " + " | ".join([*COLUMNS, *GROUPS]) + " |"]
    lines.append("|---" * (1 + len(COLUMNS) + len(GROUPS)) + "|")
    for i, run in enumerate(runs):
        scores = [f"{fmean(values[column][i]):.3f}" for column in COLUMNS]
        groups = [group_score(run["after"]["of_and_right"], names) for names in GROUPS.values()]
        lines.append(line(str(run["seed"]), [*scores, *groups]))
    no_groups = [""] * len(GROUPS)
    means = [f"{fmean(map(fmean, values[column])):.3f}" for column in COLUMNS]
    lines.append(line("mean", [*means, *no_groups]))
    bounds = [interval_over_runs(values[column], same_questions=False) for column in COLUMNS]
    intervals = [f"{low:.3f} to {high:.3f}" for low, high in bounds]
    lines.append(line("95 % interval", [*intervals, *no_groups]))
    return "\n".join(lines)


def main(names: list[str]) -> None:
    """Evaluate the runs of these names, and print the table of all."""
    runs = Workspace(load_config("pocket", [], algorithm="grpo"))
    for name in names:
        figures = evaluate(RunDir(runs.run(name)))
        keep_seed(FILE, {}, figures["seed"], figures)
    print(table(read_seeds(FILE)))


if __name__ == "__main__":
    main(sys.argv[1:])
