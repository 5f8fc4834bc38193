"""Models of other families: read exactly, refused before anything is made, exported and served."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import fails_with
from families import family_of, packaged_templates, tokenizer_of
from runs import main
from safetensors.torch import load_file, save_file
from small_models import random_decoder, small_model
from transformers import AutoModelForCausalLM, GenerationConfig

from agent_r1.app.doctor import check_template
from agent_r1.chat.start import check_start_chat, describe_start_chat
from agent_r1.chat.tokenizer import byte_chat, load_chat, load_tokenizer, save_tokenizer
from agent_r1.cluster.serve import options, why_unparsed
from agent_r1.cold_start.demonstrate import read_episodes
from agent_r1.config import load_config
from agent_r1.config.load import keep_stored
from agent_r1.config.settings import RolloutConfig, TrainerConfig
from agent_r1.core import (
    AgentEnv,
    Generation,
    Observation,
    Policy,
    Sampling,
    StepResult,
    StopReason,
)
from agent_r1.env import dialect_of
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error
from agent_r1.inference.export import export
from agent_r1.model.decoder import causal_attention
from agent_r1.model.files import load_model, save_model
from agent_r1.rollout.episode import AgentEnvLoop, Limits, Task
from agent_r1.tool import tool

SMOKE = ["env.tools=[search]", "trainer.device=cpu"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return small_model(tmp_path_factory.mktemp("llama"), "llama", "llama3_2")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return small_model(tmp_path_factory.mktemp("qwen"), "qwen3", "qwen3_5_think")


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def edited(folder: Path, name: str, **changes) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_transformers(tmp_path, family):
    """With Llama 3.2's RoPE scaling: 400 positions, of a model for 256."""
    model = random_decoder(family, 300)
    save_model(model, tmp_path, 1, 0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(300, (2, 400), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(400).expand(2, -1)
    with torch.no_grad():
        wanted = theirs(ids).logits
        again = load_model(tmp_path)
        for ours in (model, again):
            found = ours.logits(ours(ids, positions, causal_attention))
            assert (found - wanted).abs().max() < 2e-4
    assert again.shape == model.shape


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}],
)
def test_another_scaling_is_refused_by_its_name(llama, tmp_path, scaling):
    folder = copied(llama, tmp_path / "model")
    edited(folder, "config.json", rope_scaling=scaling)
    with pytest.raises(AgentR1Error, match="RoPE scaling '(yarn|linear)'"):
        load_model(folder)


@pytest.mark.parametrize("changes", [{"factor": 0}, {"factor": "8"}, {"high_freq_factor": 1.0}])
def test_a_scaling_that_no_model_has_is_refused(llama, tmp_path, changes):
    folder = copied(llama, tmp_path / "model")
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    edited(folder, "config.json", rope_scaling=scaling | changes)
    with fails_with("damaged_model"):
        load_model(folder)


def test_a_tied_model_with_another_head_is_refused(llama, tmp_path):
    folder = copied(llama, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder)  # a copy of the embedding contradicts nothing
    weights["lm_head.weight"] += 0.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AgentR1Error, match="tie_word_embeddings"):
        load_model(folder)
    edited(folder, "config.json", tie_word_embeddings=False)
    assert load_model(folder).head is not None


def test_code_of_a_model_is_not_run(llama, tmp_path):
    folder = copied(llama, tmp_path / "model")
    edited(folder, "config.json", model_type="new", auto_map={"AutoModel": "model.New"})
    with fails_with("remote_code"):
        load_model(folder)
    edited(folder, "config.json", model_type="qwen3_5", auto_map=None)
    with pytest.raises(AgentR1Error, match="architecture 'qwen3_5'; the local loop computes"):
        load_model(folder)


# -------------------------------------------------------------------------------------- the doors


def config_of(model: Path | str, *settings: str):
    return load_config("small", [f"model.path={model}", *SMOKE, *settings], algorithm="grpo")


@pytest.mark.parametrize(("fixture", "name"), [("llama", "llama3_json"), ("qwen", "qwen3_coder")])
def test_auto_is_resolved_when_the_configuration_is_loaded(request, capsys, fixture, name):
    folder = request.getfixturevalue(fixture)
    config = config_of(folder, "env.name=auto")
    assert config.env.name == name
    assert f"env.name=auto: {name}" in capsys.readouterr().err
    assert load_config("small", ["env.name=auto"]).env.name == "hermes"


def test_a_resumed_run_keeps_the_name_that_it_found(llama):
    found = config_of(llama, "env.name=auto")
    stored = config_of(llama, "env.name=react")
    assert keep_stored(found, stored).env.name == "react"
    named = config_of(llama, "env.name=llama3_json")
    assert keep_stored(named, stored).env.name == "llama3_json"  # somebody asked for this one


