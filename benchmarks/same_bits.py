"""Check that training is bit-identical before and after a change of structure.

    python -m benchmarks.same_bits record /tmp/before          small seeds 0 to 4 (grpo) and 0, 1
                                                               (ppo); discover, smoke 0
    python -m benchmarks.same_bits check /tmp/before small-0   the same runs by this checkout,
                                                               compared with those

Compared: every key of metrics.jsonl but clock readings, the weights that RL starts from, every file
in rollouts/, and eval.json. Left out: seconds, and the names of artefacts and configurations, which
change with every new setting (`NOT_COMPARED`). Bits depend on the CPU and on PyTorch, so use one
machine. A run of small takes about a minute, discover about six.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUNS = [*(f"small-{seed}" for seed in range(5)), "small-0-ppo", "small-1-ppo"]
RUNS += ["discover-0", "smoke-0"]
CLOCKS = ("timing_s/", "perf/")
NEWER = ("val-aux/",)
"""Prefixes of metrics that older recordings lack: validation by kind. Its mean is compared."""
NOT_COMPARED = {
    "seconds", "wall_seconds", "time_to_agent", "date", "machine", "versions", "config_hash",
    "data", "index", "code", "model", "start_model", "retriever",
    # Recordings of commits up to 10d2e0f have one sample of each question. The first of the eight
    # is that sample, so `sampled` is compared.
    "reliability",
    # The score of each question is newer, too. Its mean, `em`, is compared.
    "question_scores", "questions_hash",
}  # fmt: skip


def play(name: str, home: Path) -> None:
    """Train and evaluate `PRESET-SEED` or `PRESET-SEED-ALGORITHM` in the new folder `home`."""
    preset, seed, *algorithm = name.split("-")
    home.mkdir(parents=True)
    words = [*(algorithm or ["grpo"]), "--preset", preset, "--seed", seed]
    env = os.environ | {"AGENT_R1_HOME": str(home), "OMP_NUM_THREADS": "1"}
    for command in (
        ["train", *words, "--plain", "trainer.threads=1"],
        ["eval", *words, "trainer.threads=1"],
    ):
        subprocess.run(
            [sys.executable, "-m", "agent_r1", *command],
            env=env,
            check=True,
            stdout=subprocess.DEVNULL,
        )


def facts(home: Path) -> dict[str, Any]:
    """Return what is compared of a run: name -> plain values."""
    [run] = (home / "runs").iterdir()
    [start] = (home / "artifacts").glob("cold-start-*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {f"metrics of step {i}": _clean(line) for i, line in enumerate(lines, 1)}
    found["weights at step 0"] = hashlib.sha256(
        (start / "model.safetensors").read_bytes()
    ).hexdigest()
    for file in sorted((run / "rollouts").iterdir()):
        found[f"rollouts/{file.name}"] = [
            _clean(json.loads(line)) for line in file.read_text().splitlines()
        ]
    return found | {"eval.json": _clean(json.loads((run / "eval.json").read_text()))}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {
            key: item
            for key, item in value.items()
            if key not in NOT_COMPARED and not key.startswith(CLOCKS + NEWER)
        }
        return {key: _clean(item) for key, item in kept.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def difference(before: Any, after: Any, place: str) -> str | None:
    """Return the first place at which two plain values differ, or None."""
    if before == after:
        return None
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        found = (difference(before.get(k), after.get(k), f"{place}: {k}") for k in keys)
        # A new key of a card that is None says as little as no key.
        return next(filter(None, found), None)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return next(filter(None, (difference(a, b, f"{place}[{i}]") for i, (a, b) in pairs)))
    return f"{place}: {before!r:.60} before, {after!r:.60} now"


def main(command: str, folder: str, *names: str) -> int:
    differ = 0
    for name in names or RUNS:
        if command == "record":
            play(name, Path(folder) / name)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            play(name, Path(scratch) / "home")
            found = difference(facts(Path(folder) / name), facts(Path(scratch) / "home"), name)
        print(found or f"{name}: the same", flush=True)
        differ += found is not None
    return differ


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
