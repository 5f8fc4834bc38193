"""The configuration: layers, overrides, and what is refused before any minute is spent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from conftest import fails_with
from hypothesis import example, given
from hypothesis import strategies as st

from agent_r1.app import cli
from agent_r1.config import (
    Config,
    fingerprint,
    from_yaml,
    load_config,
    preset_names,
    presets,
    shareable,
    to_yaml,
)
from agent_r1.config import settings as core
from agent_r1.config.renamed import RENAMED_SETTINGS, REPLACED_PRESETS, translate_card
from agent_r1.evaluation.provenance import train_command
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.machine import device_names
from agent_r1_recipes.laptop.demonstrator import explorer_in

# ------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads_and_survives_a_round_trip(preset, algorithm, tmp_path):
    config = load_config(preset, algorithm=algorithm, seed=3)
    assert (config.preset, config.algorithm, config.seed) == (preset, algorithm, 3)
    assert isinstance(config, Config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config


def test_a_run_with_keys_that_are_gone_is_read_and_one_that_used_them_is_refused(tmp_path):
    config, file = load_config("small"), tmp_path / "config.yaml"
    old = config.model_dump()
    old["actor"] |= {"mask_tool_tokens": True, "ablation_normalizer": "masked"}
    old["rollout"] |= {"top_p": 1.0}
    file.write_text(yaml.safe_dump(old))
    assert from_yaml(file) == config
    for section, name, value in (("actor", "mask_tool_tokens", False), ("rollout", "top_p", 0.9)):
        file.write_text(yaml.safe_dump(old | {section: old[section] | {name: value}}))
        with fails_with("unknown_setting"):
            from_yaml(file)


NEW_NAMES = {old: new for old, new in RENAMED_SETTINGS.items() if isinstance(new, str)}


@pytest.mark.parametrize("old", NEW_NAMES)
def test_a_renamed_key_keeps_its_value_in_a_saved_run_and_is_refused_elsewhere(old, tmp_path):
    (section, key), (owner, name) = old.split("."), NEW_NAMES[old].split(".")
    value = {"ratio_level": "sequence", "stall_timeout_s": 777}.get(name, 1)
    file = tmp_path / "config.yaml"
    file.write_text(f"algorithm: grpo\n{section}: {{{key}: {value}}}\nseed: 4\n")
    config = from_yaml(file)
    assert (getattr(getattr(config, owner), name), config.seed) == (value, 4)
    with pytest.raises(
        ConfigError, match=f"^unknown configuration key '{old}'; it is {NEW_NAMES[old]} now;"
    ):
        load_config("small", [f"{old}={value}"])


@pytest.mark.parametrize("old", NEW_NAMES)
def test_an_old_key_next_to_its_new_one_is_refused(old, tmp_path):
    """One of the two values would be ignored without a word."""
    (section, key), (owner, name) = old.split("."), NEW_NAMES[old].split(".")
    saved = {section: {key: 5}}
    saved.setdefault(owner, {})[name] = 96
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(saved))
    with fails_with("setting_twice", f"{old} and {NEW_NAMES[old]} are the same setting"):
        from_yaml(file)


def test_a_card_of_an_earlier_run_has_an_interval():
    assert translate_card({"score": 0.5, "em_ci95": [0.4, 0.6]})["score_ci95"] == [0.4, 0.6]
    assert translate_card({"score": 0.5})["score_ci95"] == [0.5, 0.5]
    assert translate_card({"score": 0.5, "score_ci95": [0.3, 0.7], "em_ci95": [0.4, 0.6]})[
        "score_ci95"
    ] == [0.3, 0.7]


def test_later_layers_win(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        "algorithm: grpo\nactor: {lr: 0.1}\ntrainer: {steps: 7}\n"
        "ppo: {actor: {lr: 0.2}, rollout: {prompts_per_step: 2}}\ngrpo: {trainer: {steps: 9}}\n"
    )
    monkeypatch.setattr(
        "agent_r1.config.presets.preset_files",
        lambda: {file.stem: file for file in tmp_path.glob("*.yaml")},
    )
    grpo = load_config("mine")
    assert (grpo.algorithm, grpo.actor.lr, grpo.trainer.steps) == ("grpo", 0.1, 9)
    assert (
        grpo.rollout.prompts_per_step == Config().rollout.prompts_per_step
    )  # the default in settings.py
    ppo = load_config("mine", ["actor.lr=0.3"], algorithm="ppo")
    assert (ppo.actor.lr, ppo.trainer.steps, ppo.rollout.prompts_per_step) == (0.3, 7, 2)
    assert load_config("mine", ["algorithm=ppo"]).actor.lr == 0.2  # the same, said as an override


@pytest.mark.parametrize("seed", [0, 12345])
def test_overrides_are_read_as_yaml(seed):
    overrides = [
        "trainer.loggers=[wandb,tensorboard]",
        "actor.lr=1e-4",
        "advantage.normalize_std=false",
        "model.path=null",
    ]
    config = load_config("small", overrides, seed=seed)
    assert config.trainer.loggers == ["wandb", "tensorboard"] and config.actor.lr == 1e-4
    assert (
        config.advantage.normalize_std is False
        and config.model.path is None
        and config.seed == seed
    )


def test_a_table_replaces_the_one_below_it():
    """Merged, the shares of kinds that were not named would stay, and the mixture would not be what
    was written."""
    config = load_config(
        "small", ["data.mix={1-hop: 1}", "cold_start.behaviours={good: 0.5, guess: 0.5}"]
    )
    assert config.data.mix == {"1-hop": 1.0} and config.cold_start.behaviours == {
        "good": 0.5,
        "guess": 0.5,
    }
    # Also where a preset may leave the table out.
    assert load_config("discover", ["data.train_mix={3-hop: 1}"]).data.train_mix == {"3-hop": 1.0}


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["trainer.stpes=5"], "unknown_setting"),
        (["algorithm=gpro"], "unknown_name"),
        (["algorithm=[ppo]"], "wrong_type"),
        (["data.name=hotpot"], "unknown_name"),
        (["env.reward=mat"], "unknown_name"),
        (["actor.ratio_level=steps"], "unknown_name"),
        (["rollout.flow=mine"], "bad_setting"),
        (["cold_start.demonstrator=mine"], "bad_setting"),
        (["trainer.loggers=[wndb]"], "unknown_name"),
        (["trainer.steps=many"], "wrong_type"),
        (["trainer.loggers=[wandb"], "bad_override"),
        (["data.source=2024-02-30"], "bad_override"),
        (["steps"], "bad_override"),
        (["advantage.gamma=1.5"], "out_of_range"),
        (["actor.lr=.inf"], "out_of_range"),
        (["env.format_penalty=.nan"], "out_of_range"),
        (["data.mix={1-hop: 0}"], "bad_setting"),
        # each possible, and not together
        (["rollout.prompts_per_step=64", "data.train=20"], "too_few_questions"),
        (["rollout.max_tokens_per_turn=320", "rollout.max_context=320"], "turn_exceeds_context"),
        (["rollout.max_context=512", "model.max_position=256"], "context_exceeds_model"),
        (["search.min_k=4"], "min_k_above_top_k"),
        (["model.heads=3"], "indivisible_heads"),
        (["algorithm=grpo", "rollout.samples_per_prompt=1"], "group_of_one"),
        (["actor.lora_rank=8"], "lora_without_verl"),
        (
            ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "actor.minibatches=3"],
            "indivisible_batch",
        ),
        (
            ["algorithm=ppo", "rollout.prompts_per_step=4", "critic.minibatches=3"],
            "indivisible_batch",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_no_run_can_do_is_refused(overrides, code):
    with fails_with(code):
        load_config("small", overrides, algorithm=None)


def test_a_critic_that_is_not_trained_divides_no_batch():
    """Before, 3 x 3 episodes of grpo were refused for the critic's two minibatches."""
    words = ["rollout.prompts_per_step=3", "rollout.samples_per_prompt=3", "actor.minibatches=3"]
    assert load_config("small", words, algorithm="grpo").critic.minibatches == 2
    with fails_with("indivisible_batch"):
        load_config("small", words, algorithm="ppo")


