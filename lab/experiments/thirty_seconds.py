"""Measure how long the preset `sprint` takes to an agent, over several seeds.

python lab/experiments/thirty_seconds.py 301 302 303      one after the other, on an idle machine

The clock starts with the process of `agent-r1 train grpo --preset sprint`, which makes data, index
and cold start, too. It stops when the process prints that validation has reached .9: by then the
weights are on disk, and a chat can open them. Afterwards these weights are evaluated on the 500
questions of the seed's test world, which nothing has read before. With `--whole` the run goes on to
its last step, and that checkpoint is evaluated instead, with eight samples a question.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

AGENT = [sys.executable, "-m", "agent_r1"]
FOUND = re.compile(r"an agent: greedy validation ([.\d]+) at step (\d+)")


def children_seconds() -> float:
    """Return the CPU seconds of all finished children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(seed: int, settings: list[str], whole: bool) -> dict[str, Any]:
    """Train in AGENT_R1_HOME, until there is an agent or to the end."""
    run = ["grpo", "--preset", "sprint", "--seed", str(seed), "--run", "sprint", *settings]
    facts: dict[str, Any] = {"seed": seed, "seconds": None, "step": None, "validation": None}
    cpu = children_seconds()
    start = time.perf_counter()
    process = subprocess.Popen(
        [*AGENT, "train", *run, "--plain"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        found = FOUND.search(line)
        if found and facts["seconds"] is None:
            facts["seconds"] = round(time.perf_counter() - start, 1)
            facts["validation"] = float(found[1])
            facts["step"] = int(found[2])
            if not whole:
                # Ctrl-C: the step that has begun ends and is saved.
                process.send_signal(signal.SIGINT)
    process.wait()
    facts["whole_seconds"] = round(time.perf_counter() - start, 1)
    facts["cpu_seconds"] = round(children_seconds() - cpu, 1)
    return facts


def evaluate(home: Path, step: int | None, samples: int) -> dict[str, Any]:
    """Evaluate the checkpoint of `step`, or the last one, on the test questions."""
    folder = home / "runs" / "sprint" / "checkpoints"
    checkpoint = folder / f"step_{step:06d}" if step else max(folder.glob("step_*"))
    out = home / "cards"
    command = [*AGENT, "eval", "--model", str(checkpoint / "model"), "--out", str(out)]
    subprocess.run([*command, "--samples", str(samples)], check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "1.json").read_text())


def main() -> None:
    """Print one line of JSON for each seed, and the median and worst seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--whole", action="store_true", help="train to the last step")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting, such as trainer.steps=40"
    )
    options = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    times = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["AGENT_R1_HOME"] = folder
            facts = train(seed, options.set, options.whole)
            step = None if options.whole else facts["step"]
            card = evaluate(Path(folder), step, 8 if options.whole else 1)
        facts["test_em"] = card["em"]
        if options.whole:
            facts["reliability"] = card["reliability"]
        times.append(facts["seconds"] or float("inf"))
        print(json.dumps(facts), flush=True)
    print(f"seconds to an agent: median {median(times)}, worst {max(times)}")


if __name__ == "__main__":
    main()
