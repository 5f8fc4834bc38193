"""docs/first-gpu-agent.md: each command of the page is known to this project, and parses."""

from __future__ import annotations

import re
import subprocess

import pytest
from runs import ROOT

from agent_r1.cluster import plan
from agent_r1.config import load_config

PAGE = (ROOT / "docs" / "first-gpu-agent.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.strip().splitlines()
]
UBUNTU = {"git", "tmux", "build-essential", "python3.12-venv", "python3.12-dev"}
"""Packages of Ubuntu 24.04. Their names are stated here and were not looked up in its archive."""
ELSEWHERE = ("nvidia-smi", "apt-get", "tmux", "git clone URL", "cd agent-r1", "tar ")
"""Commands that need the rented machine or its network."""


def test_every_command_is_one_of_ours_or_of_the_rented_machine():
    assert len(COMMANDS) > 8
    for command in COMMANDS:
        ours = command.startswith(("bash speedrun-nodocker.sh", "bash inference.sh"))
        ours = ours or command.startswith(".venv-gpu/bin/agent-r1 ")
        assert ours or command.startswith(ELSEWHERE), command
        # A newly rented machine has no `agent-r1` on its PATH, and root there has no sudo.
        assert not command.startswith(("agent-r1", "sudo"))


def test_every_command_parses():
    for command in COMMANDS:
        parsed = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert (parsed.returncode, parsed.stderr) == (0, ""), command


def test_ubuntus_packages_are_the_stated_ones():
    [line] = [line for line in COMMANDS if line.startswith("apt-get install")]
    assert set(line.split()[3:]) == UBUNTU


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if line.startswith("bash speedrun-nodocker.sh")]
)
def test_the_scripts_of_the_page_take_their_words(command, tmp_path, monkeypatch):
    """As on a machine with a GPU and nothing installed: `--dry-run` checks the words."""
    monkeypatch.setenv("AGENT_R1_STACK", "gpu")
    monkeypatch.setenv("AGENT_R1_VENV", str(tmp_path / "none"))
    words = command.split()
    if "--dry-run" not in words:
        words.append("--dry-run")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "to do, install requirements/verl-gpu.txt" in done.stdout


@pytest.mark.parametrize(
    ("preset", "gpu", "shown"),
    [
        ("first-agent-1xh100", "H100", "1.1 to 2.2 h"),
        ("first-agent-1x24gb", "RTX-4090", "3.2 to 12.8 h on a 4090"),
        ("first-agent-1x24gb", "A10", "4.1 to 16.6 on an A10"),
        ("first-agent-1x24gb", "L4", "4.6 to 18.6 on an L4"),
    ],
)
def test_hours_are_those_of_the_plan(preset, gpu, shown):
    page = plan.gpu_plan(load_config(preset, [f"verl.gpu={gpu}"], algorithm="grpo"))
    low, high = re.search(r"^time +([\d.]+) to ([\d.]+) h", page, re.MULTILINE).groups()
    assert shown.startswith(f"{low} to {high}")
    assert shown in PAGE
    if gpu in ("H100", "RTX-4090"):
        readme = (ROOT / "README.md").read_text()
        [row] = [line for line in readme.splitlines() if f"`{preset}`" in line]
        assert f"by plan {low} to {high} h" in row