def test_a_gpu_preset_is_prepared_in_small():
    """The batches of training have nothing to do with the data: `agent-r1 data --preset musique
    data.train=40` was refused."""
    few = ["data.train=40", "data.val=4", "data.test=4"]
    for command in ("data", "index", "tools", "try", "search-server"):
        assert (
            cli.config_of(cli.parse_command_line([command, "--preset", "musique", *few])).data.train
            == 40
        )
        with fails_with("unknown_index"):
            cli.config_of(
                cli.parse_command_line([command, "--preset", "musique", *few, "search.index=x"])
            )
    with fails_with("too_few_questions"):
        cli.config_of(cli.parse_command_line(["train", "--preset", "musique", *few]))


def test_a_preset_that_is_gone_names_its_successor():
    for gone, successor in REPLACED_PRESETS.items():
        assert successor in presets.preset_names() and gone not in presets.preset_names()
        with pytest.raises(ConfigError, match=f"{gone}' .it is gone, and '{successor}' is in its"):
            load_config(gone)


@pytest.mark.parametrize("preset", ["laptpo", "../smoke"])
def test_an_unknown_preset_is_refused(preset):
    with fails_with("unknown_preset"):
        load_config(preset)


KEYS = [
    f"{name}.{key}"
    for name, field in Config.model_fields.items()
    for key in getattr(field.annotation, "model_fields", ())
]
keys = st.sampled_from(KEYS) | st.text(max_size=8)
odd_values = st.sampled_from(["null", "true", "[1]", "{a: 1}", "1e9", "nan"])
values = st.text(max_size=8) | st.integers(-3, 600).map(str) | odd_values


