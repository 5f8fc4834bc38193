"""A recipe of the user's: `--recipe FOLDER`, and the short names of its recipe.toml."""

from __future__ import annotations

import json

import pytest
from conftest import fails_with
from runs import main

from agent_r1.app import cli, parser
from agent_r1.config import (
    fingerprint,
    from_yaml,
    load_config,
    plugins,
    presets,
    tables,
    to_yaml,
    user_code,
)
from agent_r1.ground.errors import ConfigError
from agent_r1.workspace import Workspace

TABLE = """
[env]
thrifty = "world.py:Thrifty"
[tool]
double = "world.py:double"
[estimator.halved]
code = "credit.py:halved"
groups = true
"""
WORLD = """
from agent_r1 import HermesToolEnv
from agent_r1.tool import tool

@tool
def double(x: int) -> int:
    '''Double a number.

    Args:
        x: The number.
    '''
    return 2 * x

class Thrifty(HermesToolEnv):
    def process_reward(self, call, result):
        return -0.1
"""
CREDIT = """
from agent_r1 import Estimator, grpo

@Estimator
def halved(batch, advantage):
    advantages, returns = grpo(batch, advantage)
    return advantages / 2, returns
"""
PRESET = "extends: small\nenv: {name: thrifty, tools: [double]}\nhalved: {actor: {lr: 0.25}}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A recipe that no other test has named."""
    for kind in ("env", "tool", "estimator", "setting", "command", "option"):
        monkeypatch.setitem(tables._tables(), kind, dict(tables.entries(kind)))
    monkeypatch.setattr(plugins, "_trusted_names", set())
    monkeypatch.setattr(parser, "COMMANDS", dict(parser.COMMANDS))
    monkeypatch.setattr(cli, "COMMANDS", parser.COMMANDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, text in {
        "recipe.toml": TABLE,
        "world.py": WORLD,
        "credit.py": CREDIT,
        "preset.yaml": PRESET,
    }.items():
        (mine / name).write_text(text)
    return mine


def test_its_short_names_can_be_used_like_ours(folder, capsys):
    assert main("train", "halved", "--recipe=mine", "--dry-run", "--verbose") == 0
    assert "preset: " in capsys.readouterr().out
    assert main("tools", "--recipe=mine", "--call", "double", "x=21") == 0
    assert "42" in capsys.readouterr().out
    config = load_config(str(folder / "preset.yaml"), algorithm="halved")
    assert (config.actor.lr, config.env.name) == (0.25, "thrifty")  # with a section of its own
    assert tables.entry_of("estimator", "halved", "algorithm")["groups"] is True
    assert tables.resolve("env", "thrifty", "env.name").__name__ == "Thrifty"


def test_it_declares_settings_of_its_own(folder, capsys):
    (folder / "thrift_settings.py").write_text(
        "from agent_r1 import EnvConfig\n\nclass Thrift(EnvConfig):\n    call_cost: float = 0.1\n\n"
        "    @staticmethod\n    def conflicts(config, trains):\n"
        "        if config.env.call_cost > config.env.max_turns:\n            yield 'env.call_cost "
        "is too high'\n"
    )
    (folder / "preset.yaml").write_text("extends: small\n")
    (folder / "recipe.toml").write_text(
        TABLE + "[setting.'env.thrift']\nfields = 'thrift_settings.py:Thrift'\n"
    )
    for words, said in (
        (["env.call_cost=0.5"], "  call_cost: 0.5\n"),
        (["env.call_cots=0.5"], "did you mean 'env.call_cost'?"),
        (["env.call_cost=99"], "env.call_cost is too high"),
    ):
        main("train", "grpo", "--recipe=mine", "--dry-run", "--verbose", *words)
        assert said in "".join(capsys.readouterr())
    tables.entries("setting").pop("env.thrift")
    with pytest.raises(ConfigError, match="unknown configuration key 'env.call_cost'"):
        load_config("small", ["env.call_cost=0.5"])


COMMANDS = """
from pathlib import Path
from agent_r1 import AgentR1Error, command, option

@command("greet", "greet a reader", ["Ada --recipe mine", "Ada --loud"],
         option("who", help="name"), option("--loud", action="store_true", help="shout"))
def greet(a):
    if a.who == "nobody":
        raise AgentR1Error("name a reader", code="no_reader")
    print(f"hello, {a.who}".upper() if a.loud else f"hello, {a.who}")

def write_card(checkpoint, config, file):
    file.write_text(f"{checkpoint.name} of {config}")
"""


def test_it_adds_commands_and_export_formats(folder, capsys):
    (folder / "spoken.py").write_text(COMMANDS)
    (folder / "recipe.toml").write_text(
        TABLE + "[command.greet]\ncode = 'spoken.py:greet'\nhelp = 'greet a reader'\n"
        "[option.'export --card']\ncode = 'spoken.py:write_card'\nhelp = 'write a card: one line'\n"
    )
    assert main("greet", "Ada") == 2 and "invalid choice: 'greet'" in capsys.readouterr().err
    assert main("--help", "--recipe=mine") == 0 and "greet a reader" in capsys.readouterr().out
    assert main("greet", "Ada", "--loud", "--recipe", "mine") == 0
    assert capsys.readouterr().out == "HELLO, ADA\n"
    assert main("greet", "nobody", "--recipe=mine") == 1
    assert capsys.readouterr().err == "agent-r1: name a reader\n"
    model = folder / "step_000001"
    model.mkdir()
    assert main("export", "--recipe=mine", f"--checkpoint-dir={model}", "--card=card.txt") == 0
    assert (folder.parent / "card.txt").read_text() == "step_000001 of None"
    assert (
        main("export", "--help", "--recipe=mine") == 0
        and "write a card: one line" in capsys.readouterr().out
    )


def test_a_command_of_ours_cannot_be_replaced(folder, capsys):
    (folder / "replacing.py").write_text(COMMANDS.replace('"greet",', '"train",'))
    (folder / "recipe.toml").write_text("[command]\ngreet = 'replacing.py:greet'\n")
    assert main("greet", "Ada", "--recipe=mine") == 2
    assert "the command 'train' already exists; rename it" in capsys.readouterr().err


def test_nothing_of_it_is_imported_before_it_is_named(folder):
    tables.add_recipe(folder / "recipe.toml")
    (folder / "world.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(ConfigError, match="imported"):
        tables.resolve("env", "thrifty", "env.name")


def test_a_change_of_its_code_makes_other_artifacts(folder):
    config = load_config(str(folder / "preset.yaml"), algorithm="halved")
    before = Workspace(config).cold_start
    assert plugins.code_hashes(user_code(config)).keys() == {
        "credit.py",
        "world.py",
    }  # `--resume` compares these
    (folder / "credit.py").write_text(CREDIT + "# other\n")
    assert Workspace(config).cold_start == before  # imitation knows no estimator
    (folder / "world.py").write_text(WORLD + "# other\n")
    assert Workspace(config).cold_start != before


def test_another_process_of_the_run_knows_its_names_and_a_stranger_does_not(folder, monkeypatch):
    saved = folder.parent / "config.yaml"
    config = load_config(str(folder / "preset.yaml"), algorithm="halved")
    saved.write_text(to_yaml(config))
    for kind in ("env", "tool", "estimator"):
        for name in ("thrifty", "double", "halved"):
            tables.entries(kind).pop(name, None)
    with pytest.raises(ConfigError, match=f"--recipe {folder}"):
        from_yaml(saved)
    assert fingerprint(from_yaml(saved, written_here=True)) == fingerprint(config)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[env]\nhermes = 'world.py:Thrifty'", "the env 'hermes' is already in another table"),
        ("[environment]\nthrifty = 'world.py:Thrifty'", "'environment' is unknown"),
        (
            "[setting.'env.x']\nfields = 'json:loads'",
            "json:loads does not extend EnvConfig",
        ),
        (
            "[settings]\n'env.x' = 'world.py:Thrifty'",
            """write [setting."SECTION.OWNER"] with fields = "CODE" instead of [settings]""",
        ),
        ("[export.card]\ncode = 'world.py:f'", """write [option."export --NAME"] instead"""),
    ],
)
def test_a_table_that_says_nonsense_is_refused_in_one_line(folder, capsys, table, said):
    (folder / "recipe.toml").write_text(table)
    assert main("train", "grpo", "--recipe=mine", "--dry-run") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and "recipe.toml" in line


def test_ours_go_by_name_and_by_folder():
    from runs import ROOT

    assert (
        presets.preset_of("tinymath")
        == presets.preset_of(str(ROOT / "recipes/tinymath"))
        == "tinymath"
    )
    assert presets.preset_of("two_tools") == presets.preset_of("two-tools") == "two-tools"
    with fails_with("missing_recipe"):
        presets.preset_of("tinymaths")
    with pytest.raises(ConfigError, match="--preset: discover, shuffled, small, smoke"):
        presets.preset_of("laptop")
    assert (
        load_config(str(ROOT / "recipes/laptop/discover.yaml")).data.name == "tinyhop"
    )  # its table is there already


def test_what_new_writes_reads_public_names_only(folder):
    from test_architecture import deep

    assert main("new", "written") == 0
    files = list((folder.parent / "written").glob("*.py"))
    assert len(files) == 4 and not set().union(*map(deep, files))
    assert "# written" in (folder.parent / "written" / "README.md").read_text()
    assert json.loads((folder.parent / "written" / "questions.jsonl").read_text().splitlines()[0])[
        "question"
    ]
