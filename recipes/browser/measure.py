"""Measure each switch of the page: `python -m agent_r1_recipes.browser.measure`.

In: the switches of js/switches.js, and seeds. Out: measured.json, with the figures of each step and
the hash of the final weights; and the table of README.md, which the page shows, too. A run takes
about a CPU minute. Runs that the file has are not repeated; `--table` only writes the table.
`--scratch` measures healthy runs from random weights, which begin with a cold start. `--longer`
measures a healthy run that goes on twice, as the page's button does.
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
STEPS = 40
HEALTHY_SEEDS = (1, 2, 3, 4, 5)
"""Their spread is the measure of what hurts."""
HELD_BACK = (6, 7, 8)
"""Seeds on which switches are judged."""
QUESTIONS = 300

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
  return { right: answers.reduce((sum, { em }) => sum + em, 0), hops: byHops(answers) };
};
tell(score(job.questions));
for (const { switches, seed, ends, scratch } of job.runs) {
  trainer.reset(start);
  let cpu = 0;
  let began = cpuSeconds();
  let taught = {};
  if (scratch) {
    const cold = new ColdStart(trainer, agent, await unpackPlays(job.plays), seed, { switches });
    let loss = 0;
    for (let found = {}; !found.done; ) loss = (found = cold.takeStep()).loss;
    cpu += cpuSeconds() - began;
    taught = { loss, cpu, hash: trainer.weightsHash(), ...score(job.questions) };
    trainer.reset(trainer.weights());
  }
  const [figures, parts] = [[], []];
  let state = null;
  for (const end of ends) {
    began = cpuSeconds();
    const learner = new Learner(trainer, agent, header.train, { steps: end, switches }, seed);
    if (state) learner.restore(state);
    while (learner.step < end) figures.push((await learner.takeStep()).figures);
    state = learner.state();
    cpu += cpuSeconds() - began;
    parts.push({ end, cpu, hash: trainer.weightsHash(), ...score(job.questions) });
  }
  tell({ figures, parts, taught });
}
"""
FIGURES = ("reward", "em", "gap", "kl", "clipped", "trained", "zero", "norm")
LONGER = (40, 80, 120)
"""Ends of a run that goes on twice."""


def run_name(switch: str, seed: int, scratch: bool = False) -> str:
    return f"{switch}@random/{seed}" if scratch else f"{switch}/{seed}"


def measure(
    world_bytes: bytes,
    switch: str,
    seed: int,
    plays: bytes = b"",
    ends: tuple[int, ...] = (STEPS,),
) -> dict[str, Any]:
    """Run a switch (or `healthy`) with a seed; with demonstrations, from random weights."""
    run = {
        "switches": [] if switch == "healthy" else [switch],
        "seed": seed,
        "ends": ends,
        "scratch": bool(plays),
    }
    job = {
        "runs": [run],
        "questions": QUESTIONS,
        "plays": base64.b64encode(plays).decode(),
    }
    start, line = run_node(RUN, job, world_bytes)
    steps: dict[str, Any] = {}
    for name in FIGURES:
        steps[name] = [round(step[name], 4) for step in line["figures"]]
    steps["hops"] = [_rounded(step["hops"]) for step in line["figures"]]
    *before_end, end = [_card(part) for part in line["parts"]]
    result = {**end, "before": _card(start), **steps}
    if before_end:
        result["earlier"] = before_end
    if plays:
        lesson = line["taught"]
        result["before"] = _card(lesson) | {"loss": round(lesson["loss"], 4)}
    return result


def _card(part: dict[str, Any]) -> dict[str, Any]:
    """Return hash and CPU seconds, where they are known, and greedy scores."""
    card: dict[str, Any] = {}
    if "hash" in part:
        card |= {"hash": part["hash"], "cpu_seconds": round(part["cpu"], 1)}
    em = round(part["right"] / QUESTIONS, 4)
    return card | {"em_greedy": em, "hops_greedy": _rounded(part["hops"])}


def _rounded(hops: list[float | None]) -> list[float | None]:
    """Round the scores of each kind; a step may ask no question of a kind."""
    return [None if em is None else round(em, 4) for em in hops]


