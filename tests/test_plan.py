"""`agent-r1 train --dry-run` tells what would happen, and nothing happens."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import random_model
from runs import TINY, main

from agent_r1.app.plan import gpu_plan
from agent_r1.app.plan_local import kept, local_memory, local_plan, local_shape
from agent_r1.config import from_yaml, load_config
from agent_r1.ground import machine
from agent_r1.ground.hardware import GIB, Shape
from agent_r1.rollout.decoder import causal_attention
from agent_r1.workspace import Workspace

TITLES = ("data", "index", "start model", "evaluation before", "training", "evaluation after", "report")


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
    stages, said = plan(capsys, *TINY, "ppo", "--run", "mine", "actor.lr=0.125", "--seed=7")
    assert tuple(stages) == TITLES
    assert {state for state, _ in stages.values()} == {"to do"}
    assert stages["training"][1] == home / "runs" / "mine" / "checkpoints" / "step_000008"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "printed.yaml").write_text(said.split("\n\n")[0])  # the resolved configuration
    expected = load_config("smoke", [*TINY[1:], "actor.lr=0.125"], algorithm="ppo", seed=7)
    assert from_yaml(tmp_path / "printed.yaml") == expected


def test_what_is_there_is_done(home, capsys):
    config = load_config("smoke", TINY[1:], algorithm="grpo")
    run = Workspace.from_config(config).run("smoke-grpo")
    for path in (
        Workspace.from_config(config).data,
        Workspace.from_config(config).start_model,
        run / "checkpoints" / "step_000008",
    ):
        path.mkdir(parents=True)
    (run / "eval.json").touch()
    stages, _ = plan(capsys, "grpo", *TINY)
    done = {title for title, (state, _) in stages.items() if state == "done"}
    assert done == {"data", "start model", "training", "evaluation after"}


def number(pattern: str, text: str) -> float:
    return float(re.search(pattern, text)[1])


@pytest.fixture
def slow_clock(monkeypatch):
    """A clock that goes on by 0.03 s whenever it is read: products begin at 0.03, 0.06 and 0.09, the end is at 0.15."""
    now = iter(range(0, 100, 3))
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(now) / 100))


RATE = 3 * 2 * 4096 * 128 * 384 / 0.15
"""FLOP/s by that clock."""


@pytest.mark.parametrize(("algorithm", "operations", "bytes_a_weight"), [("grpo", 2 + 6, 16), ("ppo", 2 + 6 + 8, 32)])
def test_the_estimates_of_a_laptop_by_hand(slow_clock, algorithm, operations, bytes_a_weight):
    config = load_config("laptop", ["trainer.threads=1"], algorithm=algorithm)
    text, r = local_plan(config), config.rollout
    # 1,024 x 128 of embedding; two layers of four projections of 128 x 128 and an MLP of 3 x 128 x 256. Norms and biases are
    # left out.
    weights = 1024 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 256)
    assert number(r"([\d.]+) M parameters", text) == pytest.approx(weights / 1e6, abs=0.01)
    cache = 4 * 2 * 2 * 128 * r.max_context * r.max_concurrent_episodes  # bytes of keys and values, two layers
    # A layer keeps 6 x 128 for norms and adding up, 3 x (4 + 4) x 32 for attention, 4 x 256 for the MLP: 2,560 numbers a token.
    # All logits fit into one chunk, which is there six times; and the embedding's gradient once more.
    tokens = config.trainer.max_tokens_per_microbatch
    update = 4 * tokens * 2 * 2560 + 4 * (6 * tokens * 1024 + 1024 * 128)
    states = weights * bytes_a_weight + cache + 2**30  # PyTorch itself
    assert number(r"memory +([\d.]+) MiB", text) == pytest.approx((states + update) / 2**20, abs=1)
    networks = 2 if algorithm == "ppo" else 1
    assert number(r"disk +([\d.]+) MiB", text) == pytest.approx(3 * 12 * weights * networks / 2**20, abs=1)
    seconds = r.prompts_per_step * r.samples_per_prompt * 115 * weights * operations / (0.35 * RATE)
    assert number(r"([\d.]+) s a step", text) == pytest.approx(seconds, rel=0.01)
    assert number(r"([\d.]+) min", text) == pytest.approx(seconds * config.trainer.steps / 60, rel=0.01)


def test_what_a_layer_keeps_is_what_autograd_keeps():
    """Of a batch's tensors that the backward pass will read, weights and tables left out."""

    def numbers(layers: int) -> float:
        model, held = random_model(layers=layers, family="llama"), {}
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.zeros(1, 64, dtype=torch.long), torch.arange(64)[None], causal_attention)
        assert out.requires_grad
        return sum(size for place, size in held.items() if place not in own) / 64

    shape = Shape(2, 32, 4, 2, 8, 48, 384, True, 512)  # of random_model
    assert kept(shape) == pytest.approx(numbers(3) - numbers(2), rel=0.03)


