"""Measure each switch of the page: `python -m agent_r1_recipes.browser.measure`.

In: the switches of js/switches.js, and seeds. Out: measured.json, with the figures of each step and
the hash of the final weights; and the table of README.md, which the page shows, too. A run takes
about 25 CPU seconds. Runs that the file has are not repeated; `--table` only writes the table.
`--scratch` measures runs from random weights, which begin with a cold start of five to ten CPU
minutes: healthy ones, and one switch that acts in the cold start.
"""

from __future__ import annotations

import base64
import json
import statistics
import sys
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
EM_OF_START = 0.362
"""Greedy exact match of the shipped start on the same questions."""
SCRATCH = ("healthy", "stop-token-untrained")
"""Measured from random weights, too."""

LIST = """
tell(Object.entries(SWITCHES).map(([name, { title, shows }]) => ({ name, title, shows })));
"""
RUN = """
const cpuSeconds = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};
const { trainer, agent, header, start } = session;
const score = (count) => {
  const answers = answerGreedily(trainer, agent, header.test.slice(0, count));
  return answers.reduce((sum, { em }) => sum + em, 0);
};
for (const { switches, seed, steps, questions, scratch } of job.runs) {
  trainer.reset(start);
  const began = cpuSeconds();
  let taught = {};
  if (scratch) {
    const cold = new ColdStart(trainer, agent, await unpackPlays(job.plays), seed, { switches });
    let loss = 0;
    for (let found = {}; !found.done; ) loss = (found = cold.takeStep()).loss;
    const cpu = cpuSeconds() - began;
    taught = { loss, cpu, hash: trainer.weightsHash(), right: score(questions) };
    trainer.reset(trainer.weights());
  }
  const learner = new Learner(trainer, agent, header.train, { steps, switches }, seed);
  const figures = [];
  for (let step = 0; step < steps; step++) figures.push((await learner.takeStep()).figures);
  const cpu = cpuSeconds() - began;
  tell({ figures, cpu, right: score(questions), hash: trainer.weightsHash(), taught });
}
"""
FIGURES = ("reward", "em", "gap", "kl", "clipped", "trained", "zero", "norm")


def run_name(switch: str, seed: int, scratch: bool = False) -> str:
    return f"{switch}@random/{seed}" if scratch else f"{switch}/{seed}"


def measure(world_bytes: bytes, switch: str, seed: int, plays: bytes = b"") -> dict[str, Any]:
    """Run a switch (or `healthy`) with a seed; with demonstrations, from random weights."""
    run = {
        "switches": [] if switch == "healthy" else [switch],
        "seed": seed,
        "steps": STEPS,
        "questions": QUESTIONS if switch == "healthy" or plays else 0,
        "scratch": bool(plays),
    }
    [line] = run_node(RUN, {"runs": [run], "plays": base64.b64encode(plays).decode()}, world_bytes)
    steps: dict[str, list[float]] = {}
    for name in FIGURES:
        steps[name] = [round(step[name], 4) for step in line["figures"]]
    result = {"hash": line["hash"], "cpu_seconds": round(line["cpu"], 1), **steps}
    if run["questions"]:
        result["em_greedy"] = line["right"] / QUESTIONS
    if plays:
        lesson = line["taught"]
        result["cold_start"] = {
            "hash": lesson["hash"],
            "cpu_seconds": round(lesson["cpu"], 1),
            "loss": round(lesson["loss"], 4),
            "em_greedy": lesson["right"] / QUESTIONS,
        }
    return result


# ---------------------------------------------------------------------------------------- the table

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
BEGIN_SCRATCH, END_SCRATCH = "<!-- from random weights -->", "<!-- end of from random weights -->"
NAMES = {
    "gap": "gap between sampler and trainer",
    "kl": "log-ratio to the start model",
    "clipped": "tokens beyond the clip",
    "trained": "tokens with a loss",
    "zero": "attempts that teach nothing",
    "reward": "mean reward",
    "em": "right answers",
    "norm": "norm of the gradient",
}


def last_five(run: dict[str, Any]) -> float:
    """Return the mean reward of the last five steps."""
    return statistics.mean(run["reward"][-5:])


def limit(runs: dict[str, Any]) -> float:
    """Return twice the standard deviation between the healthy runs."""
    return 2 * statistics.stdev(last_five(runs[run_name("healthy", s)]) for s in HEALTHY_SEEDS)


