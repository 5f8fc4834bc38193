"""CONTRIBUTING.md, followed to the letter on a copy of the source tree: what it adds is offered,
trained with, and works."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from runs import ROOT, lines
from test_architecture import deep

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
STEP = re.compile(r"`(recipes/\S+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
SETTINGS = ["median", "--recipe=frugal", "trainer.threads=1", "trainer.device=cpu"]

TRAINING = """
import asyncio, sys
from conftest import ScriptedPolicy, call
from agent_r1 import Sampling, Task, Workspace, load_config, make_loop
from agent_r1.app.cli import main
from agent_r1.chat.tokenizer import load_chat
from agent_r1.workspace import Workspace

for stage in ("data", "index", "cold-start", "train"):
    assert main([stage, *sys.argv[1:]]) == 0
config = load_config("frugal", sys.argv[3:], algorithm="median")
chat = load_chat(Workspace(config).cold_start)
policy = ScriptedPolicy(chat, [call("add", a=1.5, b=2), "<answer>3.5</answer>"])
loop = make_loop(policy, chat, Workspace(config).load_tools(), config.rollout, config.env)
task = Task(Workspace(config).load_rows("train")[0], "g", "s")
first, second = asyncio.run(loop.run(task, Sampling(64))).steps
print(chat.decode(first.observation_ids))
print(first.info["tool_calls"][0]["content"], first.reward)
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources with the recipe of the page in it."""
    for name in ("src", "recipes"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    section = PAGE.split("### A recipe in full\n")[1].split("\n## ")[0]
    steps = STEP.findall(section)
    assert len(steps) == section.count("```") / 2, "a step that names no place"
    for path, code in steps:
        assert not (tmp_path / path).exists()
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    return tmp_path


@pytest.mark.slow
def test_what_is_added_by_following_the_steps_is_trained_with(tree):
    ruff = [Path(sys.prefix) / "bin" / "ruff", "check", "--no-cache", "src", "recipes"]
    checked = subprocess.run(ruff, cwd=tree, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert not set().union(*map(deep, (tree / "recipes/frugal").glob("*.py")))  # public names only
    path = os.pathsep.join([str(tree / "src"), str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path, "AGENT_R1_HOME": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINING, *SETTINGS]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    # The preset: its name, its four steps, the preset small beneath it.
    run = tree / "runs" / "frugal-median"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["preset"], config["algorithm"], config["env"]["name"]) == (
        "frugal",
        "median",
        "frugal",
    )
    assert len(lines(run)) == config["trainer"]["steps"] == 4 and config["search"]["top_k"] == 2

    # The estimator: in each step, every sampled token has what its formula gives for the group. The
    # environment: its price.
    moved = paid = 0
    for file in sorted((run / "rollouts").glob("step_*.jsonl")):
        groups = defaultdict(list)
        for record in map(json.loads, file.read_text().splitlines()):
            groups[record["group_id"]].append(record)
            calls = sum(len(step["info"].get("tool_calls", ())) for step in record["steps"])
            assert record["reward"] == pytest.approx(
                sum(record["reward_parts"].values()) - 0.05 * calls
            )
            paid += calls
        for members in groups.values():
            for record in members:
                others = [other["reward"] for other in members if other is not record]
                expected = record["reward"] - statistics.median_low(others)
                moved += abs(expected) > 1e-6
                for row in record["rows"]:
                    wanted = [expected * sampled for sampled in row["action_mask"]]
                    assert row["advantages"] == pytest.approx(wanted, abs=1e-5)
    assert moved and paid

    # The tool: offered beside the other one, and called.
    prompt, _, result = done.stdout.strip().rpartition("\n")
    assert "search(" in prompt and "add(" in prompt and result == "3.5 -0.05"