def test_the_memory_of_a_real_model_is_what_a_run_of_it_took():
    """6.3 GiB at the most, measured (docs/pocket.md)."""

    def gib(*settings: str) -> float:
        config = load_config("pocket", list(settings), algorithm="grpo")
        return sum(local_memory(config, local_shape(config)).values()) / GIB

    assert gib() == pytest.approx(6.3, rel=0.1)
    assert gib("trainer.recompute=true") < gib() - 1
    assert gib("cold_start.mix_tokens=4096") > gib() + 1  # the warm start takes more then


@pytest.mark.parametrize("command", ["train", "cold-start"])
def test_a_run_that_does_not_fit_is_refused_before_anything_is_made(home, command, monkeypatch, capsys):
    monkeypatch.setattr(machine, "available_memory", lambda: 3 * GIB)
    assert main(command, "grpo", "--preset", "pocket") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"needs about 6\.\d GiB of memory \(.*Adam 2\.0.*\), and 3\.0 are free; .*trainer.recompute=true", line
    )
    assert not home.exists()


# ---------------------------------------------------------------------------------------------- for GPUs that are not here


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("preset", ["hotpotqa-4xh100", "first-agent-1x24gb"])
def test_the_plan_of_a_gpu_preset_adds_up(home, preset, algorithm):
    config = load_config(preset, algorithm=algorithm)
    text = gpu_plan(config, gpu_hour=2.0)
    assert f"{config.verl.ranks} x {config.verl.gpu} " in text
    assert "DOES NOT FIT" not in text and "not measured" in text
    reference = ["reference"] if config.actor.kl_coef else []
    for part in ("sampling: decoding", "log-probabilities", *reference, "actor's update", "weight sync"):
        assert re.search(rf"^  {re.escape(part)} +[\d.]+$", text, re.MULTILINE), part
    assert ("critic's update" in text) == (algorithm == "ppo")
    of_step = text[text.index("seconds per step") : text.index("hours   ")]
    *seconds, together = (
        float(value) for value in re.findall(r"^  [a-zA-Z][^\n]{31} +([\d.]+)", of_step, re.MULTILINE)
    )
    assert sum(seconds) == pytest.approx(together, abs=0.6)
    parts = sum(float(value) for value in re.findall(r"(?:training|evaluations|checkpoints) ([\d.]+)(?=, )", text))
    low, high = number(r"time +([\d.]+) to", text), number(r"to ([\d.]+) h for", text)
    index = {"beir-hotpotqa": 1, "contexts": 0.0955 * (config.data.name == "hotpotqa")}[
        config.data.corpus
    ]  # by passages
    assert low == pytest.approx(parts + 0.3 * index, abs=0.1)
    assert high == pytest.approx(4 * parts + 1.5 * index, abs=0.2)
    assert parts > together * config.trainer.steps / 3600
    assert number(r"\((\d+) to \d+ at 2 per GPU", text) == pytest.approx(2 * low * config.verl.ranks, rel=0.02, abs=1)


def test_a_dry_run_for_gpus_on_a_laptop(home, tmp_path, capsys, monkeypatch):
    # test_verl_compose.py has the real one
    monkeypatch.setattr("agent_r1.verl_engine.compose.page", lambda *_: "verl's configuration")
    argv = ["grpo", "--preset", "hotpotqa-4xh100", "--gpu-hour", "3"]
    stages, said = plan(capsys, *argv)
    assert {state for state, _ in stages.values()} == {"to do"}
    assert number(r"host memory +(\d+) GiB", said) < 90 and "without it 90 GiB more" in said
    assert "verl's configuration" in said and "at 3 per GPU-hour" in said
    stages, said = plan(capsys, *argv, "search.url=http://127.0.0.1:8100")
    assert "index" not in stages and "index              not needed: http://127.0.0.1:8100 has one" in said
    assert "without it" not in said and list(tmp_path.iterdir()) == []


def test_what_no_gpu_can_do_ends_the_dry_run(home, capsys):
    assert main("train", "--preset=hotpotqa-4xh100", "model.path=Qwen/Qwen9-900B", "--dry-run") == 2
    assert "the sizes of model.path=Qwen/Qwen9-900B are not known" in capsys.readouterr().err.splitlines()[-1]