def compare_switches(
    runs: dict[str, Any], shows: dict[str, str], scratch: bool = False
) -> list[dict[str, Any]]:
    """Compare each switch with the healthy runs of its seeds. `shows` names its figure."""
    rows = []
    for switch, figure in shows.items():
        names = [(run_name(switch, s, scratch), run_name("healthy", s, scratch)) for s in HELD_BACK]
        names = [pair for pair in names if runs.keys() >= set(pair)]
        if not names:
            continue  # not measured yet
        faulty_runs = [runs[name] for name, _ in names]
        healthy = [runs[name] for _, name in names]
        pairs = zip(faulty_runs, healthy, strict=True)
        differences = [last_five(run) - last_five(other) for run, other in pairs]
        rows.append(
            {
                "switch": switch,
                "differences": differences,
                "hurts": all(difference < -limit(runs) for difference in differences),
                "figure": figure,
                "broken": statistics.mean(statistics.mean(run[figure]) for run in faulty_runs),
                "healthy": statistics.mean(statistics.mean(run[figure]) for run in healthy),
            }
        )
    return rows


def table(runs: dict[str, Any], switches: list[dict[str, str]]) -> str:
    """Write the comparison in Markdown."""
    titles = {one["name"]: one["title"] for one in switches}
    lines = [
        "| switch | reward of the last five steps, minus healthy | hurts | what shows it |",
        "|---|---|---|---|",
    ]
    shows = {one["name"]: one["shows"] for one in switches}
    # In the cold start the untrained stop token shows in the reward: turns do not end.
    cold = compare_switches(runs, {SCRATCH[1]: "reward"}, scratch=True)
    for row in compare_switches(runs, shows) + cold:
        numbers = ", ".join(f"{difference:+.2f}" for difference in row["differences"])
        change = f"{NAMES[row['figure']]}: {row['broken']:.2g}"
        if row["figure"] != "kl":  # a healthy run has no reference model
            change += f" instead of {row['healthy']:.2g}"
        hurts = "yes" if row["hurts"] else "no"
        title = titles[row["switch"]] + (", from random weights" if row in cold else "")
        lines.append(f"| {title} | {numbers} | {hurts} | {change} |")
    missing = [one["title"] for one in switches if run_name(one["name"], HELD_BACK[0]) not in runs]
    text = "\n".join(lines) + f"\n\nTwice the standard deviation is {limit(runs):.3f}."
    return text + (f" Not measured: {', '.join(missing)}." if missing else "")


def scratch_table(runs: dict[str, Any]) -> str:
    """Write what became of random weights, in Markdown."""
    lines = [
        "| seed | EM after the cold start | EM after 20 steps | CPU seconds: cold start, all |",
        "|---|---|---|---|",
    ]
    for seed in HELD_BACK:
        run = runs.get(run_name("healthy", seed, scratch=True))
        if run is None:
            continue  # not measured yet
        cold = run["cold_start"]
        seconds = f"{cold['cpu_seconds']:.0f}, {run['cpu_seconds']:.0f}"
        lines.append(f"| {seed} | {cold['em_greedy']:.3f} | {run['em_greedy']:.3f} | {seconds} |")
    return "\n".join(lines)


def with_tables(text: str, runs: dict[str, Any], switches: list[dict[str, str]]) -> str:
    """Put both tables into the text of README.md."""
    text_between = {
        (BEGIN, END): table(runs, switches),
        (BEGIN_SCRATCH, END_SCRATCH): scratch_table(runs),
    }
    for (begin, end), lines in text_between.items():
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{lines}\n\n{end}{rest.split(end)[1]}"
    return text


def write_table(switches: list[dict[str, str]]) -> None:
    """Put both tables into README.md."""
    runs = json.loads(FILE.read_text())
    write_whole(README, with_tables(README.read_text(), runs, switches))


def list_switches() -> list[dict[str, str]]:
    """Return name, title and revealing figure of each switch, from js/switches.js."""
    [switches] = run_node(LIST, {})
    return switches


def main() -> None:
    """Measure what measured.json lacks, and write the table."""
    switches = list_switches()
    if "--scratch" in sys.argv:
        plays = world.pack_plays(world.describe_plays())
        measure_all([(switch, seed) for seed in HELD_BACK for switch in SCRATCH], plays)
    elif "--table" not in sys.argv:
        jobs = [("healthy", seed) for seed in (*HEALTHY_SEEDS, *HELD_BACK)]
        for seed in HELD_BACK:
            jobs += [(one["name"], seed) for one in switches]
        measure_all(jobs)
    write_table(switches)


def measure_all(jobs: list[tuple[str, int]], plays: bytes = b"") -> None:
    """Measure what measured.json lacks."""
    world_bytes = world.pack(world.header())
    for switch, seed in jobs:
        records = json.loads(FILE.read_text()) if FILE.is_file() else {}
        name = run_name(switch, seed, bool(plays))
        if name in records:
            continue
        records[name] = measure(world_bytes, switch, seed, plays)
        write_whole(FILE, json.dumps(records, indent=1) + "\n")
        print(name, records[name]["reward"][-5:], flush=True)


if __name__ == "__main__":
    main()
