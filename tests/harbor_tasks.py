"""Folders of Harbor tasks, for the tests of recipes/harbor and of what the core does with few
tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1 import AgentR1Error, load_config
from agent_r1_recipes.harbor.container import Container, check_container

DOCKERFILE = """# A comment.
FROM python:3.13-slim AS base
RUN apt-get update && apt-get install -y --no-install-recommends tmux \\
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
ENV KIND=sum
COPY numbers.txt .
RUN chmod 644 numbers.txt && mkdir made
CMD ["bash"]
"""
TEST = """#!/bin/bash
apt-get update
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then R=1; else R=0; fi
echo $R > /logs/verifier/reward.txt
"""
OUTPUTS = """from pathlib import Path

def test_sum():
    assert Path("/app/sum.txt").read_text().strip() == "42"
"""


def write_task(folder: Path, dockerfile: str = DOCKERFILE, test: str = TEST) -> Path:
    texts = {
        "task.toml": '[verifier]\ntimeout_sec = 60\nenv = {WORD = "w"}\n[environment]\ncpus = 1\n',
        "instruction.md": "Write the sum of the numbers to sum.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/numbers.txt": "4\n5\n33\n",
        "tests/test.sh": test,
        "tests/test_outputs.py": OUTPUTS,
        "solution/solve.sh": "awk '{s+=$1} END {print s}' /app/numbers.txt > /app/sum.txt\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def ten_tasks(folder: Path, count: int = 10) -> Path:
    for number in range(count):
        task = write_task(folder / f"task{number}", "FROM ubuntu\n")
        (task / "instruction.md").write_text(f"Write {number} to sum.txt.\n")
    return folder


def config_of(folder: Path, *settings: str):
    settings = (f"data.source={folder}", "data.harbor_engine=bubblewrap", *settings)
    return load_config("harbor", list(settings), trains=False)


def need_container() -> None:
    """Skip where bubblewrap starts no shell. A sandbox that starts and leaks is an error."""
    try:
        container = Container()
        started = container.call("true").code == 0
        container.remove()
    except AgentR1Error as error:
        pytest.skip(str(error))
    if not started:
        pytest.skip("bubblewrap starts no shell here")
    check_container()
