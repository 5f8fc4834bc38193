"""The configuration: layers, overrides, and what is refused before any minute is spent."""

from __future__ import annotations

import math
from operator import attrgetter

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.config import (
    ALGORITHMS,
    Config,
    Section,
    check,
    fingerprint,
    from_yaml,
    load_config,
    preset_names,
    to_yaml,
    what_counts,
)
from agent_r1.errors import AgentR1Error, ConfigError, nearest
from agent_r1.training.advantages import ESTIMATORS, get_estimator

# ---------------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads_and_survives_a_round_trip(preset, algorithm, tmp_path):
    config = load_config(preset, algorithm=algorithm, seed=3)
    assert (config.preset, config.algorithm, config.seed) == (preset, algorithm, 3)
    assert isinstance(config, Config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config


def test_a_run_from_before_the_ablation_left_the_package_is_still_read(tmp_path):
    config = load_config("smoke")
    with_them = config.model_dump()
    with_them["actor"] |= {"mask_tool_tokens": True, "ablation_normalizer": "masked"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(with_them))
    assert from_yaml(tmp_path / "config.yaml") == config
    assert what_counts(config.actor) == with_them["actor"]  # so its checkpoints still fit
    with_them["actor"]["mask_tool_tokens"] = False
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(with_them))
    with pytest.raises(ConfigError, match=r"config.yaml: unknown configuration key 'actor.mask_tool_tokens'[^\n]*$"):
        from_yaml(tmp_path / "config.yaml")


