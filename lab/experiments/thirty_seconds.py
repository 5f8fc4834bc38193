"""Measure how long the preset `sprint` takes to an agent, over several seeds.

python lab/experiments/thirty_seconds.py 301 302 303      one after the other, on an idle machine

The clock starts with the process of `agent-r1 train grpo --preset sprint`, which makes data, index
and cold start, too. It stops when the process prints that validation has reached .9: by then the
weights are on disk, and a chat can open them. Afterwards these weights are evaluated on the 500
questions of the seed's test world, about which there is no training question and no demonstration.
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


def train(seed: int) -> dict[str, Any]:
    """Train in AGENT_R1_HOME until there is an agent, at most to the last step."""
    run = ["grpo", "--preset", "sprint", "--seed", str(seed), "--run", "sprint"]
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
            # Ctrl-C: the step that has begun ends and is saved.
            process.send_signal(signal.SIGINT)
    process.wait()
    facts["cpu_seconds"] = round(children_seconds() - cpu, 1)
    return facts


def test_score(home: Path, step: int | None) -> float:
    """Return the test EM of the checkpoint of `step`, or of the last one."""
    folder = home / "runs" / "sprint" / "checkpoints"
    checkpoint = folder / f"step_{step:06d}" if step else max(folder.glob("step_*"))
    out = home / "cards"
    command = [*AGENT, "eval", "--model", str(checkpoint / "model"), "--out", str(out)]
    subprocess.run([*command, "--samples", "1"], check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "1.json").read_text())["em"]


def main() -> None:
    """Print one line of JSON for each seed, and the median and worst seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seeds", type=int, nargs="+")
    os.environ["PYTHONUNBUFFERED"] = "1"
    times = []
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["AGENT_R1_HOME"] = folder
            facts = train(seed)
            facts["test_em"] = test_score(Path(folder), facts["step"])
        times.append(facts["seconds"] or float("inf"))
        print(json.dumps(facts), flush=True)
    print(f"seconds to an agent: median {median(times)}, worst {max(times)}")


if __name__ == "__main__":
    main()
