"""Room 9, ways to a model: this process samples as training does; other models need vLLM; and which
model is meant."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    VOCAB,
    clone_steps,
    fails_with,
    question_row,
    random_model,
    tiny_model,
    trajectory_of,
)
from runs import main
from transformers import AutoConfig, AutoModelForCausalLM

from agent_r1.app import stages
from agent_r1.chat.tokenizer import save_tokenizer
from agent_r1.config import apply_overrides, from_yaml, load_config, to_yaml
from agent_r1.core import Sampling, StopReason
from agent_r1.inference.agent import find_model, open_agent, settings_for
from agent_r1.inference.chat import load_test_questions
from agent_r1.inference.conversation import Conversation
from agent_r1.model import files as model_files
from agent_r1.model.policies import load_transformers
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import Task
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import trajectory_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chat):
    """A random Qwen2 model, as training writes it."""
    from agent_r1.training.run import write_model

    path = tmp_path_factory.mktemp("random") / "model"
    write_model(random_model(), chat, path)
    return path


@pytest.fixture(scope="module", params=["olmo2", "mistral"])
def foreign(request, tmp_path_factory, folder):
    """A random model of another architecture, with our tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    small |= {
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 300,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **small)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in folder.glob("*token*"):
        shutil.copy(file, path)
    shutil.copy(folder / "chat_template.jinja", path)
    return path


# --------------------------------------------------------------- what ends a turn, for every policy


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory, chat, micro):
    """A model that ends its turns with <|endoftext|>: one of two end tokens in its
    generation_config.json, as Qwen2.5's has them, and none of the tokenizer's. And what it would
    sample greedily if nobody stopped it."""
    from agent_r1.training.run import write_model

    path, end = tmp_path_factory.mktemp("two ends") / "model", chat.control_ids["<|endoftext|>"]
    said = [*chat.encode_trusted("<answer>Marn</answer>"), end, 30]
    prompt = chat.prompt_ids(question_row()["prompt"])
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    clone_steps(model, trajectory_rows(trajectory_of((prompt, said, 1.0)), 0), steps=60)
    write_model(model, chat, path)
    settings = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(
        json.dumps(settings | {"eos_token_id": [chat.turn_end_id, end]})
    )
    return path, said


def one_episode(policy, agent, max_tokens: int):
    config = agent.config.rollout.model_copy(update={"max_tokens_per_turn": max_tokens})
    loop = make_loop(policy, agent.chat, {}, config, agent.config.env)
    t = asyncio.run(loop.run(Task(question_row(), "g", "s"), Sampling(max_tokens, 0.0)))
    return t.steps[0].action_ids, t.steps[0].finish_reason, t.stop_reason, t.reward_parts


def episodes_at_limits(policy, agent, said: list[int]) -> list[tuple]:
    """Play with room for all tokens, for exactly those up to the first end token, for one less."""
    return [one_episode(policy, agent, limit) for limit in (40, len(said) - 1, len(said) - 2)]


def ends_at_the_first_end_token(said: list[int]) -> list[tuple]:
    """Return what `episodes_at_limits` has to be: the last token that is allowed may end a turn."""
    right = (said[:-1], "stop", StopReason.ANSWERED, {"em": 1.0, "format": 0.0})
    short = (said[:-2], "length", StopReason.MAX_TOKENS, {"em": 0.0, "format": -0.2})
    return [right, right, short]


@pytest.mark.parametrize("way", ["local", "vllm", "vllm streamed"])
def test_a_turn_ends_at_either_of_two_end_tokens(two_ends, micro, monkeypatch, way):
    """Training and evaluation see one and the same turn, and nobody reads the token that ended it
    as its text.

    vLLM ends a turn at every token that the model's generation_config.json names, whatever the
    request says. verl's turn is in test_verl_equivalence.py.
    """
    path, said = two_ends
    monkeypatch.setenv("AGENT_R1_VLLM", str(Path(__file__).with_name("fake_vllm.py")))
    monkeypatch.setenv("FAKE_VLLM_IDS", json.dumps(said))
    with open_agent(
        path, micro.config, "vllm" if way.startswith("vllm") else "local", tools={}
    ) as agent:
        policy = agent.policy
        if way == "vllm streamed":
            policy.on_token = lambda session, ids: None
        assert episodes_at_limits(policy, agent, said) == ends_at_the_first_end_token(said)


