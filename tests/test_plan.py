"""`agent-r1 train --dry-run` tells what would happen, and nothing happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import random_model
from runs import TINY, main

from agent_r1.cluster.plan import gpu_plan
from agent_r1.config import from_yaml, load_config
from agent_r1.ground import machine
from agent_r1.ground.shapes import Shape
from agent_r1.ground.units import GIB
from agent_r1.model.decoder import causal_attention
from agent_r1.training.plan_local import count_kept_numbers
from agent_r1.workspace import Workspace

TITLES = (
    "data",
    "index",
    "start model",
    "evaluation before",
    "training",
    "evaluation after",
    "report",
)


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
    words = [*TINY, "ppo", "--run", "mine", "actor.lr=0.125", "--seed=7"]
    stages, said = plan(capsys, *words)
    assert said.startswith("data ") and said.endswith("\n--verbose prints all settings\n")
    assert len(said.splitlines()) < 25
    stages, said = plan(capsys, *words, "--verbose")
    assert tuple(stages) == TITLES
    assert {state for state, _ in stages.values()} == {"to do"}
    assert stages["training"][1] == home / "runs" / "mine" / "checkpoints" / "step_000008"
    assert list(tmp_path.iterdir()) == []
    # The resolved configuration.
    (tmp_path / "printed.yaml").write_text(said.rstrip("\n").rpartition("\n\n")[2])
    expected = load_config("small", [*TINY[1:], "actor.lr=0.125"], algorithm="ppo", seed=7)
    assert from_yaml(tmp_path / "printed.yaml") == expected


def test_recorded_conversations_that_are_missing_are_refused(home, tmp_path, capsys):
    assert main("train", *TINY, "cold_start.episodes=log.jsonl", "--dry-run") == 1
    assert "cold_start.episodes=log.jsonl: there is no such file" in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_text("{}")
    assert main("train", *TINY, "cold_start.episodes=log.jsonl", "--dry-run") == 0


def test_what_is_there_is_done(home, capsys):
    config = load_config("small", TINY[1:], algorithm="grpo")
    run = Workspace(config).run("small-grpo")
    for path in (
        Workspace(config).data,
        Workspace(config).start_model,
        run / "checkpoints" / "step_000008",
    ):
        path.mkdir(parents=True)
    (run / "eval.json").touch()
    stages, _ = plan(capsys, "grpo", *TINY)
    done = {title for title, (state, _) in stages.items() if state == "done"}
    assert done == {"data", "start model", "training", "evaluation after"}


def number(pattern: str, text: str) -> float:
    return float(re.search(pattern, text)[1])


def test_what_a_layer_keeps_is_what_autograd_keeps():
    """Of a batch's tensors that the backward pass will read, weights and tables left out."""

    def numbers(layers: int) -> float:
        model, held = random_model(layers=layers, family="llama"), {}
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(
                torch.zeros(1, 64, dtype=torch.long), torch.arange(64)[None], causal_attention
            )
        assert out.requires_grad
        return sum(size for place, size in held.items() if place not in own) / 64

    shape = Shape(2, 32, 4, 2, 8, 48, 384, True, 512)  # of random_model
    assert count_kept_numbers(shape) == pytest.approx(numbers(3) - numbers(2), rel=0.03)


@pytest.mark.parametrize("command", ["train", "cold-start"])
def test_a_run_that_does_not_fit_is_refused_before_anything_is_made(
    home, command, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GIB)
    assert main(command, "grpo", "--preset", "pocket") == 1
    assert "trainer.recompute=true" in capsys.readouterr().err
    assert not home.exists()


# ----------------------------------------------------------------------- for GPUs that are not here


def test_the_plan_of_a_gpu_preset_adds_up(home):
    config = load_config("hotpotqa-4xh100", algorithm="ppo")
    text = gpu_plan(config, gpu_hour=2.0)
    assert f"{config.verl.ranks} x {config.verl.gpu} " in text and "DOES NOT FIT" not in text
    of_step = text[text.index("seconds per step") : text.index("hours   ")]
    *seconds, together = (
        float(s) for s in re.findall(r"^  [a-zA-Z][^\n]{31} +([\d.]+)", of_step, re.MULTILINE)
    )
    assert sum(seconds) == pytest.approx(together, abs=0.6)
    parts = sum(
        float(value)
        for value in re.findall(r"(?:training|evaluations|checkpoints) ([\d.]+)(?=, )", text)
    )
    assert number(r"time +([\d.]+) to", text) >= parts > together * config.trainer.steps / 3600
