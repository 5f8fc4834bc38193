"""docs/what-stays.md promises names that exist, and sorts every command."""

from __future__ import annotations

import json
import re

import pytest
from runs import ROOT, main

from agent_r1.app.parser import COMMANDS

PAGE = (ROOT / "docs/what-stays.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def words(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_every_command_either_stays_or_may_change(capsys):
    stays, may_change = section("Commands").split("May change:")
    assert main("--help") == 0
    listed = capsys.readouterr().out
    commands = set(re.findall(r"^    ([a-z][a-z-]+)\b", listed, re.MULTILINE))
    assert set(COMMANDS) <= commands
    scripts = {"speedrun-nodocker.sh", "speedrun.sh", "inference.sh"}
    assert (words(stays) | words(may_change)) - scripts - {"agent-r1", "--help"} == commands
    assert not words(stays) & words(may_change)
    assert all((ROOT / script).exists() for script in scripts)


@pytest.mark.slow
def test_a_run_has_the_files_and_its_card_the_keys(smoke):
    home, _ = smoke
    [run_folder] = (home / "runs").iterdir()
    listed = section("Files of a run").split("([their content]")[0]
    for pattern in words(listed):
        assert list(run_folder.glob(pattern)), pattern
    card = json.loads((run_folder / "eval.json").read_text())
    keys = words(section("Keys of an eval card"))
    assert len(keys) > 20 and keys <= card.keys()