DOORS = {
    "train": ["train", "grpo"],
    "dry run": ["train", "grpo", "--dry-run"],
    "cold start": ["cold-start"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("door", DOORS)
def test_a_dialect_that_does_not_fit_is_refused_before_anything_is_made(
    llama, tmp_path, monkeypatch, capsys, door
):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    code = main(*DOORS[door], "--preset", "small", f"model.path={llama}", *SMOKE)
    assert code in (1, 2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "env.name=hermes does not read the calls" in error
    assert "set env.name=llama3_json" in error
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("door", ["serve", "chat", "eval"])
def test_a_model_that_is_only_used_is_refused_too(llama, tmp_path, monkeypatch, capsys, door):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    words = ["--question", "Who?"] if door == "chat" else []
    assert main(door, "--model", str(llama), *words) in (1, 2)
    assert "env.name=hermes does not read the calls" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda f: (f / "chat_template.jinja").unlink(), "no_chat_template"),
        (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), "broken_template"),
        (lambda f: (f / "tokenizer.json").unlink(), "damaged_tokenizer"),
        (
            lambda f: edited(f, "config.json", model_type="x", auto_map={"AutoModel": "m.M"}),
            "remote_code",
        ),
    ],
    ids=["none", "broken", "no tokenizer", "remote code"],
)
def test_each_fault_of_a_folder_has_its_own_code(llama, tmp_path, monkeypatch, spoil, code):
    from agent_r1.app.stages import preflight
    from agent_r1.training.run_dir import RunDir
    from agent_r1.workspace import Workspace

    folder = copied(llama, tmp_path / "model")
    spoil(folder)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    config = config_of(folder, "env.name=llama3_json")
    with fails_with(code):
        preflight(Workspace(config), RunDir(tmp_path / "home" / "run"), resume=False)


def test_of_a_hub_model_only_the_template_is_fetched_first(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    asked = []

    def download(name, patterns, kind="model", otherwise=""):
        asked.append((name, patterns))
        return llama

    monkeypatch.setattr(hub, "download", download)
    config = config_of("OWNER/NAME", "env.name=auto")
    assert config.env.name == "llama3_json"
    assert check_start_chat(config).startswith("exact")
    assert asked and all(not any("safetensors" in p for p in patterns) for _, patterns in asked)


def test_without_a_network_a_plan_says_so_and_training_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))

    def download(*_, **__):
        raise AgentR1Error("cannot download", code="download_failed")

    monkeypatch.setattr(hub, "download", download)
    config = config_of("OWNER/NAME")
    assert describe_start_chat(config).startswith("not seen")
    status, said, _ = check_template(config)
    assert status == "warn"
    assert "its model and chat template were not seen" in said and "available" not in said
    with fails_with("download_failed"):
        check_start_chat(config)
    with fails_with("template_not_seen"):
        config_of("OWNER/NAME", "env.name=auto")


def test_a_policy_that_only_warms_up_is_refused():
    with fails_with("policy_not_trained"):
        load_config("small", ["trainer.steps=4", "critic.warmup_steps=4"], algorithm="ppo")
    load_config("small", ["trainer.steps=4", "critic.warmup_steps=3"], algorithm="ppo")
    load_config("small", ["trainer.steps=4", "critic.warmup_steps=9"], algorithm="grpo")


# ----------------------------------------------------------------------------------------- a state


class Cell(AgentEnv):
    """One turn in a world whose state has a number."""

    def __init__(self, state: int | None, text: str):
        self.state, self.text = state, text

    def reset(self, row):
        extra = {} if self.state is None else {"state": self.state}
        return Observation([{"role": "user", "content": self.text}], extra=extra)

    async def step(self, action):
        return StepResult(None, 1.0, done=True, stop_reason=StopReason.ANSWERED)


def test_a_state_may_be_zero():
    chat = byte_chat()

    class Speaks(Policy):
        async def generate(self, prompt_ids, sampling, session=None):
            return Generation([chat.turn_end_id], [-1.0], "stop")

        def release(self, session):
            pass

    def state(number: int | None, text: str) -> int:
        loop = AgentEnvLoop(Speaks(), chat, Limits(9, 999, 9), lambda row: Cell(number, text))
        done = asyncio.run(loop.run(Task({"prompt": []}, "g", "s"), Sampling(9)))
        return done.steps[0].extra["state"]

    for number in (0, 1, ""):
        assert state(number, "morning") == state(number, "evening")
    assert state(None, "morning") != state(None, "evening")
    assert state(0, "morning") != state(1, "morning")


# ------------------------------------------------------------------------------- export and server