@example(["\r=\x1f"])
@given(st.lists(st.tuples(keys, values).map("=".join), max_size=2))
def test_whatever_is_overridden_the_answer_is_a_configuration_or_one_line(overrides):
    try:
        assert isinstance(load_config("small", overrides), Config)
    except ConfigError as error:
        assert str(error).strip() and len(str(error).splitlines()) <= 1 + sum(
            o.count("\n") for o in overrides
        )


# ------------------------------------------------------------------------------ a run's config.yaml


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("trainer: {steps: [", "damaged_config"),
        ("trainer: {stpes: 3}", "unknown_setting"),
        ("algorithm: gpro", "unknown_name"),
        ("[" * 50_000, "damaged_config"),  # libyaml's own reader would end the process
        ("a" + ": {a" * 50_000, "damaged_config"),
        (
            "a: [&a0 [x, x], "
            + ", ".join(f"&a{n} [{f'*a{n - 1}, ' * 10}]" for n in range(1, 9))
            + "]",
            "damaged_config",
        ),
        ("- a\n- b", "wrong_type"),
    ],
)
def test_a_damaged_or_foreign_configuration_is_refused(tmp_path, text, code):
    (tmp_path / "config.yaml").write_text(text)
    with fails_with(code):
        from_yaml(tmp_path / "config.yaml")


def test_a_fingerprint_changes_with_all_that_weights_depend_on_and_with_nothing_else():
    base = load_config("small")
    assert fingerprint(base) == fingerprint(load_config("small")) and len(fingerprint(base)) == 8
    changed = [
        load_config("small", [o])
        for o in ("seed=1", "actor.lr=0.5", "data.mix={1-hop: 1}", "verl.ranks=2")
    ]
    assert len({fingerprint(c) for c in (base, *changed)}) == 5
    aside = (
        "trainer.threads=3",
        "trainer.loggers=[wandb]",
        "trainer.save_every=7",
        "search.url=http://127.0.0.1:8100",
        "verl.stall_timeout_s=9",
    )
    assert {fingerprint(load_config("small", [o])) for o in aside} == {fingerprint(base)}
    assert fingerprint(load_config("small", ["trainer.device=cuda"])) != fingerprint(base)
    assert fingerprint(base.data, 1) != fingerprint(base.data, 2)