# ---------------------------------------------------------------------------------------- the table

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
BEGIN_SCRATCH, END_SCRATCH = "<!-- from random weights -->", "<!-- end of from random weights -->"
BEGIN_SEEDS, END_SEEDS = "<!-- seeds -->", "<!-- end of seeds -->"
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


def compare_switches(runs: dict[str, Any], shows: dict[str, str]) -> list[dict[str, Any]]:
    """Compare each switch with the healthy runs of its seeds. `shows` names its figure."""
    rows = []
    for switch, figure in shows.items():
        names = [(run_name(switch, s), run_name("healthy", s)) for s in HELD_BACK]
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
    for row in compare_switches(runs, shows):
        numbers = ", ".join(f"{difference:+.2f}" for difference in row["differences"])
        change = f"{NAMES[row['figure']]}: {row['broken']:.2g}"
        if row["figure"] != "kl":  # a healthy run has no reference model
            change += f" instead of {row['healthy']:.2g}"
        hurts = "yes" if row["hurts"] else "no"
        lines.append(f"| {titles[row['switch']]} | {numbers} | {hurts} | {change} |")
    missing = [one["title"] for one in switches if run_name(one["name"], HELD_BACK[0]) not in runs]
    text = "\n".join(lines) + f"\n\nTwice the standard deviation is {limit(runs):.3f}."
    if missing:
        text += "\n\nNot measured:\n\n" + "\n".join(f"- {title}" for title in missing)
    return text


def hops_text(scores: list[float]) -> str:
    """Write the scores of one, two and three searches."""
    return ", ".join(f"{score:.3f}" for score in scores)


def seeds_table(runs: dict[str, Any], scratch: bool = False) -> str:
    """Write what each healthy run reached, in Markdown: from the start, or from random weights."""
    lines = [
        "| seed | before: 1, 2, 3 searches | all | after: 1, 2, 3 searches | all |",
        "|---|---|---|---|---|",
    ]
    for seed in (*HEALTHY_SEEDS, *HELD_BACK):
        run = runs.get(run_name("healthy", seed, scratch))
        if run is None:
            continue  # not measured yet
        before = run["before"]
        lines.append(
            f"| {seed} | {hops_text(before['hops_greedy'])} | {before['em_greedy']:.3f} "
            f"| {hops_text(run['hops_greedy'])} | {run['em_greedy']:.3f} |"
        )
    return "\n".join(lines)


def with_tables(text: str, runs: dict[str, Any], switches: list[dict[str, str]]) -> str:
    """Put the tables into the text of README.md."""
    text_between = {
        (BEGIN, END): table(runs, switches),
        (BEGIN_SEEDS, END_SEEDS): seeds_table(runs),
        (BEGIN_SCRATCH, END_SCRATCH): seeds_table(runs, scratch=True),
    }
    for (begin, end), lines in text_between.items():
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{lines}\n\n{end}{rest.split(end)[1]}"
    return text


def write_table(switches: list[dict[str, str]]) -> None:
    """Put the tables into README.md."""
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
        measure_all([("healthy", seed) for seed in HELD_BACK], plays)
    elif "--longer" in sys.argv:
        measure_all([("healthy", HEALTHY_SEEDS[0])], ends=LONGER)
    elif "--table" not in sys.argv:
        jobs = [("healthy", seed) for seed in (*HEALTHY_SEEDS, *HELD_BACK)]
        for seed in HELD_BACK:
            jobs += [(one["name"], seed) for one in switches]
        measure_all(jobs)
    write_table(switches)


def measure_all(
    jobs: list[tuple[str, int]], plays: bytes = b"", ends: tuple[int, ...] = (STEPS,)
) -> None:
    """Measure what measured.json lacks."""
    world_bytes = world.pack(world.header())
    for switch, seed in jobs:
        records = json.loads(FILE.read_text()) if FILE.is_file() else {}
        name = run_name(switch, seed, bool(plays))
        if len(ends) > 1:
            name = name.replace("/", "@longer/")
        if name in records:
            continue
        run = measure(world_bytes, switch, seed, plays, ends)
        # Read again: another process may have added a run.
        records = json.loads(FILE.read_text()) if FILE.is_file() else {}
        records[name] = run
        write_whole(FILE, json.dumps(records, indent=1) + "\n")
        print(name, records[name]["reward"][-5:], flush=True)


if __name__ == "__main__":
    main()
