"""LoRA: what learns, what is saved, and that adapters next to a matrix compute what the merged matrix does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, learner_of, micro_config, random_model, run_training_loop
from runs import TINY, curve, main
from safetensors.torch import load_file

from agent_r1.app.plan import gpu_memory
from agent_r1.app.plan_local import local_memory
from agent_r1.config import load_config
from agent_r1.ground.hardware import GPUS, MODELS
from agent_r1.rollout import decoder, model_files
from agent_r1.rollout.policies import load_transformers, token_logprobs
from agent_r1.training import lora
from agent_r1.training.run import write_model

pytest.importorskip("peft")
IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def base(tmp_path, chat) -> Path:
    write_model(random_model(), chat, tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def checkpoint(tmp_path, chat, base) -> tuple[Path, decoder.Decoder]:
    """A checkpoint's folder, and the model with adapters, random ones, that it was saved from."""
    model = lora.load_adapters(base, base, "cpu", rank=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    lora.save_adapters(model, chat, base, tmp_path / "step_000002" / "model")
    return tmp_path / "step_000002", model


def apart(a, b) -> float:
    return (token_logprobs(a, IDS) - token_logprobs(b, IDS)).abs().max().item()


def test_new_adapters_change_nothing_until_they_learn(base):
    assert apart(lora.load_adapters(base, base, "cpu", rank=4), model_files.load_model(base)) == 0.0


def test_merged_and_unmerged_give_the_same_log_probabilities(checkpoint, base):
    folder, model = checkpoint
    assert apart(model, model_files.load_model(base)) > 0.1, (
        "the adapters say nothing, so this test would prove nothing"
    )
    merged = lora.merged_model(folder)
    assert apart(model, model_files.load_model(merged)) < 1e-5
    assert apart(model, load_transformers(merged)) < 1e-4
    assert lora.merged_model(folder) == merged == folder / "merged"


def test_peft_reads_the_adapters_over_the_same_base(checkpoint, base):
    """Another implementation, with other matrices: there q, k and v are three."""
    from peft import PeftModel

    folder, model = checkpoint
    theirs = PeftModel.from_pretrained(load_transformers(base), folder / "model").eval()
    assert apart(model, theirs) < 1e-4


def test_a_saved_model_with_adapters_is_read_back_to_the_bit(checkpoint, base):
    folder, model = checkpoint
    again = lora.load_adapters(folder / "model", base, "cpu", rank=4)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert {path.name for path in (folder / "model").iterdir()} >= {
        lora.ADAPTER_CONFIG,
        lora.ADAPTER_WEIGHTS,
        "tokenizer.json",
    }
    assert not (folder / "model" / "model.safetensors").exists(), "a checkpoint holds the adapters alone"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_only_adapters_and_the_critics_head_learn(algorithm, micro, chat, cloned_model):
    config = micro_config(
        algorithm, "trainer.steps=2", "critic.warmup_steps=0", "actor.lora_rank=2", "env.call_reward=0.1"
    )
    lora.add_adapters(cloned_model, 2)
    learner = learner_of(config, cloned_model)
    networks = {"actor": learner.actor, "critic": learner.critic} if learner.critic else {"actor": learner.actor}
    before = {who: {n: p.detach().clone() for n, p in net.named_parameters()} for who, net in networks.items()}
    run_training_loop(config, learner, chat, micro.tools, micro.rows("train"))
    for who, network in networks.items():
        moved = {name for name, p in network.named_parameters() if not torch.equal(p, before[who][name])}
        assert moved and all("lora_" in name or name.startswith("value.") for name in moved), sorted(moved)
        assert any("lora_B" in name for name in moved)


def test_verls_shards_are_folded_like_ours(checkpoint, base):
    """The names that verl's FSDP state has: the base layer inside `base_layer`, the adapter called `default`."""
    folder, model = checkpoint
    saved, state = load_file(folder / "model" / lora.ADAPTER_WEIGHTS), {}
    for name, tensor in load_file(base / "model.safetensors").items():
        adapted = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in saved
        state[f"base_model.model.{name.replace('.weight', '.base_layer.weight') if adapted else name}"] = tensor
    state |= {name.replace(".weight", ".default.weight"): tensor for name, tensor in saved.items()}
    ours = load_file(lora.merged_model(folder) / "model.safetensors")
    folded = lora.merge_adapters(state)
    assert folded.keys() == ours.keys() and all(torch.equal(folded[name], ours[name]) for name in ours)


def test_the_plan_counts_adapters_and_not_the_frozen_weights():
    model, words = "Qwen/Qwen2.5-1.5B-Instruct", ["model.path=Qwen/Qwen2.5-1.5B-Instruct", "actor.kl_coef=0"]
    full, thin = (
        load_config("hotpotqa-1x80gb", [*words, f"actor.lora_rank={rank}"], algorithm="grpo") for rank in (0, 32)
    )
    shape = MODELS[model]
    sizes = [gpu_memory(c, shape, GPUS["H100"]) for c in (full, thin)]
    adapters = shape.learnt(32)
    assert sizes[0]["actor: weights, Adam"][1] == 12 * shape.parameters
    assert sizes[1]["actor: weights, Adam"][1] == 4 * shape.parameters + 8 * adapters
    assert sizes[1]["gradients"][1] == 4 * adapters < sizes[0]["gradients"][1] / 20
    local = [local_memory(load_config("smoke", [f"actor.lora_rank={rank}"]), shape) for rank in (0, 32)]
    assert local[1]["weights, gradients, Adam"] < 0.3 * local[0]["weights, gradients, Adam"]


@pytest.mark.slow
def test_a_run_is_resumed_to_the_same_bits_evaluated_and_exported(produced, tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    for part in ("artifacts",):
        shutil.copytree(produced / part, home / part)
    monkeypatch.setenv("AGENT_R1_HOME", str(home))
    words = ["ppo", *TINY, "actor.lora_rank=4", "actor.lr=3e-3", "trainer.steps=4"]
    assert main("train", *words, "--run=straight") == 0
    shutil.copytree(home / "runs" / "straight", home / "runs" / "again")
    shutil.rmtree(home / "runs" / "again" / "checkpoints" / "step_000004")
    assert main("train", *words, "--run=again", "--resume") == 0
    last = [home / "runs" / name / "checkpoints" / "step_000004" for name in ("straight", "again")]
    a, b = (load_file(folder / "model" / lora.ADAPTER_WEIGHTS) for folder in last)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert curve(home / "runs" / "straight") == curve(home / "runs" / "again")
    frozen = torch.load(last[0] / "trainer.pt", weights_only=True)["critic"]
    assert frozen.keys() and all("lora_" in name or name.startswith("value.") for name in frozen)
    assert main("eval", *words, "--run=straight") == 0
    assert main("export", "--run", "straight") == 0
    assert "checkpoint and export differ by at most" in capsys.readouterr().out
    merged, exported = last[0] / "merged", home / "runs" / "straight" / "export"
    assert apart(load_transformers(exported), model_files.load_model(merged)) < 1e-4