def test_a_preset_for_a_cpu_stays_there_on_a_machine_with_a_gpu(monkeypatch, tmp_path):
    """`auto` is bfloat16 on CUDA wherever there is a GPU, and none of their figures was measured
    so."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    here = [name for name in preset_names() if not load_config(name).verl.gpu]
    assert {"discover", "small", "pocket", "tinyquest", "hotpotqa-tiny"} < set(here)
    pretend_processor(monkeypatch, tmp_path, True)
    assert {resolved(name) for name in here if name != "pocket"} == {("cpu", torch.float32)}
    assert resolved("pocket") == ("cpu", torch.bfloat16)
    assert resolved("discover", "trainer.device=cuda") == ("cuda", torch.bfloat16)


def resolved(preset: str, *settings: str) -> tuple[str, torch.dtype]:
    trainer = load_config(preset, list(settings)).trainer
    return resolve_device(trainer.device, trainer.dtype)


def pretend_processor(monkeypatch, tmp_path, has_bfloat16: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : avx512f {'avx512_bf16' if has_bfloat16 else ''}\n")
    monkeypatch.setattr("agent_r1.ground.device.CPU", tmp_path / "cpuinfo")


@pytest.mark.parametrize("has", [True, False])
def test_fast_is_bfloat16_only_where_the_processor_multiplies_it(monkeypatch, tmp_path, has):
    pretend_processor(monkeypatch, tmp_path, has)
    name = "bfloat16" if has else "float32"
    trainer = load_config("pocket").trainer
    assert resolved("pocket") == ("cpu", getattr(torch, name))
    assert device_names(trainer.device, trainer.dtype) == ("cpu", name)


# ---------------------------------------------------------------------------- sections of a preset


def test_a_section_of_a_data_set_holds_for_this_data_set_alone(tmp_path):
    """`smoke` is tuned for TinyHop. For other questions it is the preset that worlds extend."""
    rows = tmp_path / "questions.jsonl"
    rows.write_text("{}")
    other = ["data.name=rows", f"data.source={rows}"]
    for algorithm in ("grpo", "ppo", "steppo"):
        here, there = (
            load_config(preset, other, algorithm=algorithm) for preset in ("smoke", "small")
        )
        assert here.model_copy(update={"preset": "small"}) == there
    for preset in ("smoke", "discover", "shuffled"):
        assert explorer_in(load_config(preset).cold_start.behaviours)
        assert not explorer_in(load_config(preset, other).cold_start.behaviours)


@pytest.mark.parametrize(
    "preset", [name for name in preset_names() if not load_config(name).verl.gpu]
)
def test_on_a_cpu_ppo_has_at_least_half_of_the_episodes_of_grpo(preset):
    """`small` plays 96 questions once with ppo; a preset that extends it may ask fewer."""
    episodes = []
    for algorithm in ("grpo", "ppo"):
        rollout = load_config(preset, algorithm=algorithm).rollout
        episodes.append(rollout.prompts_per_step * rollout.samples_per_prompt)
    grpo, ppo = episodes
    assert 2 * ppo >= grpo


def test_an_own_preset_may_have_sections(tmp_path):
    """A later file wins over an earlier file's section, and a section over its own file."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: smoke\nactor: {lr: 0.5}\ntinyhop: {trainer: {steps: 3}}\n"
        "rows: {trainer: {steps: 5}}\nppo: {trainer: {steps: 7}}\n"
    )
    assert load_config(str(file)).actor.lr == 0.5
    assert load_config(str(file)).trainer.steps == 3
    assert load_config(str(file), algorithm="ppo").trainer.steps == 7
    assert load_config(str(file), ["trainer.steps=9"]).trainer.steps == 9
    file.write_text("extends: smoke\ntinyhopp: {trainer: {steps: 3}}\n")
    with fails_with("unknown_setting"):
        load_config(str(file))


# ------------------------------------------------------------------------------- owners of settings


def test_the_core_has_few_settings_of_its_own():
    """The others stand with their owners: recipes, verl's engine, the cold start. `--dry-run` knows
    them all."""
    mine = {
        f"{section}.{key}"
        for section, field in core.Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {section: field})
    }
    print(f"{len(mine)} of {len(KEYS)} settings are the core's")
    # 81 before `search.min_k` and `trainer.eval_conditions`.
    assert len(mine) <= 83 and mine < {
        *KEYS,
        *(f"{name}.{name}" for name in ("preset", "algorithm", "engine", "seed")),
    }


@pytest.mark.parametrize("key", ["env.judge_url", "verl.ranks"])
def test_a_setting_of_another_owner_is_known_to_the_hint(key):
    with pytest.raises(
        ConfigError, match=rf"^unknown configuration key '{key}x' \(did you mean '{key}'\?\)"
    ):
        load_config("small", [f"{key}x=1"])


def test_dry_run_lists_every_setting(capsys):
    assert cli.main(["train", "--preset", "small", "--dry-run", "--verbose"]) == 0
    said = yaml.safe_load(capsys.readouterr().out.rpartition("\n\n")[2])
    assert {
        f"{section}.{key}" for section, of in said.items() if isinstance(of, dict) for key in of
    } >= set(KEYS)


