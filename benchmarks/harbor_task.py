"""Time an honest episode of a Harbor task, here and in another checkout.

    PYTHONPATH=src:. .venv/bin/python -m benchmarks.harbor_task [--against CHECKOUT] [--rounds 10]

In: nothing. Out: milliseconds of an episode and of its parts, by wall and by processor time of all
processes. A round plays a few episodes in a fresh process of each checkout. Rounds alternate, and
so does the side that begins, because the load of a machine drifts.

The episode is that of recipes/harbor's own tests: a listing, a written solution, an edit, a run,
and two files read. Then pytest pays 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).parents[1]
TASK = {
    "task.toml": "[verifier]\ntimeout_sec = 60\n",
    "instruction.md": "Write the sum of the numbers to sum.txt.\n",
    "environment/Dockerfile": "FROM python:3.13-slim\nWORKDIR /app\nENV KIND=sum\n"
    "COPY numbers.txt .\nRUN mkdir made\n",
    "environment/numbers.txt": "4\n5\n33\n",
    "tests/test.sh": "uvx -p 3.13 -w pytest==8.4.1 pytest /tests/test_outputs.py -rA\n"
    "if [ $? -eq 0 ]; then R=1; else R=0; fi\necho $R > /logs/verifier/reward.txt\n",
    "tests/test_outputs.py": "def test_sum():\n"
    "    assert open('/app/sum.txt').read().strip() == '42'\n",
}
SOLUTION = "awk '{s+=$1} END {print s-1}' /app/numbers.txt > /app/sum.txt\n"


def seconds() -> tuple[float, float]:
    """Return the wall and the processor time of this process and of those that ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def play(episodes: int) -> list[dict[str, tuple[float, float]]]:
    """Play the task, and return the times of each episode's parts."""
    from agent_r1_recipes.harbor.env import HarborTask

    with tempfile.TemporaryDirectory() as folder:
        for name, text in TASK.items():
            place = Path(folder, "sum", name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        task = str(place.parents[1])
        world = HarborTask()
        world.reset(task)  # builds the task once, and probes the sandbox
        world.close()
        return [play_once(HarborTask(), task) for _ in range(episodes)]


def play_once(world: Any, task: str) -> dict[str, tuple[float, float]]:
    """Play one episode. Raises AssertionError unless it is paid."""
    times: dict[str, tuple[float, float]] = {}

    def timed(name: str, call: Callable[..., Any], *arguments: str) -> Any:
        wall, cpu = seconds()
        result = call(*arguments)
        wall_after, cpu_after = seconds()
        earlier = times.get(name, (0.0, 0.0))
        times[name] = (earlier[0] + wall_after - wall, earlier[1] + cpu_after - cpu)
        return result

    timed("reset", world.reset, task)
    timed("run", world.run, "ls -la; cat numbers.txt")
    timed("write", world.write, "solve.sh", SOLUTION)
    timed("edit", world.edit, "solve.sh", "s-1", "s")
    timed("run", world.run, "bash solve.sh")
    assert timed("read", world.read, "sum.txt") == "42\n"
    assert timed("read", world.read, "numbers.txt") == "4\n5\n33\n"
    assert timed("tests", world.get_reward) == 1.0
    timed("close", world.close)
    total = zip(*times.values(), strict=True)
    wall, cpu = (sum(column) for column in total)
    return times | {"episode": (wall, cpu)}


def run_round(checkout: Path, episodes: int) -> list[dict[str, tuple[float, float]]]:
    """Play in a fresh process that imports a checkout's source."""
    done = subprocess.run(
        [sys.executable, __file__, "--play", str(episodes)],
        env=os.environ | {"PYTHONPATH": str(checkout / "src")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--play", type=int, help="used by this program itself")
    options = parser.parse_args()
    if options.play:
        print(json.dumps(play(options.play)))
        return
    sides = {"here": ROOT} | ({"there": options.against} if options.against else {})
    rounds: dict[str, list[list[dict]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            rounds[name].append(run_round(sides[name], options.episodes))
    print("part, ms: wall and cpu (median)")
    for part in rounds["here"][0][0]:
        cells = []
        for name in sides:
            values = [episode[part] for played in rounds[name] for episode in played]
            wall, cpu = (1000 * median(column) for column in zip(*values, strict=True))
            cells.append(f"{name} {wall:.0f} {cpu:.0f}")
        print(f"{part:8s} {'   '.join(cells)}")
    if options.against:
        for column, kind in enumerate(("wall", "cpu")):
            means = {
                name: [fmean(episode["episode"][column] for episode in played) for played in side]
                for name, side in rounds.items()
            }
            ratios = [h / t for h, t in zip(means["here"], means["there"], strict=True)]
            print(f"here / there, {kind}: median of rounds {median(ratios):.3f}, all "
                  f"{' '.join(f'{ratio:.2f}' for ratio in ratios)}")  # fmt: skip


if __name__ == "__main__":
    main()