def test_later_layers_win(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(
        "algorithm: grpo\nactor: {lr: 0.1}\ntrainer: {steps: 7}\n"
        "ppo: {actor: {lr: 0.2}, rollout: {prompts_per_step: 2}}\ngrpo: {trainer: {steps: 9}}\n"
    )
    monkeypatch.setattr("agent_r1.config._preset_dir", lambda: tmp_path)
    grpo = load_config("mine")
    assert (grpo.algorithm, grpo.actor.lr, grpo.trainer.steps) == ("grpo", 0.1, 9)
    assert grpo.rollout.prompts_per_step == Config().rollout.prompts_per_step  # the default in settings.py
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
    config = load_config("smoke", overrides, seed=seed)
    assert config.trainer.loggers == ["wandb", "tensorboard"] and config.actor.lr == 1e-4
    assert config.advantage.normalize_std is False and config.model.path is None and config.seed == seed


def test_a_table_replaces_the_one_below_it():
    """Merged, the shares of kinds that were not named would stay, and the mixture would not be what was written."""
    config = load_config("laptop", ["data.mix={1-hop: 1}", "cold_start.behaviours={good: 0.5, guess: 0.5}"])
    assert config.data.mix == {"1-hop": 1.0} and config.cold_start.behaviours == {"good": 0.5, "guess": 0.5}


def test_the_defaults_of_one_configuration_are_not_shared_with_another():
    first, second = Config(), Config()
    first.data.mix["1-hop"] = 9.0
    first.trainer.loggers.append("wandb")
    assert second.data.mix["1-hop"] != 9.0 and second.trainer.loggers == []


# ------------------------------------------------------------------------------------------------------ unknown names


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("laptpo", [], r"unknown preset 'laptpo' \(did you mean 'laptop'\?\); choose from "),
        ("../smoke", [], "unknown preset"),
        ("", [], "unknown preset ''"),
        ("smoke", ["trainer.stpes=5"], r"unknown configuration key 'trainer.stpes' \(did you mean 'trainer.steps'\?\)"),
        ("smoke", ["trainr.steps=5"], r"unknown configuration key 'trainr'.*`agent-r1 train --dry-run` lists all keys"),
        ("smoke", ["sed=5"], r"unknown configuration key 'sed' \(did you mean 'seed'\?\)"),
        ("smoke", ["grpo.actor.lr=1"], "unknown configuration key 'grpo'"),
        (
            "smoke",
            ["algorithm=gpro"],
            r"^algorithm='gpro' is unknown \(did you mean 'grpo'\?\); choose from grpo, ppo$",
        ),
        ("smoke", ["engine=vrel"], "engine='vrel' is unknown.*choose from local, verl"),
        ("smoke", ["actor.loss_aggregation=token-men"], r"did you mean 'token-mean'\?"),
        ("smoke", ["actor.kl_estimator=k4"], "actor.kl_estimator='k4' is unknown.*choose from k1, k2, k3"),
        ("smoke", ["actor.kl_in=both"], "actor.kl_in='both' is unknown.*choose from loss, reward"),
        ("smoke", ["trainer.device=gpu"], "trainer.device='gpu' is unknown.*choose from auto, cpu, cuda"),
        ("smoke", ["trainer.dtype=fp16"], "choose from auto, float32, bfloat16"),
        (
            "smoke",
            ["trainer.loggers=[wndb]"],
            r"'wndb' is unknown \(did you mean 'wandb'\?\); choose from wandb, tensorboard",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(preset, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(preset, overrides)


def test_the_algorithm_argument_is_checked_too():
    with pytest.raises(ConfigError, match="algorithm='reinforce' is unknown"):
        load_config("smoke", algorithm="reinforce")


def test_every_algorithm_has_an_estimator_and_unknown_ones_raise():
    assert {"grpo", "ppo"} <= set(ESTIMATORS)
    with pytest.raises(ConfigError, match="gpro.*did you mean 'grpo'"):
        get_estimator("gpro")


def test_nearest_says_nothing_when_nothing_is_near():
    assert nearest("zebra", ["grpo", "ppo"]) == "" and nearest("gpro", ["grpo", "ppo"]) == " (did you mean 'grpo'?)"


# --------------------------------------------------------------------------------------------------- impossible values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.steps=many",
            "^trainer.steps='many': input should be a valid integer, unable to parse string as an integer$",
        ),
        ("trainer.steps=1.5", "trainer.steps"),
        ("advantage.normalize_std=perhaps", "advantage.normalize_std"),
        ("data.mix=5", "data.mix"),
        ("data.mix={1-hop: lots}", "data.mix.1-hop='lots': input should be a valid number"),
        ("trainer.loggers=wandb", "trainer.loggers"),
        ("seed=null", "seed"),
        ("data=5", "data=5: input should be a valid dictionary"),
        ("data.mix.1-hop=0.5", r"unknown configuration key 'data.mix.1-hop' \(did you mean 'data.mix'"),
        ("trainer.loggers=[wandb", r"override 'trainer.loggers=\[wandb' is not valid YAML"),
        ('model.path="x', "not valid YAML"),
        ("data.source=2024-02-30", "not valid YAML"),
        ("steps", r"override 'steps' is not of the form section.key=value \(for example trainer.steps=20\)"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config("smoke", [override])


def test_a_group_of_one_is_refused_for_grpo_alone():
    with pytest.raises(ConfigError, match="group of one; set rollout.samples_per_prompt to 2 or more, or use ppo"):
        load_config("smoke", ["rollout.samples_per_prompt=1"], algorithm="grpo")
    assert load_config("smoke", ["rollout.samples_per_prompt=1"], algorithm="ppo").rollout.samples_per_prompt == 1


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_batch_that_does_not_divide_is_refused(part):
    overrides = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4"]
    message = (
        f"4 prompts x 4 samples = 16 trajectories does not divide into {part}.minibatches=3; choose a divisor of 16"
    )
    with pytest.raises(ConfigError, match=message):
        load_config("smoke", [*overrides, f"{part}.minibatches=3"])
    load_config("smoke", [*overrides, f"{part}.minibatches=8"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.prompts_per_step=64", "data.train=20"], "prompts_per_step=64 is more than data.train=20 questions"),
        (["rollout.max_tokens_per_turn=320", "rollout.max_context=320"], "max_tokens_per_turn must be smaller"),
        (["rollout.max_context=512", "model.max_position=256"], "is larger than the model's model.max_position=256"),
        (["rollout.top_p=0.5"], "rollout.top_p=0.5: what is cut off is not sampled.*leave it at 1"),
        (["rollout.top_p=.nan"], "leave it at 1"),
        (["data.mix={1-hop: 0, 2-hop: 0}"], "data.mix={'1-hop': 0, '2-hop': 0}: one share must be more than 0"),
        (["data.mix={1-hop: 2, 2-hop: -1}"], "data.mix.2-hop=-1 is too small; it must be at least 0"),
        (["cold_start.behaviours={good: .nan}"], "cold_start.behaviours.good=nan: input should be a finite number"),
        (["model.heads=3"], "model.hidden_size=128 must be a multiple of 2 x model.heads=3"),
        (["model.kv_heads=3"], "model.kv_heads=3"),
        (["model.layers=1"], "model.layers=1 is too small; it must be at least 2"),
        (["rollout.slots=0"], "rollout.slots=0 is too small; it must be at least 1"),
        (["trainer.save_every=0"], "trainer.save_every=0 is too small"),
        (["trainer.eval_every=-1"], "trainer.eval_every=-1 is too small; it must be at least 0"),
    ],
)
def test_what_no_run_can_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config("smoke", overrides)


SECTIONS = {name: field.annotation for name, field in Config.model_fields.items() if name not in vars(Section)}
SECTIONS = {
    name: section for name, section in SECTIONS.items() if isinstance(section, type) and issubclass(section, Section)
}
KEYS = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields]
BOUNDS = {
    "data.train data.val data.cold search.top_k search.dim env.max_turns env.max_tool_calls env.max_invalid_calls "
    "env.tool_max_chars model.heads model.kv_heads model.hidden_size model.intermediate_size cold_start.copy_tokens "
    "cold_start.mix_tokens rollout.prompts_per_step rollout.samples_per_prompt rollout.max_tokens_per_turn rollout.slots "
    "actor.epochs actor.minibatches critic.epochs critic.minibatches trainer.steps trainer.save_every "
    "trainer.keep_checkpoints trainer.micro_tokens verl.ranks verl.tensor_parallel verl.agent_workers verl.patience_s "
    "verl.nodes": {"ge": 1},
    "data.test cold_start.copy_steps cold_start.mix_steps actor.warmup_steps actor.clip_high actor.clip_dual "
    "actor.entropy_coef actor.kl_coef actor.weight_decay critic.warmup_steps env.format_penalty env.evidence_reward "
    "trainer.eval_every trainer.rollouts_every trainer.threads trainer.max_hours": {"ge": 0},
    "advantage.gamma advantage.lam actor.lr_final actor.clip_low actor.lr critic.lr cold_start.lr": {"ge": 0, "le": 1},
    "actor.grad_clip critic.grad_clip critic.value_clip": {"ge": 1e-6},
    "env.tool_timeout_s env.episode_timeout_s": {"ge": 0.01},
    "model.layers": {"ge": 2},  # copying takes two heads, one behind the other
    "rollout.temperature": {"ge": 0.01, "le": 100},
    "env.call_reward": {"ge": -10, "le": 10},
    "verl.gpu_memory": {"gt": 0, "lt": 1},
}  # fmt: skip
BOUNDS = {key: limits for keys, limits in BOUNDS.items() for key in keys.split()}


@pytest.mark.parametrize("key", KEYS)
def test_what_lies_outside_of_its_bounds_is_refused_and_the_bounds_themselves_are_not(key):
    config, (section, name) = load_config("smoke", algorithm="ppo"), key.split(".")
    bounds, field = BOUNDS.get(key, {}), SECTIONS[section].model_fields[name]
    assert bounds == {
        word: getattr(m, word) for m in field.metadata for word in ("ge", "le", "gt", "lt") if hasattr(m, word)
    }
    whole = isinstance(attrgetter(key)(config), int)
    step = {"ge": -1 if whole else -1e-9, "gt": 0, "le": 1e-9, "lt": 0}
    outside = [(bound + step[word], "too small" if word[0] == "g" else "too large") for word, bound in bounds.items()]
    if bounds and not whole:
        outside.append((math.nan, "no number"))
    for value, wrong in outside:
        setattr(getattr(config, section), name, value)
        with pytest.raises(
            ConfigError, match=f"^{key}=.* is {wrong}; it must be (at least|at most|more than|less than) [^\n]*$"
        ):
            check(config)
    for word, value in bounds.items():
        setattr(getattr(config, section), name, value)
        try:
            check(config)
        except ConfigError as error:  # another rule than this one may say no
            assert "; it must be" not in str(error) or word in ("gt", "lt")


IMPOSSIBLE = [
    "advantage.gamma=1.5", "advantage.lam=-1", "actor.clip_low=-0.2", "actor.clip_low=1.5", "actor.clip_high=-0.5",
    "actor.kl_coef=-1", "actor.lr=-1", "actor.lr=.nan", "env.format_penalty=-1", "env.format_penalty=.nan",
    "actor.grad_clip=0", "critic.value_clip=0", "rollout.temperature=1e-9", "actor.lr_final=5", "actor.warmup_steps=-3",
    "env.max_tool_calls=0", "env.episode_timeout_s=0", "actor.entropy_coef=.nan", "data.mix={1-hop: 0}", "rollout.top_p=.5",
]  # fmt: skip
"""What a review found accepted."""


@pytest.mark.parametrize("override", IMPOSSIBLE)
def test_what_the_review_found_is_refused_in_one_line(override):
    with pytest.raises(ConfigError, match=f"^{override.split('=')[0]}[^\n]*$"):
        load_config("smoke", [override], algorithm="ppo")


def test_a_models_own_folder_brings_its_own_shape():
    """With a downloaded model, the tiny model's numbers are not looked at."""
    config = load_config("smoke", ["model.path=/somewhere", "model.heads=3", "model.max_position=16"])
    assert config.model.path == "/somewhere"


keys = st.sampled_from(KEYS) | st.text(max_size=8)
odd_values = st.sampled_from(["null", "true", "[1]", "{a: 1}", "1e9", "nan"])
values = st.text(max_size=8) | st.integers(-3, 600).map(str) | odd_values


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(keys, values).map("=".join), max_size=2))
def test_whatever_is_overridden_the_answer_is_a_configuration_or_one_line(overrides):
    try:
        assert isinstance(load_config("smoke", overrides), Config)
    except ConfigError as error:
        assert str(error).strip() and len(str(error).splitlines()) <= 1 + sum(o.count("\n") for o in overrides)