def test_what_is_trained_keeps_the_ends_that_it_was_trained_with(two_ends, micro, tmp_path):
    """A checkpoint is served by others, and its own evaluation reads it."""
    from agent_r1.training.run import write_model

    with open_agent(two_ends[0], micro.config, tools={}) as agent:
        write_model(agent.policy.model, agent.chat, tmp_path / "checkpoint")
    with open_agent(tmp_path / "checkpoint", micro.config, tools={}) as again:
        assert again.chat.stop_ids == agent.chat.stop_ids and len(again.chat.stop_ids) == 2
    assert sorted(AutoConfig.from_pretrained(tmp_path / "checkpoint").eos_token_id) == sorted(
        agent.chat.stop_ids
    )


def test_the_sampler_tells_each_token(folder, chat):
    seen, policy = (
        [],
        LocalPolicy(model_files.load_model(folder), chat.stop_ids, slots=4, max_context=256),
    )
    policy.on_token = lambda session, ids: seen.append((session, ids))
    generation = asyncio.run(policy.generate([5, 6, 7, 8, 9], Sampling(9, 1.0, seed=0), "s"))
    assert seen == [("s", [i]) for i in generation.token_ids]


def test_weights_that_are_not_there_or_not_safe(foreign, tmp_path):
    shutil.copytree(foreign, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with fails_with("damaged_model"):
        load_transformers(tmp_path)
    weights.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")  # a pickle is not opened
    with fails_with("damaged_model"):
        load_transformers(tmp_path)


# ----------------------------------------------------------------------------------------- an agent


def test_our_own_models_run_on_the_training_sampler(micro_model, micro):
    with open_agent(micro_model, micro.config, tools={}) as agent:
        assert isinstance(agent.policy, LocalPolicy) and agent.tools == {}
    big = apply_overrides(micro.config, ["rollout.max_concurrent_episodes=1000000"])
    with open_agent(
        micro_model, big, tools={}
    ) as agent:  # its cache would take hundreds of gigabytes
        assert agent.policy.cache.keys.nbytes * 2 <= 2**31


def test_another_architecture_runs_in_vllm_only(foreign, micro):
    with (
        fails_with("unsupported_model", "--backend vllm"),
        open_agent(foreign, micro.config, tools={}),
    ):
        raise AssertionError("opened")
    evaluated = load_config("small", ["trainer.device=cpu"])
    assert stages._backend(evaluated.model_copy(update={"engine": "verl"}), foreign) == "vllm"


# ----------------------------------------------------------------------------- which model is meant


@pytest.fixture
def home(tmp_path, monkeypatch, micro_model, micro):
    """Two runs: `old` with steps 2 and 4, `new` with step 6."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    for age, (run, steps) in enumerate({"new": [6], "old": [2, 4]}.items()):
        for step in steps:
            checkpoint = tmp_path / "runs" / run / "checkpoints" / f"step_{step:06d}"
            shutil.copytree(micro_model, checkpoint / "model")
            (checkpoint / "model" / "agent_r1.yaml").unlink()
            os.utime(checkpoint, (1e9 - age, 1e9 - age))
        config = apply_overrides(micro.config, [f"seed={10 + age}"])
        (tmp_path / "runs" / run / "config.yaml").write_text(to_yaml(config))
    return tmp_path


def test_the_newest_run_and_its_last_step_unless_named(home):
    model, config = find_model()
    assert model == home / "runs/new/checkpoints/step_000006/model" and config.seed == 10
    assert find_model("old")[0].parent.name == "step_000004" and find_model("old")[1].seed == 11
    assert find_model("old", 2)[0].parent.name == "step_000002"


def test_settings_come_from_beside_the_model_or_from_the_newest_run(home, micro_model, foreign):
    checkpoint = home / "runs/old/checkpoints/step_000002"
    for path in (checkpoint, checkpoint / "model"):
        assert find_model(checkpoint_dir=path)[1].seed == 11
    assert settings_for(micro_model) == from_yaml(micro_model / "agent_r1.yaml")
    config = find_model(hf_path=str(foreign))[1]
    assert (
        config.seed == 10 and config.env.tools == ["search"] and config.rollout.max_context == 300
    )
    assert settings_for(foreign, run="old").seed == 11
    assert (
        settings_for(micro_model, run="old").seed == 11
        and settings_for(micro_model, preset="small").preset == "small"
    )
    changes = ["env.max_turns=2", "data.mix={2-hop: 1}"]
    own = settings_for(micro_model, overrides=changes)
    assert (
        own.env.max_turns == 2
        and own.data.mix == {"2-hop": 1}
        and own.rollout == settings_for(micro_model).rollout
    )
    shutil.rmtree(home / "runs")
    config, default = settings_for(foreign), load_config()
    assert (config.data, config.search, config.env) == (
        default.data,
        default.search,
        default.env,
    )  # a run's world
    assert (config.rollout.max_tokens_per_turn, config.rollout.max_context) == (512, 4096)
    assert (config.trainer.device, default.trainer.device) == (
        "auto",
        "cpu",
    )  # a model of billions takes the GPU


def test_a_folder_of_verl_is_told_from_a_model(home):
    folder = home / "global_step_3"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model_world_size_1_rank_0.pt").touch()
    with fails_with("unconverted_checkpoint", f"agent-r1 export --checkpoint-dir {folder}"):
        find_model(checkpoint_dir=folder)


# ----------------------------------------------------------------- a published model, a fresh clone

WORLD = [
    "data.train=128",
    "data.val=8",
    "data.test=12",
    "data.cold=200",
    "data.entities=400",
    "search.dim=256",
]
SHORT = ["rollout.max_tokens_per_turn=6", "trainer.threads=1"]


@pytest.fixture
def published(tmp_path, monkeypatch, tokenizer):
    """An instruct model as others publish it (a vocabulary larger than our tiny model's, no
    settings of ours), and no run."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    small |= {"intermediate_size": 48, "vocab_size": VOCAB + 1024, "max_position_embeddings": 2048}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **small))
    model.save_pretrained(tmp_path / "published")
    own = copy.deepcopy(tokenizer)
    own.add_tokens([f"word{i}" for i in range(1024)])
    save_tokenizer(own, tmp_path / "published")
    return tmp_path / "published"


def first_prompt(model, *overrides, prompt=None) -> str:
    """What the model reads before its first word in a chat."""
    model, config = find_model(hf_path=str(model), overrides=[*WORLD, *SHORT, *overrides])
    with open_agent(model, config, prompt=prompt) as agent:
        exchange = asyncio.run(Conversation(agent, load_test_questions(config)).ask("Who is it?"))
        return agent.chat.decode(exchange.trajectory.steps[0].observation_ids)


def test_a_published_model_in_a_fresh_clone_searches_and_is_told_how_to_answer(published, capsys):
    assert '"search"' in (text := first_prompt(published)) or "search(" in text
    assert "between <answer> and </answer>" in text and text.count("Who is it?") == 1
    capsys.readouterr()
    main("chat", "--model", str(published), *WORLD, *SHORT, "--question", "Who is it?", "--json")
    said = capsys.readouterr()
    assert json.loads(said.out)["question"] == "Who is it?"  # standard output is for programs
    (line,) = [line for line in said.err.splitlines() if "tools:" in line]
    assert (
        f"{published}, local; tools: search over tinyhop-" in line
        and "temperature 1, 6 tokens a turn" in line
    )
