"""Write the tables of pages that have their figures in a JSON file.

    python -m lab.experiments.logbooks            write every table
    python -m lab.experiments.logbooks --check    print the tables that differ; exit code 1 if any

In: the records of docs/lab, of lab/experiments and of recipes/browser. Out: the text between
`<!-- NAME: begin -->` and `<!-- NAME: end -->` in the pages. tests/test_logbooks.py compares them.
Figures of a page without such marks have no record, so nothing can make them again.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from agent_r1.ground.files import write_whole
from agent_r1_recipes.race.race import Arm
from agent_r1_recipes.race.stair import Climb
from lab.experiments import (
    agents_learn,
    claims,
    credit_race,
    discover_controls,
    growth,
    pocket,
    race,
    sharpened,
    smoke_controls,
    start_success,
    ten_seeds,
)
from lab.experiments.agents_learn import share
from lab.experiments.seed_files import read_seeds
from lab.experiments.sharpened import KINDS

ROOT = Path(__file__).parents[2]
LAB = ROOT / "docs" / "lab"
BEFORE_AFTER = (
    "| what | seeds | untrained (after the cold start) | trained | interval or range | command, "
    "machine | page |\n|---|---|---|---|---|---|---|\n"
)


class Frozen(NamedTuple):
    """A preset whose seeds follow from the commit that froze it (ten_seeds.py)."""

    what: str
    algorithm: str
    episodes: int
    """Of a step."""
    questions: int
    """Of the test."""
    words: str
    """After the commit, in the command."""
    machine: str
    page: str


FROZEN = {
    "sprint": Frozen(
        "sprint of commit 9405dcb5", "grpo", 128, 500, " --preset sprint",
        "EPYC, one thread, another run on the other core", "../laptop.md#results",
    ),
    "sprint-ppo": Frozen(
        "sprint of commit 9405dcb5", "ppo", 128, 2000,
        " --preset sprint --algorithm ppo data.test=2000 trainer.eval_samples=1 --only $(seq 0 19)",
        "EPYC (the last six: Xeon), one thread, two runs at a time", "laptop.md#bad-seeds-of-ppo",
    ),
    "smoke": Frozen(
        "smoke", "grpo", 192, 300, " --preset smoke",
        "EPYC, one thread, other work on both cores", "../laptop.md#results",
    ),
    "smoke-1": Frozen(
        "smoke of commit a46fa6be (a planner with a habit)", "grpo", 96, 300, " --preset smoke",
        "EPYC without AVX-512, two runs at a time", "laptop.md#smoke-on-every-seed",
    ),
    "small": Frozen(
        "small", "grpo", 96, 300, " --preset small --only 0 1 2 3",
        "machine not recorded", "laptop.md#smoke-on-every-seed",
    ),
    "discover": Frozen(
        "discover", "grpo", 256, 500, " --temperatures",
        "EPYC, one thread, other work on both cores", "../discover.md",
    ),
    "shuffled": Frozen(
        "shuffled", "grpo", 256, 500, " --preset shuffled --only 0 1 2 --temperatures",
        "Xeon, one thread, two runs at a time",
        "../discover.md#it-reads-two-to-six-passages",
    ),
    "shuffled-1": Frozen(
        "shuffled of commit edbb71b9 (two pairs of copying heads)", "grpo", 256, 500,
        " --preset shuffled --only 0 1 --temperatures", "Xeon, one thread, two runs at a time",
        "../discover.md#it-reads-two-to-six-passages",
    ),
    "discover-3": Frozen(
        "discover of commit 891798ba (100 steps)", "grpo", 256, 500, " --temperatures",
        "EPYC, one thread, other work on both cores", "../discover.md",
    ),
    "discover-2": Frozen(
        "discover of commit 723b5b93 (three passages in a result)", "grpo", 256, 500,
        " --temperatures", "EPYC, one thread, another run on the other core", "../discover.md",
    ),
}  # fmt: skip
"""Name of the record -> what it is of."""
TUTORIALS = {
    "questions": ("own questions, each with a text", "your-own-data.md#an-example"),
    "class": ("a plain class", "your-own-environment.md#1-a-plain-class"),
    "words": ("an environment without tools", "your-own-environment.md"),
    "gym": ("a Gymnasium environment", "../../recipes/gym/README.md"),
    "mcp": ("an MCP server", "../../recipes/mcp/README.md#an-example"),
}
"""Task of the rehearsal `tutorials` -> what it is, and its page, from docs/tutorial."""


def read(name: str) -> Any:
    return json.loads((LAB / name).read_text())


def mean_and_interval(values: list[float]) -> str:
    """Format a mean with its 95 % interval over seeds."""
    low, high = ten_seeds.interval(values).split(" to ")
    return f"{share(fmean(values))} ({share(float(low))} to {share(float(high))})"


# -------------------------------------------------------------------------------- before and after


def frozen_row(name: str) -> str:
    """Return the row of a preset whose seeds follow from a commit."""
    frozen = FROZEN[name]
    record = read(f"{name}.json")
    seeds = list(record["seeds"].values())
    before = [seed["before"]["greedy"] for seed in seeds]
    after = [seed["after"]["greedy"] for seed in seeds]
    [steps] = {seed["steps"]["steps"] for seed in seeds}
    episodes = f"{steps} steps ({steps * frozen.episodes:,} episodes)"
    bounds = mean_and_interval(after).split("(")[1].removesuffix(")")
    command = f"python -m lab.experiments.ten_seeds {record['commit']}{frozen.words}"
    return (
        f"| {frozen.what}, {frozen.algorithm}, {episodes} | {len(seeds)} hashes | "
        f"{share(fmean(before))} | {share(fmean(after))} | {bounds} over seeds; worst "
        f"{share(min(after))} | `{command}`, {frozen.machine} | [page]({frozen.page}) |"
    )


def pocket_row() -> str:
    """Return the row of the pretrained model."""
    seeds = list(read_seeds(pocket.FILE).values())
    before = ", ".join(share(seed["before"]["em"]) for seed in seeds)
    after = [seed["after"]["em"] for seed in seeds]
    interval = mean_and_interval(after)
    mean, bounds = interval.split(" (")
    return (
        f"| pocket (SmolLM2-135M), grpo | 0 to {len(seeds) - 1} | {before} (100 questions) | "
        f"{', '.join(map(share, after))} (500) | mean {mean}, {bounds.removesuffix(')')} over "
        "seeds | `agent-r1 train grpo --preset pocket --seed 0 trainer.threads=1` and the others, "
        "`python -m lab.experiments.pocket`, Xeon: 97 to 115 min a seed for warm start and RL, a "
        "run a core | [pocket](../../recipes/pocket/README.md) |"
    )


def agent_rows() -> list[str]:
    """Return a row for each agent that learns TinyHop, ours and two with other libraries."""
    seeds = read_seeds(LAB / "agents_learn.json")
    page = "[gateway](../../recipes/gateway/README.md#what-to-expect)"
    rows = []
    for arm in agents_learn.arms_of(Path()):
        after = ", ".join(share(results[arm]["em"]) for results in seeds.values())
        rows.append(
            f"| sprint of commit 3acf9e67, 20 steps (2,560 episodes), agent: {arm} | "
            f"{', '.join(seeds)} | | {after} | "
            "500 questions a seed | `python -m lab.experiments.agents_learn 0 1 2`, EPYC, busy | "
            f"{page} |"
        )
    return rows


def browser_row() -> str:
    """Return the row of the runs in a web page."""
    runs = json.loads((ROOT / "recipes" / "browser" / "measured.json").read_text())
    healthy = [run for name, run in runs.items() if name.startswith("healthy/")]
    scores = [run["em_greedy"] for run in healthy]
    before = share(healthy[0]["before"]["em_greedy"])
    return (
        f"| the trainer of a web page, 40 steps | 1 to {len(scores)} | {before} | "
        f"{share(fmean(scores))} | {share(min(scores))} to {share(max(scores))}; 300 questions | "
        "`python -m agent_r1_recipes.browser.measure`, machines as on the page | "
        "[browser](../../recipes/browser/README.md) |"
    )


def tutorial_rows() -> list[str]:
    """Return a row for each tutorial that a rehearsal trains."""
    figures = read("long/tutorials.json")["figures"]
    rows = []
    for name, (title, page) in TUTORIALS.items():
        before, after = figures[f"{name}_before"], figures[f"{name}_after"]
        link = page if page.startswith("../..") else f"../tutorial/{page}"
        rows.append(
            f"| tutorial: {title} | three | {share(before)} | {share(after)} | mean test score, "
            "sampled at temperature 1 | `python -m lab.rehearsals tutorials`, Xeon | "
            f"[page]({link}) |"
        )
    return rows


def before_after() -> str:
    """Return the rows of experiments.md that have a record."""
    rows = [*map(frozen_row, FROZEN), pocket_row(), *agent_rows(), browser_row()]
    return BEFORE_AFTER + "\n".join([*rows, *tutorial_rows()])


def leaderboard() -> str:
    """Return the rows of today's presets: mean, least and greatest over seeds."""
    lines = ["| preset, algorithm | seeds | n | test EM before | after: mean (least to greatest) |"]
    lines[0] += " settings frozen at |"
    lines.append("|---|---|---|---|---|---|")
    for name, frozen in FROZEN.items():
        record = read(f"{name}.json")
        seeds = list(record["seeds"].values())
        after = [seed["after"]["greedy"] for seed in seeds]
        before = fmean(seed["before"]["greedy"] for seed in seeds)
        lines.append(
            f"| {frozen.what}, {frozen.algorithm} | {len(seeds)} | {frozen.questions:,} | "
            f"{share(before)} | "
            f"{share(fmean(after))} ({share(min(after))} to {share(max(after))}) | "
            f"[{record['commit'][:8]}]({name}.json) |"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------- discover and smoke


def by_hops(name: str) -> str:
    """Return a frozen preset's EM by number of searches, with mean and worst."""
    seeds = list(read(f"{name}.json")["seeds"].values())
    lines = ["| seed | EM before RL: 1, 2, 3 hops | after: 1, 2, 3 hops | all: before | after |"]
    lines.append("|---" * 5 + "|")
    columns = [(when, kind) for when in ("before", "after") for kind in KINDS]
    values = {(w, k): [seed[w]["kinds"][k] for seed in seeds] for w, k in columns}
    values |= {(w, "all"): [seed[w]["greedy"] for seed in seeds] for w in ("before", "after")}

    def row(title: str, figure: Callable[[list[float]], float]) -> str:
        cells = [
            ", ".join(share(figure(values[when, kind])) for kind in KINDS)
            for when in ("before", "after")
        ]
        cells += [share(figure(values[when, "all"])) for when in ("before", "after")]
        return f"| {title} | {' | '.join(cells)} |"

    for place, seed in enumerate(seeds):
        lines.append(row(str(seed["seed"]), operator.itemgetter(place)))
    return "\n".join([*lines, row("mean", fmean), row("worst", min)])


def conditions(kind: str, title: str, numbers: tuple[int, ...], name: str = "discover") -> str:
    """Return how a frozen preset fares in worlds that training did not have."""
    seeds = list(read(f"{name}.json")["seeds"].values())
    lines = [f"| {title} | {' | '.join(map(str, numbers))} |", "|---" * (len(numbers) + 1) + "|"]
    scores: dict[str, list[list[float]]] = {}
    for when in ("before", "after"):
        scores[when] = [
            [seed[when]["conditions"][f"{kind} {number}"] for seed in seeds] for number in numbers
        ]
        cells = " | ".join(map(mean_and_interval, scores[when]))
        lines.append(f"| EM {when} RL, mean (95 % across seeds) | {cells} |")
    worst = " | ".join(share(min(values)) for values in scores["after"])
    return "\n".join([*lines, f"| worst seed | {worst} |"])


# --------------------------------------------------------------------------------------- the pages


def growth_table(factor: str) -> str:
    return growth.tables(ROOT / "lab" / "experiments" / "growth.jsonl")[factor]


def credit_race_runs(stage: str) -> dict[str, Any]:
    """Return the runs of a stage of the race in Stop."""
    return read("race/credit.json")[stage]["runs"]


def tinyhop_race_table(*records: str, seconds: str = "") -> str:
    """Return the arms in records of `agent-r1 race --json` as a table."""
    climbs: dict[str, dict[int, Climb]] = {}
    for record in records:
        for word, lines in read(f"race/{record}.json")["stair"]["arms"].items():
            arm = Arm.parse(word)
            settings = [setting.partition(".")[2] for setting in arm.settings]
            for line in lines:
                by_seed = climbs.setdefault(" ".join([arm.algorithm, *settings]), {})
                by_seed[line["seed"]] = Climb.from_record(line)
    return credit_race.climb_table(climbs, "three hops at the end", seconds)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/answer-key.md": {
        "exact/claims.json": lambda: claims.table(read("exact/claims.json")),
        "race/credit.json, tune": lambda: credit_race.table(credit_race_runs("tune")),
        "race/credit.json, screen": lambda: credit_race.table(credit_race_runs("screen")),
        "race/credit.json, final": lambda: credit_race.table(credit_race_runs("final")),
        "race/tinyhop-tune.json": lambda: tinyhop_race_table("tinyhop-trials", "tinyhop-tune"),
        "race/tinyhop-screen.json": lambda: tinyhop_race_table("tinyhop-screen"),
        "race/tinyhop-final.json": lambda: tinyhop_race_table(
            "tinyhop-final", seconds="s of training a run"
        ),
    },
    "docs/discover.md": {
        "discover-controls.json": lambda: discover_controls.table(
            read_seeds(discover_controls.FILE)
        ),
        "discover-controls-2.json": lambda: discover_controls.table(
            read_seeds(LAB / "discover-controls-2.json")
        ),
        "discover.json, passages": lambda: conditions(
            "passages", "passages in every result", (2, 3, 4, 6)
        ),
        "discover.json, hops": lambda: conditions("hops", "hops", (4, 5)),
        "shuffled.json": lambda: by_hops("shuffled"),
        "shuffled.json, passages": lambda: conditions(
            "passages", "passages, the right one first", (2, 3, 4, 6), "shuffled"
        ),
        "shuffled-1.json": lambda: by_hops("shuffled-1"),
        "smoke-controls.json": lambda: smoke_controls.table(read_seeds(smoke_controls.FILE)),
        "smoke-starts.json": lambda: start_success.table(read_seeds(start_success.FILE)),
    },
    "docs/lab/estimators.md": {
        f"race/{preset}.json": lambda preset=preset: race.table(read(f"race/{preset}.json"))
        for preset in ("small", "laptop", "tinyquest")
    },
    "docs/lab/experiments.md": {"records": before_after},
    "docs/lab/growth.md": {
        f"growth.jsonl, {factor}": lambda factor=factor: growth_table(factor)
        for factor in growth.FACTORS
    },
    "docs/laptop.md": {"smoke.json": lambda: by_hops("smoke")},
    "docs/lab/laptop.md": {
        "sprint.json": lambda: ten_seeds.table(read_seeds(LAB / "sprint.json")),
        "smoke-1.json": lambda: ten_seeds.table(read_seeds(LAB / "smoke-1.json")),
    },
    "docs/lab/leaderboard.md": {"records": leaderboard},
    "docs/lessons/12-the-start.md": {
        "sharpened.json": lambda: sharpened.table(read_seeds(sharpened.FILE))
    },
    "recipes/gateway/README.md": {
        "agents_learn.json": lambda: agents_learn.table(read_seeds(LAB / "agents_learn.json"))
    },
}
"""Page -> name of a pair of marks -> what makes the text between them."""


def fill(text: str, name: str, table: str) -> str:
    """Put a table between its marks. Raise ValueError if the page has them not exactly once."""
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last) or begin in rest or end in after:
        raise ValueError(f"the page must have `{begin.strip()}` and `{end.strip()}` once")
    return f"{before}{begin}\n{table}\n{end}{after}"


def page_of(page: str) -> str:
    """Return a page's text with the tables of today's records."""
    text = (ROOT / page).read_text()
    for name, table in TABLES[page].items():
        text = fill(text, name, table())
    return text


def main(words: list[str]) -> int:
    """Write the pages, or print the names of those that differ."""
    stale = [page for page in TABLES if page_of(page) != (ROOT / page).read_text()]
    for page in stale:
        print(page)
        if words != ["--check"]:
            write_whole(ROOT / page, page_of(page))
    return int(bool(stale) and words == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
