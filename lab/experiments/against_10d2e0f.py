"""Train the preset `laptop` of commit 10d2e0f, and compare it with today's `sprint`.

git worktree add OLD 10d2e0f
python -m lab.experiments.against_10d2e0f COMMIT OLD --only 0 1 2
python -m lab.experiments.against_10d2e0f --table

COMMIT froze the settings of `sprint`; its seeds are those of docs/lab/sprint.json. The old source
trains with this environment, one thread, and an empty home. Today's code then evaluates its last
weights: 500 questions of the seed's test world, greedily and eight times at three temperatures. The
figures are in docs/lab/10d2e0f.json. Run it while today's seeds run on the other core: then CPU
seconds compare.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.experiments import ten_seeds
from lab.experiments.seed_files import keep_seed, read_seeds

FILE = ten_seeds.FILE.with_name("10d2e0f.json")
NEW = ten_seeds.FILE.with_name("sprint.json")
"""Of the same seeds with the preset `sprint`."""
TEMPERATURES = ("1", *ten_seeds.LOWER)


def measure(seed: int, home: Path, old: Path) -> dict[str, Any]:
    """Train one seed with the old source, and evaluate its weights with today's."""
    os.environ["AGENT_R1_HOME"] = str(home)
    config = ["--preset", "laptop", "--seed", str(seed), "grpo"]
    os.environ["PYTHONPATH"] = f"{old / 'src'}:{old}"
    seconds = 0.0
    for stage in ("data", "index", "cold-start"):
        seconds += ten_seeds.run_stage(stage, *config)[1]
    seconds += ten_seeds.run_stage("train", *config, "--run", "old", "--plain")[1]
    del os.environ["PYTHONPATH"]
    model = max((home / "runs" / "old" / "checkpoints").glob("step_*")) / "model"
    words = ["--model", str(model), *config]
    out = home / "greedy"
    ten_seeds.run_stage("eval", *words, "--samples", "1", "--temperature", "0", "--out", str(out))
    return {
        "seed": seed,
        "cpu_seconds": round(seconds, 1),
        "greedy": json.loads((out / "1.json").read_text())["em"],
        "after_at": {t: ten_seeds.sample_tests(home, words, t) for t in TEMPERATURES},
    }


def compare(name: str, pairs: list[tuple[float, float]]) -> str:
    """Return a line of the table: both means, and the difference's paired 95 % interval."""
    differences = [new - old for old, new in pairs]
    middle = fmean(differences)
    half = ten_seeds.half_width(differences)
    old, new = (fmean(column) for column in zip(*pairs, strict=True))
    return f"| {name} | {old:.3f} | {new:.3f} | {middle - half:+.3f} to {middle + half:+.3f} |"


def pairs_of_runs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the old and the new run of each seed that both files have."""
    olds = read_seeds(FILE)
    news = read_seeds(NEW)
    return [(olds[i], news[i]) for i in sorted(olds) if "after_at" in news.get(i, {})]


def table() -> str:
    """Return the comparison of scores over the seeds that both files have."""
    both = pairs_of_runs()
    lines = ["| | 10d2e0f | sprint | difference, 95 % |", "|---|---|---|---|"]
    for temperature in TEMPERATURES:
        for figure in ("pass^8", "pass@8"):
            pairs = []
            for old, new in both:
                cards = {"1": new["after"]} | new["after_at"]
                pairs.append((old["after_at"][temperature][figure], cards[temperature][figure]))
            lines.append(compare(f"{figure} at temperature {temperature}", pairs))
    greedy = [(old["greedy"], new["after"]["greedy"]) for old, new in both]
    return "\n".join([*lines, compare("greedy EM", greedy)])


def describe_seconds() -> str:
    """Return the mean ratio of CPU seconds, with its 95 % interval over seeds."""
    ratios = []
    for old, new in pairs_of_runs():
        seconds = new["cpu_seconds"]
        ratios.append((seconds["start"] + seconds["train"]) / old["cpu_seconds"])
    return f"CPU seconds, as a ratio: {fmean(ratios):.2f} ({ten_seeds.interval(ratios)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commit", nargs="?", help="full hash of the commit that froze the settings")
    parser.add_argument("old", nargs="?", type=Path, help="a checkout of 10d2e0f")
    parser.add_argument("--only", type=int, nargs="+", default=range(5), metavar="I")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for i in () if arguments.table else arguments.only:
        if str(i) in read_seeds(FILE):
            continue
        with tempfile.TemporaryDirectory() as home:
            seed = ten_seeds.seed_of(arguments.commit, i)
            facts = measure(seed, Path(home), arguments.old.resolve())
        keep_seed(FILE, {"commit": arguments.commit}, i, facts)
        print(json.dumps(facts), flush=True)
    if len(read_seeds(FILE)) > 1:  # one has no interval
        print(table(), describe_seconds(), sep="\n\n")


if __name__ == "__main__":
    main()
