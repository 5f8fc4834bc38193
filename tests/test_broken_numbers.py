"""A number that is not finite ends a run before it does harm: nothing bad is saved, nothing good is
pruned, one line."""

from __future__ import annotations

import asyncio
import json
import math
import shutil

import pytest
import torch
from conftest import (
    ScriptedPolicy,
    call,
    clone_steps,
    fails_with,
    make_env_loop,
    random_model,
    task,
    tiny_model,
)
from runs import TINY, curve, lines, main, steps
from safetensors.torch import load_file

from agent_r1.core import Sampling
from agent_r1.env import make_env
from agent_r1.evaluation.records import evaluation_records, write_rollouts
from agent_r1.model import files as model_files
from agent_r1.training import loop, run
from agent_r1.training.fsdp_merge import write_merged


@pytest.fixture(scope="module")
def home(produced, tmp_path_factory):
    """Data, index and cold start of the produced runs, in a home of our own."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(produced / "artifacts", folder / "artifacts")
    return folder


@pytest.mark.parametrize(
    ("algorithm", "minibatches", "rate", "said", "recorded"),
    [
        (
            "grpo",
            4,
            1e20,
            "step 3: the policy has a gradient of norm nan; the update was skipped",
            2,
        ),
        ("grpo", 1, 1e39, "step 3: the policy has weights that are not finite and is not saved", 3),
    ],
)
def test_a_run_that_breaks_keeps_its_good_checkpoints(
    home, monkeypatch, capsys, algorithm, minibatches, rate, said, recorded
):
    """A learning rate that explodes in step 3: either the next gradient is no number, or the
    weights are not."""
    monkeypatch.setenv("AGENT_R1_HOME", str(home))
    decay, temperatures = loop.linear_decay, []
    monkeypatch.setattr(
        loop, "linear_decay", lambda step, *plan: rate if step == 3 else decay(step, *plan)
    )
    evaluate = run.evaluate

    def noting(*args, temperature, **options):
        temperatures.append(temperature)
        return evaluate(*args, temperature=temperature, **options)

    monkeypatch.setattr(run, "evaluate", noting)
    name = f"{algorithm}-{minibatches}"
    settings = [
        "trainer.steps=5",
        "trainer.save_every=1",
        "trainer.eval_every=2",
        "rollout.temperature=0.9",
    ]
    settings += [
        f"actor.minibatches={minibatches}",
        "actor.lr=1",
        "actor.grad_clip=1e-6",
        "critic.warmup_steps=0",
    ]
    assert main("train", algorithm, *TINY, *settings, "--plain", f"--run={name}") == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith(f"agent-r1: {said}") and "--run NAME" in errors[-1], errors
    folder = home / "runs" / name
    assert steps(folder) == ["step_000001", "step_000002"]
    for step in steps(folder):
        tensors = load_file(folder / "checkpoints" / step / "model" / "model.safetensors").values()
        assert all(tensor.isfinite().all() for tensor in tensors)
    assert len(lines(folder)) == recorded
    assert not any(value is None for line in curve(folder)[:2] for value in line.values())
    assert temperatures == [0.0, 0.9]  # what is called sampled is sampled as in training


def test_the_cold_start_stops_before_a_step_too(micro, chat, demonstrations):
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    with fails_with("broken_gradient"):
        clone_steps(model, demonstrations, steps=4, lr=1e20)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_rollouts_hold_json_whatever_an_environment_measured(micro, chat, tmp_path):
    policy = ScriptedPolicy(chat, [call(query="Rome"), "<answer>x</answer>"])
    episodes = make_env_loop(policy, lambda row: make_env(row, micro.tools, micro.config.env))
    trajectory = asyncio.run(episodes.run(task(), Sampling(64)))
    trajectory.metrics |= {"ratio": math.nan, "distance": math.inf}
    write_rollouts(tmp_path / "rollouts.jsonl", evaluation_records([trajectory], chat))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    record = json.loads((tmp_path / "rollouts.jsonl").read_text(), parse_constant=refuse)
    assert record["metrics"]["ratio"] is record["metrics"]["distance"] is None
    assert record["reward"] == trajectory.reward and len(record["steps"]) == 2


def test_shards_of_verl_with_broken_weights_are_refused(tmp_path):
    model = random_model()
    model_files.save_model(model, tmp_path / "base", 0, 0)
    weights = model_files.to_hf(model)
    weights["model.norm.weight"][3] = math.inf
    torch.save(
        {name: t.detach().clone() for name, t in weights.items()},
        tmp_path / "model_world_size_1_rank_0.pt",
    )
    (tmp_path / "out").mkdir()
    with fails_with("broken_weights"):
        write_merged(tmp_path, tmp_path / "base", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
