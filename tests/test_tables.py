"""Tables of names: every name resolves, and a wrong one is refused with the nearest."""

from __future__ import annotations

import sys

import pytest

from agent_r1.config import load_config, plugins, tables
from agent_r1.config.settings import RolloutConfig
from agent_r1.config.whole import all_settings
from agent_r1.ground.errors import ConfigError

KINDS = [kind for kind in tables._tables() if kind != "setting"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_of_a_table_is_code_that_exists(kind):
    for name in tables.names(kind):
        assert (
            "publishers" in tables.entries(kind)[name]
            or tables.resolve(kind, name, "here") is not None
        )


def test_the_table_of_a_setting_names_code_for_known_parts():
    settings = tables.entries("setting")
    assert len(settings) > 6
    for setting, code_of_part in settings.items():
        if set(code_of_part) == {"fields"}:  # SECTION.OWNER
            assert setting.partition(".")[0] in all_settings().config.model_fields
            continue
        assert setting in all_settings().fields
        assert set(code_of_part) - {"tool_hint"} <= set(tables.PARTS)
        for part, code in code_of_part.items():
            assert part == "tool_hint" or plugins.import_object(code, setting) is not None
    used = {part for code_of_part in settings.values() for part in code_of_part}
    assert set(tables.PARTS) <= used  # no part without a user


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("flows = 'mine.py:Flow'", "unknown_name"),
        ("flow = 'a sentence'", "names_no_code"),
        ("flow = 3", "names_no_code"),
        ("", "names_no_code"),
    ],
)
def test_a_wrong_table_of_a_setting_is_refused(tmp_path, table, code):
    file = tmp_path / "recipe.toml"
    file.write_text(f"[setting.'rollout.flow']\n{table}\n")
    with pytest.raises(ConfigError) as refused:
        tables.add_recipe(file)
    assert refused.value.code == code


def test_a_users_recipe_changes_what_a_setting_names(tmp_path, monkeypatch):
    """Only if the setting is not at its default."""
    (tmp_path / "my_flow.py").write_text("def flow(*_): return 'mine'\n")
    (tmp_path / "recipe.toml").write_text(
        "[setting.'rollout.temperature']\nflow='my_flow.py:flow'\n"
    )
    monkeypatch.setitem(tables.entries("setting"), "rollout.temperature", {})
    del tables.entries("setting")["rollout.temperature"]
    tables.add_recipe(tmp_path / "recipe.toml")
    changed = RolloutConfig(temperature=0.5)
    made = [make() for make in tables.for_changed_settings("flow", rollout=changed)]
    assert made == ["mine"]
    assert not list(tables.for_changed_settings("flow", rollout=RolloutConfig()))


@pytest.mark.parametrize(
    "setting",
    ["env.rules={exactmatch: 0.5}", "trainer.eval_conditions=[passage 4]", "env.reward=exactmatch"],
)
def test_own_code_is_advised_for_settings_that_take_it(setting):
    """Before, env.rules and conditions advised FILE.py:NAME, and then refused it."""
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        load_config("small", ["env.reward=math", setting])
    advises_code = "or name your own code as FILE.py:NAME" in str(error.value)
    assert error.value.code == "unknown_name"
    assert advises_code == (key in all_settings().code)


def test_only_a_setting_that_takes_code_advises_it():
    """The list in tables.py is of the settings that are marked, and that a table has names for."""
    without_table = {"rollout.flow", "cold_start.demonstrator", "rollout.agent"}
    assert set(tables.SETTINGS_WITH_CODE) == set(all_settings().code) - without_table


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(
        ConfigError, match=r"env.name='hermess' is unknown \(did you mean 'hermes'\?\)"
    ):
        tables.resolve("env", "hermess", "env.name")


def test_our_own_names_are_never_looked_for_in_the_working_directory(tmp_path, monkeypatch):
    """A file there that is called like a library would be imported in its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert tables.resolve("env", "hermes", "env.name") and "" not in sys.path
    (tmp_path / "mine_alone.py").write_text("class World: pass\n")
    plugins.trust(["mine_alone:World"])
    assert (
        tables.resolve("env", "mine_alone:World", "env.name").__name__ == "World" and "" in sys.path
    )
