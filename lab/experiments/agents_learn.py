"""Let three agents learn TinyHop from one cold start: ours, `openai`, LangGraph.

python -m lab.experiments.agents_learn 0 1 2             three seeds, about 8 CPU minutes each
python -m lab.experiments.agents_learn --table           only print the table

The agents play through the gateway of recipes/gateway, unchanged. LangGraph gets an environment of
its own. All three begin with the weights of our loop's cold start (lab/laptop.yaml). Each trains
for STEPS steps on one thread, and answers 500 test questions greedily. The figures are kept in
docs/lab/agents_learn-laptop.json, and a seed that it has is not run again. The file
agents_learn.json is of a preset that is gone (`sprint` of commit 3acf9e67, 20 steps).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from agent_r1 import Workspace, load_config
from agent_r1.ground.machine import describe_machine
from lab.experiments.seed_files import keep_seed, read_seeds
from lab.experiments.ten_seeds import run_stage
from lab.rehearsals.agents import CLIENTS, install

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "lab" / "agents_learn-laptop.json"
PRESET = "lab/laptop.yaml"
STEPS = 40
SETTINGS = (f"trainer.steps={STEPS}", "trainer.eval_every=5", "trainer.eval_samples=1")
OPENAI = f"{ROOT}/recipes/gateway/example_agent.py:answer"
LANGGRAPH = f"{ROOT}/recipes/gateway/tests/clients/langgraph_agent.py:answer"


def arms_of(langgraph_python: Path) -> dict[str, list[str]]:
    """Return the options of each agent."""
    langgraph = ["--agent", LANGGRAPH, "--agent-python", str(langgraph_python)]
    return {"our loop": [], "openai": ["--agent", OPENAI], "langgraph": langgraph}


def measure(seed: int, home: Path, langgraph_python: Path) -> dict[str, Any]:
    """Train and evaluate the three agents in `home`."""
    os.environ["AGENT_R1_HOME"] = str(home)
    config = ["grpo", "--preset", PRESET, "--seed", str(seed)]
    for stage in ("data", "index", "cold-start"):
        run_stage(stage, *config)
    start = Workspace(load_config(PRESET, algorithm="grpo", seed=seed)).cold_start
    results: dict[str, Any] = {}
    for name, options in arms_of(langgraph_python).items():
        words = [*config, *options, *SETTINGS, f"model.path={start}"]
        run = name.replace(" ", "-")
        _, cpu = run_stage("train", *words, "--run", run, "--plain")
        run_stage("eval", *words, "--run", run)
        results[name] = read_run(home / "runs" / run) | {"train_cpu_seconds": cpu}
        print(f"seed {seed}, {name}: {json.dumps(results[name])}", flush=True)
    return results


def read_run(folder: Path) -> dict[str, Any]:
    """Return the test score of a run, and its validation scores by step."""
    card = json.loads((folder / "eval.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "val-core/tinyhop/acc/mean@1"
    validation = {line["training/global_step"]: line[key] for line in lines if key in line}
    return {"em": card["em"], "interval": card["em_ci95"], "validation": validation}


def table(seeds: dict[str, Any]) -> str:
    """Return the table of test scores, and of the steps until a validation of .9."""
    names = list(arms_of(Path()))
    lines = ["| seed | our loop | `openai` | LangGraph | steps to .90 |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for seed, results in sorted(seeds.items()):
        cells = []
        for name in names:
            low, high = results[name]["interval"]
            cells.append(f"{share(results[name]['em'])} ({share(low)} to {share(high)})")
        steps = [str(steps_to(results[name]["validation"])) for name in names]
        lines.append(f"| {seed} | {' | '.join(cells)} | {', '.join(steps)} |")
    return "\n".join(lines)


def share(value: float) -> str:
    """Format a share as pages do: .950, and 1.000."""
    return f"{value:.3f}".removeprefix("0")


def steps_to(validation: dict[str, float], score: float = 0.9) -> int:
    """Return the first step whose validation reached the score."""
    return min(int(step) for step, value in validation.items() if value >= score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--table", action="store_true")
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder) / "langgraph", CLIENTS["langgraph"]) if seeds else Path()
        for seed in seeds:
            if str(seed) not in read_seeds(FILE):
                results = measure(seed, Path(folder) / f"home-{seed}", python)
                about = {"machine": describe_machine(), "preset": PRESET, "steps": STEPS}
                keep_seed(FILE, about, seed, results)
    print(table(read_seeds(FILE)))


if __name__ == "__main__":
    main()