def documented() -> list[str]:
    """Every `section.key=value` of README, lessons and docs whose value is written out."""
    root = Path(__file__).parents[1]
    pages = [
        root / "README.md",
        *(root / "docs").rglob("*.md"),
        *(root / "recipes").glob("*/README.md"),
    ]
    sections = "|".join(Config.model_fields)
    words = rf"\b(?:{sections})\.[a-z_]+(?:\.[a-zA-Z_]+)?=[^\s`\"')|,;:…]*"
    return sorted({found for page in pages for found in re.findall(words, page.read_text())})


def test_every_setting_in_the_docs_is_known():
    """Keys, and not what goes with what: a line may name one of several settings, or write FOLDER
    for a value."""
    assert len(documented()) > 100
    for said in documented():
        try:
            load_config("small", [said])
        except ConfigError as error:
            assert "unknown configuration key" not in str(error), said


SECRETS = {
    "env.mcp.f": [
        "env SHOP_KEY=sk-4711 python server.py",
        "/usr/bin/env -i shop_key=sk-4711 python server.py",
        "sh -c 'SHOP_KEY=sk-4711 python server.py'",
        "docker run -e SHOP_KEY=sk-4711 image",
        "docker run --env=SHOP_KEY=sk-4711 image",
        "python server.py --api-key sk-4711",
        "python server.py --token=sk-4711",
        "http://user:sk-4711@127.0.0.1:9/mcp",
        "https://x.org/mcp?v=1&api_key=sk-4711",
        "python server.py --key sk-4711",
        "npx mcp-remote http://127.0.0.1:9/mcp --header 'Authorization: Bearer sk-4711'",
        "curl -H x-api-key:4711 http://127.0.0.1:9/mcp",
        "python server.py sk-proj-4711471147114711",
    ],
    "rollout.agent": ["env SHOP_KEY=sk-4711 python agent.py"],
}


@pytest.mark.parametrize(
    ("setting", "command"), [(key, one) for key, commands in SECRETS.items() for one in commands]
)
def test_a_command_with_a_key_is_refused_and_not_shown(setting, command):
    with fails_with("key_in_command", "name the variable") as error:
        load_config("small", [f"{setting}={json.dumps(command)}"])
    assert "4711" not in str(error.value)


@pytest.mark.parametrize(
    "command",
    [
        "python server.py --max-tokens 5 --tokenizer x --key-file keys.txt mode=fast",
        "env -i python server.py",
        "http://127.0.0.1:9/mcp?profile=shop",
        "npx -y @scope/server /home/me",
    ],
)
def test_a_command_without_a_key_is_a_command(command):
    assert load_config("small", [f"env.mcp.f={json.dumps(command)}"]).env.mcp == {"f": command}


def test_what_others_see_has_no_command_and_no_folder(tmp_path):
    """Names of files are kept, so that a reader knows which preset and which class it was."""
    folder = tmp_path / "my-task"
    folder.mkdir()
    for name in ("preset.yaml", "rows.jsonl", "world.py"):
        (folder / name).write_text("")
    (folder / "preset.yaml").write_text(
        "extends: small\nenv: {name: world.py:Lamp, tools: [world.py:look, files]}\n"
        "data: {name: rows, source: rows.jsonl}\n"
    )
    commands = ["env.mcp.files=python server.py", "env.mcp_per_episode=[files]"]
    models = [f"model.path={tmp_path}/start"]
    config = load_config(str(folder / "preset.yaml"), [*commands, *models])
    shown = shareable(config)
    assert str(tmp_path) not in to_yaml(shown) and "server.py" not in to_yaml(shown)
    names = [shown.preset, shown.env.name, shown.data.source, shown.model.path, *shown.env.tools]
    assert names == ["my-task/preset.yaml", "world.py:Lamp", "rows.jsonl", "start", "world.py:look",
                     "files"]  # fmt: skip
    assert shown.env.mcp == {} and config.env.mcp == {"files": "python server.py"}
    assert str(tmp_path) not in train_command(config)
    file = tmp_path / "agent_r1.yaml"
    file.write_text(to_yaml(shown))
    assert from_yaml(file) == shown  # so the exported settings can be read