# --------------------------------------------------------------------------------------------------- a run's config.yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {steps: [", "cannot be read as YAML"),
        ("trainer: {stpes: 3}", "was this run made by another version"),
        ("trainer: {steps: many}", "was this run made by another version"),
        ("algorithm: gpro", "algorithm='gpro' is unknown"),
        ("\x00", "cannot be read as YAML"),
        ("- a\n- b", "input should be a valid dictionary.*was this run made by another version"),
    ],
)
def test_a_damaged_or_foreign_configuration_is_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_yaml(tmp_path / "config.yaml")


def test_a_missing_configuration_is_refused(tmp_path):
    with pytest.raises(AgentR1Error):
        from_yaml(tmp_path / "config.yaml")


FINGERPRINTS = {  # preset: of grpo, of ppo, as they were when the settings were dataclasses (commit 903f1cf)
    "hotpotqa-1x24gb": ("4b4549b5", "2ed0c1d2"),
    "hotpotqa-1x80gb": ("dd34df20", "6ae0e83e"),
    "hotpotqa-2x80gb": ("a8e46b23", "8cbf5177"),
    "hotpotqa-4xh100": ("4a11aef0", "03c7c557"),
    "hotpotqa-8xh100": ("78dfa019", "4574c9ab"),
    "hotpotqa-tiny": ("dc39630d", "f879fbcb"),
    "laptop": ("e1fb8252", "e83f4bea"),
    "search-r1-3b": ("03acb27a", "720bc80a"),
    "smoke": ("6337cd24", "0ffa51ed"),
}


