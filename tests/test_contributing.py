"""CONTRIBUTING.md, followed to the letter on a copy of the source tree: the tool is offered to the agent, and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from runs import ROOT

EPISODE = """
import asyncio, sys
from pathlib import Path

from conftest import ScriptedPolicy, call
import agent_r1
from agent_r1.cli import main
from agent_r1.config import load_config
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.episode import Task, make_loop
from agent_r1.types import Sampling
from agent_r1.workspace import load_rows, load_tools
from agent_r1.training.cold_start import tokenizer_texts
from agent_r1.training.tiny_model import train_tokenizer

assert Path(agent_r1.__file__).is_relative_to(sys.argv[1])
for stage in ("data", "index"):
    assert main([stage, "--preset=smoke", *sys.argv[2:]]) == 0
config = load_config("smoke", sys.argv[2:])
chat = ChatFormat(train_tokenizer(tokenizer_texts(config.data.mix, config.seed), 384))
row = load_rows(config, "train")[0]
policy = ScriptedPolicy(chat, [call("add", a=1.5, b=2), "<answer>3.5</answer>"])
loop = make_loop(policy, chat, load_tools(config), config.rollout, config.env)
trajectory = asyncio.run(loop.run(Task(row, "g", "s"), Sampling(64)))
first, second = trajectory.steps
print(chat.decode(first.observation_ids))
print(first.info["tool_calls"][0]["content"])
"""


def section(text: str, title: str) -> str:
    return re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def test_a_tool_is_added_by_following_the_steps(tmp_path):
    text = section((ROOT / "CONTRIBUTING.md").read_text(), "A tool in full")
    code, imported, named = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    paths = re.findall(r"`(src/agent_r1/tool/\w+\.py)`", text)
    assert len(paths) == 2
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / paths[0]).write_text(code)
    names = tmp_path / paths[1]
    source = names.read_text()
    first_import, table = source.index("from agent_r1.tool"), source.index("TOOLS: dict")
    end = source.index("\n}", table) + 1
    names.write_text(source[:first_import] + imported + source[first_import:end] + named + source[end:])

    ruff = [Path(sys.prefix) / "bin" / "ruff", "check", "--no-cache", "src/agent_r1/tool"]
    checked = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout

    settings = [
        "data.train=16",
        "data.val=4",
        "data.test=4",
        "data.cold=4",
        "data.entities=60",
        "data.cold_entities=60",
    ]
    settings += ["search.dim=256", "env.tools=[search,add]", "rollout.prompts_per_step=4"]
    path = os.pathsep.join([str(tmp_path / "src"), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path, "AGENT_R1_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    command = [sys.executable, "-c", EPISODE, str(tmp_path), *settings]
    played = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert played.returncode == 0, played.stderr
    prompt, _, result = played.stdout.strip().rpartition("\n")
    assert "search" in prompt and "add(" in prompt and result == "3.5"