def test_an_export_keeps_all_templates_and_samples_as_the_training_did(tmp_path):
    family, text = family_of("qwen2_5"), packaged_templates("trl")["qwen2_5"]
    tokenizer = tokenizer_of(family, {"default": text, "tool_use": text})
    folder = tmp_path / "checkpoint"
    model = random_decoder("qwen3", len(tokenizer))
    save_model(model, folder, tokenizer.eos_token_id, tokenizer.pad_token_id)
    save_tokenizer(tokenizer, folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    edited(
        folder, "generation_config.json",
        eos_token_id=[end], repetition_penalty=1.05, top_k=20, temperature=0.6, min_p=0.1,
        no_repeat_ngram_size=3, max_length=77,
    )  # fmt: skip
    config = config_of(folder, "rollout.temperature=0.9")
    target = export(folder, config, tmp_path / "export")
    theirs = load_tokenizer(target)
    assert set(theirs.chat_template) == {"default", "tool_use"}
    assert load_chat(target).stop_ids == load_chat(folder).stop_ids
    made = GenerationConfig.from_pretrained(target)
    assert (made.temperature, made.top_k, made.top_p, made.max_length) == (0.9, 0, 1.0, 77)
    assert made.repetition_penalty == 1.0 and not made.min_p and not made.no_repeat_ngram_size
    assert '"repetition_penalty": 1.05' in (target / "README.md").read_text()
    assert set(made.eos_token_id) >= {end, tokenizer.eos_token_id}


def test_an_export_whose_template_differs_is_not_kept(llama, tmp_path, monkeypatch):
    from agent_r1.inference import export as module

    copy = module._copy

    def other(source, target, patterns):
        copy(source, target, patterns)
        template = target / "chat_template.jinja"
        template.write_text(template.read_text().replace("ipython", "tool"))

    monkeypatch.setattr(module, "_copy", other)
    with pytest.raises(AgentR1Error, match="render a conversation with other tokens"):
        export(llama, None, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_training_writes_neutral_generation_settings_and_notes_the_authors(llama, tmp_path):
    from agent_r1.training.run import write_model

    folder = copied(llama, tmp_path / "model")
    authors = {"repetition_penalty": 1.1, "top_p": 0.8, "min_p": 0.1, "dola_layers": "high"}
    edited(folder, "generation_config.json", **authors)
    write_model(load_model(folder), load_chat(folder), tmp_path / "out")
    made = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (made.repetition_penalty, made.top_p, made.top_k, made.min_p) == (1.0, 1.0, 0, None)
    noted = json.loads((tmp_path / "out" / "authors_sampling.json").read_text())
    assert noted == authors and made.dola_layers is None


def parsers(model: Path, dialect: str) -> str | None:
    config = load_config("small", [])
    spoken = dialect_of(config.env.model_copy(update={"name": dialect}))
    words = options(model, RolloutConfig(), TrainerConfig(device="cpu"), 1, 0, spoken)
    known = "--tool-call-parser" in words
    assert known == ("--enable-auto-tool-choice" in words)
    assert known == (why_unparsed(model, spoken) is None)
    return words[words.index("--tool-call-parser") + 1] if known else None


def test_the_server_parses_the_dialect_if_the_vocabulary_has_its_tokens(llama, qwen, capsys):
    assert parsers(qwen, "hermes") == "hermes"
    assert parsers(qwen, "qwen3_coder") == "qwen3_coder"
    assert parsers(llama, "llama3_json") == "llama3_json"
    assert parsers(qwen, "llama3_json") is None
    assert "requires the token <|python_tag|>" in capsys.readouterr().out
    for name in ("react", "retool", "mathtir", "harmony"):
        assert parsers(qwen, name) is None
        assert "calls stay in the text" in capsys.readouterr().out


@tool
def look(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "look", "arguments": {"word": "x"}}\n</tool_call>'),
        ("llama3_json", '{"name": "look", "parameters": {"word": "x"}}'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=look>\n<parameter=word>\nx\n</parameter>\n</function>\n"
            "</tool_call>",
        ),
    ],
)
def test_recorded_calls_are_written_in_the_dialect(tmp_path, dialect, call):
    function = {"name": "look", "arguments": '{"word": "x"}'}
    turn = {"role": "assistant", "content": "so ", "tool_calls": [{"function": function}]}
    messages = [{"role": "user", "content": "?"}, turn, {"role": "tool", "content": "r"}]
    messages.append({"role": "assistant", "content": "<answer>r</answer>"})
    file = tmp_path / "episodes.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    env = load_config("small", []).env.model_copy(update={"name": dialect})
    (episode,) = read_episodes(file, {"look": look}, env)
    assert episode.messages[1]["content"] == f"so {call}"
