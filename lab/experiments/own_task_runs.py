"""Run 24 own tasks, half of them broken, and keep what diagnose reads.

    python -m lab.experiments.own_task_runs             # all; finished runs are only read
    python -m lab.experiments.own_task_runs class-lr    # some

In: own_task_worlds.py. Out: recipes/diagnose/tests/own_tasks.zip, a folder for each run with its
config, metrics and some episodes, without ids and log-probabilities. The six kinds of tasks are
those that newcomers brought; each kind has two healthy runs and two broken ones. The test of
recipes/diagnose names the runs that its rules were tuned on. The memorised starts need the cold
start of the commit that recorded them, before it held demonstrations out.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent_r1_recipes.diagnose.archive import pack, unpack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ARCHIVE = ROOT / "recipes/diagnose/tests/own_tasks.zip"
WORLDS = HERE / "own_task_worlds.py"
SERVER = HERE / "own_task_server.py"
GROUPS = 3
"""Groups to keep of each recorded step."""
STEPS = 10
"""At least twice the five steps that diagnose averages."""

COMMON = (
    f"trainer.steps={STEPS}",
    "trainer.eval_every=0",
    f"trainer.save_every={STEPS}",
    f"trainer.rollouts_every={STEPS - 1}",
    "trainer.threads=1",
    "trainer.device=cpu",
    "rollout.prompts_per_step=6",
    "rollout.samples_per_prompt=6",
    "data.train=160",
    "data.val=16",
    "data.test=16",
    "actor.lr=2e-4",
    "cold_start.copy_steps=60",
    "cold_start.mix_steps=30",
    "cold_start.copy_tokens=512",
    "cold_start.mix_tokens=512",
)


def name_code(*pairs: str) -> list[str]:
    """Turn `env.name=Doors` into a setting that names it in own_task_worlds.py."""
    settings = []
    for pair in pairs:
        key, name = pair.split("=")
        settings.append(f"{key}={WORLDS}:{name}")
    return settings


KINDS: dict[str, list[str]] = {
    "questions": [
        "env.name=hermes",
        "env.tools=[]",
        "env.max_turns=1",
        "data.name=rows",
        "data.source=questions.jsonl",
        *name_code("cold_start.demonstrator=play_question"),
    ],
    "class": [
        "env.tools=[]",
        "env.max_turns=4",
        *name_code(
            "env.name=Doors", "data.name=key_questions", "cold_start.demonstrator=play_doors"
        ),
    ],
    "gym": [
        "env.tools=[]",
        "env.max_turns=6",
        *name_code(
            "env.name=Walk", "data.name=corridor_questions", "cold_start.demonstrator=play_walk"
        ),
    ],
    "native": [
        "env.tools=[]",
        "env.max_turns=3",
        *name_code(
            "env.name=Words", "data.name=word_questions", "cold_start.demonstrator=play_words"
        ),
    ],
    "mcp": [
        "env.tools=[prices]",
        "env.tool_timeout_s=60",  # on a busy machine
        f'env.mcp.prices="{sys.executable} {SERVER}"',
        *name_code("data.name=price_questions", "cold_start.demonstrator=play_price"),
    ],
    "tools": [
        f"env.tools=[{WORLDS}:price,{WORLDS}:double]",
        *name_code("data.name=pair_questions", "cold_start.demonstrator=play_pair"),
    ],
}
"""Kind of own task -> its settings."""

# 30 demonstrations, each learnt by heart.
FEW_QUESTIONS = ["data.train=30", "cold_start.copy_steps=80", "cold_start.mix_steps=120"]
SHORT_TURNS = ["rollout.max_tokens_per_turn=2"]
LARGE_STEPS = ["actor.lr=1e-2"]
GUESSES = name_code("cold_start.demonstrator=play_guess")
FAILS = name_code("cold_start.demonstrator=play_broken_price")
FAULTS: dict[str, list[str]] = {
    "questions-memorised": FEW_QUESTIONS,
    "questions-cut": SHORT_TURNS,
    "class-lr": LARGE_STEPS,
    "class-unseeded": name_code("env.name=DoorsBroken"),
    "gym-unseeded": name_code("env.name=WalkBroken"),
    "gym-lr": LARGE_STEPS,
    "native-cut": ["rollout.max_tokens_per_turn=1"],
    "native-memorised": FEW_QUESTIONS,
    "mcp-fails": [f'env.mcp.prices="{sys.executable} {SERVER} broken"', *FAILS],
    "mcp-no-calls": GUESSES,
    "tools-no-calls": GUESSES,
    "tools-fail": [f"env.tools=[{WORLDS}:price_broken,{WORLDS}:double]", *FAILS],
}
"""Broken run -> the settings that break it, after those of its kind."""


def plan() -> dict[str, tuple[list[str], int]]:
    """List each run's settings and seed, by name."""
    runs = {}
    for kind, settings in KINDS.items():
        for seed in (0, 1):
            runs[f"{kind}-healthy-{seed}"] = ([*COMMON, *settings], seed)
    for name, changes in FAULTS.items():
        settings = KINDS[name.split("-")[0]]
        runs[name] = ([*COMMON, *settings, *changes], 0)
    return runs


