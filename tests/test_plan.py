"""`agent-r1 train --dry-run` tells what would happen, and nothing happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import TINY, main

from agent_r1.config import Config, from_yaml, load_config
from agent_r1.plan import estimates, matmul_rate
from agent_r1.stages import Places

TITLES = (
    "data", "index", "start model", "evaluation before", "training", "evaluation after", "report",
)  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def plan(capsys, *argv: str) -> tuple[dict[str, tuple[str, Path]], str]:
    """Stage to (done or to do, place), and all that was said."""
    assert main("train", *argv, "--dry-run") == 0
    said = capsys.readouterr().out
    rows = re.findall(rf"^({'|'.join(TITLES)}) +(done|to do) +(.+)$", said, re.MULTILINE)
    return {title: (state, Path(place)) for title, state, place in rows}, said


def test_nothing_is_done_and_nothing_is_made(home, tmp_path, capsys):
    stages, said = plan(capsys, "grpo", "--preset", "smoke", "--run", "mine", "trainer.threads=1")
    assert tuple(stages) == TITLES
    assert {state for state, _ in stages.values()} == {"to do"}
    assert stages["training"][1] == home / "runs" / "mine" / "checkpoints" / "step_000032"
    assert list(tmp_path.iterdir()) == []


def test_the_printed_configuration_is_the_resolved_one(home, tmp_path, capsys):
    _, said = plan(capsys, *TINY, "ppo", "actor.lr=0.125", "--seed=7")
    file = tmp_path / "printed.yaml"
    file.write_text(said.split("\n\n")[0])
    assert from_yaml(file) == load_config("smoke", [*TINY[1:], "actor.lr=0.125"], algorithm="ppo", seed=7)


def test_what_is_there_is_done(home, capsys):
    config = load_config("smoke", TINY[1:], algorithm="grpo")
    run = Places.of(config).run("smoke-grpo")
    for path in (Places.of(config).data, Places.of(config).start_model, run / "checkpoints" / "step_000008"):
        path.mkdir(parents=True)
    (run / "eval.json").touch()
    stages, _ = plan(capsys, "grpo", *TINY)
    done = {title for title, (state, _) in stages.items() if state == "done"}
    assert done == {"data", "start model", "training", "evaluation after"}


def figures(config: Config) -> list[float]:
    """Parameters, MiB of memory, MiB of disk, seconds a step, minutes in all."""
    text = "\n".join(estimates(config))
    patterns = (
        r"([\d.]+) M parameters",
        r"memory +([\d.]+) MiB",
        r"disk +([\d.]+) MiB",
        r"([\d.]+) s a step",
        r"([\d.]+) min",
    )
    return [float(re.search(pattern, text)[1]) for pattern in patterns]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_estimates_are_positive_and_of_the_right_size(algorithm):
    config = load_config("laptop", ["trainer.threads=1"], algorithm=algorithm)
    parameters, memory, disk, step, minutes = figures(config)
    assert 0.3 < parameters < 1
    assert 50 < memory < 1300 and 5 < disk < 100
    assert 0.1 < step < 60
    assert minutes == pytest.approx(config.trainer.steps * step / 60, rel=0.1, abs=0.1)


def test_a_critic_and_a_reference_cost_memory():
    def memory(algorithm, *settings):
        return figures(
            load_config("laptop", ["trainer.threads=1", "model.hidden_size=256", *settings], algorithm=algorithm)
        )[1]

    same = "rollout.prompts_per_step=128"
    assert (
        memory("grpo")
        < memory("grpo", "actor.kl_coef=0.1")
        < memory("ppo", same)
        < memory("ppo", same, "rollout.slots=512")
    )


def test_the_matmul_rate_is_one_of_this_planet():
    import torch

    assert 1e8 < matmul_rate("cpu", torch.float32) < 1e15


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--preset=smok"], 2, "did you mean 'smoke'"),
        (["--run=../x"], 2, "plain folder name"),
        (["model.path=/nowhere"], 1, "/nowhere"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(home, tmp_path, capsys, argv, code, said):
    assert main("train", *argv, "--dry-run") == code
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
