"""Measure each switch of the page: `python -m agent_r1_recipes.browser.measure`.

In: the switches of js/switches.js, and seeds. Out: measured.json, with the rewards of each step,
the hash of the final weights, and the score of the healthy runs; `--table` compares them. A
run takes about 25 CPU seconds. Runs that the file has are not repeated, and every bit of a repeated
run is the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_r1 import write_whole
from agent_r1_recipes.browser import world
from agent_r1_recipes.browser.node import run_node

FILE = Path(__file__).with_name("measured.json")
STEPS = 20
HEALTHY_SEEDS = (1, 2, 3, 4, 5)
"""Their spread is the measure of what hurts."""
HELD_BACK = (6, 7, 8)
"""Seeds on which switches are judged."""
QUESTIONS = 500

LIST = "tell(Object.keys(SWITCHES));"
RUN = """
const cpuSeconds = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};
const { trainer, agent, header, start } = session;
for (const { switches, seed, steps, questions } of job.runs) {
  trainer.reset(start);
  const began = cpuSeconds();
  const learner = new Learner(trainer, agent, header.train, { steps, switches }, seed);
  const figures = [];
  for (let step = 0; step < steps; step++) figures.push(learner.takeStep().figures);
  const cpu = cpuSeconds() - began;
  const answers = answerGreedily(trainer, agent, header.test.slice(0, questions));
  const right = answers.reduce((sum, { em }) => sum + em, 0);
  tell({ figures, cpu, right, hash: trainer.weightsHash() });
}
"""
FIGURES = ("reward", "em", "gap", "kl", "clipped", "trained", "zero", "norm")


def run_name(switch: str, seed: int) -> str:
    return f"{switch}/{seed}"


def measure(data: bytes, switch: str, seed: int) -> dict[str, Any]:
    """Run a switch (or `healthy`) with a seed."""
    run = {
        "switches": [] if switch == "healthy" else [switch],
        "seed": seed,
        "steps": STEPS,
        "questions": QUESTIONS if switch == "healthy" else 0,
    }
    [found] = run_node(RUN, {"runs": [run]}, data)
    steps: dict[str, list[float]] = {}
    for name in FIGURES:
        steps[name] = [round(step[name], 4) for step in found["figures"]]
    result = {"hash": found["hash"], "cpu_seconds": round(found["cpu"], 1), **steps}
    if switch == "healthy":
        result["em_greedy"] = found["right"] / QUESTIONS
    return result


def main() -> None:
    """Measure what measured.json lacks."""
    data = world.pack(world.header())
    [switches] = run_node(LIST, {})
    wanted = [("healthy", seed) for seed in (*HEALTHY_SEEDS, *HELD_BACK)]
    for seed in HELD_BACK:
        wanted += [(switch, seed) for switch in switches]
    for switch, seed in wanted:
        known = json.loads(FILE.read_text()) if FILE.is_file() else {}
        name = run_name(switch, seed)
        if name in known:
            continue
        known[name] = measure(data, switch, seed)
        write_whole(FILE, json.dumps(known, indent=1) + "\n")
        print(name, known[name]["reward"][-5:], flush=True)


if __name__ == "__main__":
    main()