def train(name: str, settings: list[str], seed: int, folder: Path) -> Path:
    """Train one run in `folder`, unless it is finished. Return its run folder."""
    run = folder / "runs" / name
    if not (run / "checkpoints" / f"step_{STEPS:06d}").exists():
        folder.mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, str(HERE))
        from own_task_worlds import list_questions

        lines = [json.dumps(row) + "\n" for row in list_questions()]
        (folder / "questions.jsonl").write_text("".join(lines))
        command = [sys.executable, "-m", "agent_r1", "train", "grpo", "--preset", "small"]
        command += ["--run", name, "--seed", str(seed), "--plain", *settings]
        environment = os.environ | {"AGENT_R1_HOME": str(folder)}
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(
                command, cwd=folder, env=environment, stdout=log, stderr=log, check=False
            )
    return run


def shorten(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def keep(run: Path, target: Path) -> None:
    """Write a run's config, metrics and some groups of each recorded step to `target`."""
    (target / "rollouts").mkdir(parents=True, exist_ok=True)
    config = (run / "config.yaml").read_text()
    for place, name in ((f"{HERE}/", ""), (f"{run.parents[1]}/", ""), (sys.executable, "python")):
        config = config.replace(place, name)
    (target / "config.yaml").write_text(config)
    lines = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(text)
        lines.append({key: shorten(value) for key, value in record.items()})
    write(target / "metrics.jsonl.gz", lines)
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        records = [json.loads(text) for text in file.read_text().splitlines()]
        groups = list(dict.fromkeys(record["group_id"] for record in records))[:GROUPS]
        kept_records = []
        for record in records:
            if record["group_id"] in groups:
                kept_records.append(shorten_record(record))
        write(target / "rollouts" / f"{file.name}.gz", kept_records)


def shorten_record(record: dict[str, Any]) -> dict[str, Any]:
    """Leave out ids, log-probabilities and values of an episode."""
    rows = []
    for row in record["rows"]:
        short = {"tokens": row["tokens"], "action_mask": row["action_mask"]}
        for key in ("rewards", "advantages"):
            short[key] = [shorten(value) for value in row[key]]
        rows.append(short)
    return record | {"rows": rows}


def write(file: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
    file.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))


def main() -> None:
    folder = Path(os.environ.get("AGENT_R1_HOME", ".")) / "own_tasks"
    records = unpack(ARCHIVE, folder / "recorded")
    runs = plan()
    for name in sys.argv[1:] or runs:
        settings, seed = runs[name]
        run = train(name, settings, seed, folder.absolute())
        if not (run / "metrics.jsonl").exists():
            print(f"{name}: no run; see {folder / f'{name}.log'}")
            continue
        keep(run, records / name)
        pack(records, ARCHIVE)
        scores = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rewards = [f"{line['critic/score/mean']:.2f}" for line in scores]
        print(f"{name}: {' '.join(rewards)}", flush=True)


if __name__ == "__main__":
    main()