@pytest.mark.parametrize("preset", preset_names())
def test_runs_and_artifacts_keep_their_names(preset):
    assert tuple(fingerprint(load_config(preset, algorithm=a)) for a in ALGORITHMS) == FINGERPRINTS[preset]


def test_a_fingerprint_changes_with_all_that_weights_depend_on_and_with_nothing_else():
    base = load_config("smoke")
    assert fingerprint(base) == fingerprint(load_config("smoke")) and len(fingerprint(base)) == 8
    changed = [load_config("smoke", [o]) for o in ("seed=1", "actor.lr=0.5", "data.mix={1-hop: 1}", "verl.ranks=2")]
    assert len({fingerprint(c) for c in (base, *changed)}) == 5
    aside = ("trainer.loggers=[wandb]", "trainer.save_every=7", "search.url=http://127.0.0.1:8100", "verl.patience_s=9")
    assert {fingerprint(load_config("smoke", [o])) for o in aside} == {fingerprint(base)}
    assert fingerprint(base.data, 1) != fingerprint(base.data, 2)


def test_a_configuration_changed_in_code_is_checked_by_the_same_rules():
    config = load_config("smoke")
    config.rollout.samples_per_prompt = 1
    config.algorithm = "grpo"
    with pytest.raises(ConfigError, match="group of one"):
        check(config)
