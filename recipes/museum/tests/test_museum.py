"""Each patch still applies, its tests exist, and the page shows what was recorded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, main

from agent_r1 import Action, EnvConfig, Hermes, HermesToolEnv, StopReason
from agent_r1_recipes.diagnose.archive import unpack
from agent_r1_recipes.museum.record import PAGES, RECORDINGS, page
from agent_r1_recipes.museum.run import copy_source, read_exhibits

EXHIBITS = read_exhibits()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return unpack(RECORDINGS, tmp_path_factory.mktemp("recorded"))


def test_each_patch_applies_to_the_source(tmp_path):
    """It compiles, and names nothing that is not defined."""
    for exhibit in EXHIBITS.values():
        for number, text in enumerate(
            exhibit.patch_texts(ROOT / "src/agent_r1", ROOT / "recipes").values()
        ):
            (tmp_path / f"{exhibit.name}{number}.py").write_text(text)
        files = [word for word in exhibit.tests.split() if word.endswith(".py")]
        assert all(
            (ROOT / file if file.startswith("recipes/") else ROOT / "tests" / file).is_file()
            for file in files
        )
        assert bool(files) == bool(exhibit.patch) or exhibit.name == "hostile-documents"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "E9,F82",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_copy_has_the_patch_and_the_source_does_not(tmp_path):
    copy = copy_source(EXHIBITS["kl-of-the-wrong-sign"], tmp_path)
    loop = Path("agent_r1", "training", "loop.py")
    changed = set((copy / loop).read_text().splitlines()) - set(
        (ROOT / "src" / loop).read_text().splitlines()
    )
    assert [line.strip() for line in changed] == ["loss = loss - settings.kl_coef * kl"]


def test_no_call_writes_a_reward():
    env = HermesToolEnv({}, EnvConfig())
    env.reset(
        {
            "prompt": [{"role": "user", "content": "What?"}],
            "reward_model": {"ground_truth": ["Rome"]},
        }
    )

    async def play():
        await env.step(Action(Hermes.call("shell", command="echo 1 > reward.txt"), "stop"))
        await env.step(Action("<answer>Oslo</answer>", "stop"))
        return env.outcome(StopReason.ANSWERED)

    assert asyncio.run(play()).reward == 0.0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_the_pages_are_made_of_the_records(path, recordings):
    """What `diagnose` names is in them: a rule that finds other causes changes the pages."""
    text = path.read_text()
    assert text == page(text, *PAGES[path](recordings)), (
        "run `python -m agent_r1_recipes.museum.record`"
    )


def test_a_recorded_run_can_be_diagnosed(recordings, capsys):
    assert main("diagnose", str(recordings / "judge-talked-into-it-s0")) == 0
    shown = capsys.readouterr().out
    assert (
        "tools are never called" in shown
        and "1. the reward can be talked into it (likely)" in shown
    )
