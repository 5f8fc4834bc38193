"""Code of one's own: found by name, refused where it keeps no contract, never run because somebody
else named it."""

from __future__ import annotations

import asyncio
import io
import shlex
import subprocess
import sys

import pytest
from runs import main

from agent_r1 import env
from agent_r1.app.stages import check_own
from agent_r1.cold_start.demonstrate import demonstrator_of
from agent_r1.config import from_yaml, load_config, plugins, preset_title, to_yaml, user_code_names
from agent_r1.config.settings import EnvConfig
from agent_r1.env import environment
from agent_r1.ground.errors import ConfigError
from agent_r1.reward.named import Episode, score_by_name
from agent_r1.rollout.setup import load_flow
from agent_r1.tool import make_tools
from agent_r1.workspace import Workspace

TOOL = '''
from agent_r1.tool import BaseTool, tool

@tool
def double(x: int) -> str:
    """Double a number.

    Args:
        x: The number.
    """
    return str(2 * x)

def plain(x): return x
NUMBER = 7
class NoSchema(BaseTool):
    name, description, parameters = "none", "None.", {"type": "objekt"}
    def execute(self, args): return "x"
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of one's own, under module names that no other test has."""
    monkeypatch.setattr(plugins, "_trusted_names", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def said(folder, file: str, attribute: str, code: str) -> str:
    (folder / file).write_text(code)
    name = f"{folder / file}:{attribute}"
    plugins.trust([name])
    return name


ROW = {"reward_model": {"ground_truth": ["x"]}}


def paid(name: str, answer: str | None, well_formed: bool = True) -> tuple[float, dict[str, float]]:
    return asyncio.run(
        score_by_name(answer, well_formed, ROW, EnvConfig(reward=name, format_penalty=0.2))
    )


def test_files_of_one_folder_import_one_another_once(folder):
    said(folder, "shared_part.py", "LIST", "LIST = []")
    a = plugins.load_trusted(
        said(folder, "uses_part.py", "LIST", "from shared_part import LIST"), "env.name"
    )
    assert plugins.load_trusted(f"{folder / 'shared_part.py'}:LIST", "env.name") is a


@pytest.mark.parametrize(
    ("load", "attribute", "found"),
    [(lambda n: make_tools([n]), "plain", "line 13: @tool plain: "
        ""), (lambda n: make_tools([n]), "NUMBER", "not a tool"),
     (lambda n: make_tools([n]), "duoble", "did you mean "
         "'double'"), (lambda n: make_tools([n, n]), "double", "both have"),
     (environment, "plain", "name a class"), (load_flow, "double", "AgentFlowBase"),
     (demonstrator_of, "plain", "def demonstrate"),
     (lambda n: paid(n, "x"), "NUMBER", "def reward")],
)  # fmt: skip
def test_what_keeps_no_contract_is_refused_with_what_is_wanted(folder, load, attribute, found):
    name = said(folder, "wrong_contract.py", attribute, TOOL)
    env._own_environment.cache_clear()
    with pytest.raises(ConfigError) as refusal:
        load(name)
    assert found in str(refusal.value) and "wrong_contract.py" in str(refusal.value)


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [("fails.py", "x = 1\ny = 1 / 0\n", "line 2: "
        "ZeroDivisionError"), ("syntax.py", "x = (\n", "line 1: SyntaxError"),
     ("random.py", "x = 1", "another module is called "
         "'random'"), ("gone.py", None, "there is no file")],
)  # fmt: skip
def test_code_that_cannot_be_imported_is_named_with_its_line(folder, file, code, found):
    name = said(folder, file, "x", code or "")
    if code is None:
        (folder / file).unlink()
    with pytest.raises(ConfigError, match=found):
        plugins.load_trusted(name, "env.tools")


def test_only_what_the_user_named_is_imported(folder):
    """A preset by file and an override speak for the user; the settings of a run speak for whoever
    made it."""
    mark = folder / "was-run"
    (folder / "hostile.py").write_text(f"open({str(mark)!r}, 'w')\n" + TOOL)
    (folder / "mine.yaml").write_text("extends: small\nenv: {tools: ['hostile.py:double']}\n")
    config = load_config(str(folder / "mine.yaml"))
    name = f"{folder.resolve() / 'hostile.py'}:double"
    assert user_code_names(config) == {name: "env.tools"}
    (folder / "config.yaml").write_text(to_yaml(config))

    plugins._trusted_names.clear()
    theirs = from_yaml(folder / "config.yaml")
    with pytest.raises(ConfigError, match="that a run or a model named, not you"):
        check_own(theirs)
    assert not mark.exists()
    load_config(str(folder / "mine.yaml"))
    check_own(theirs)
    assert mark.exists()


def test_an_override_is_seen_from_the_working_directory_and_a_preset_from_its_own(
    folder, monkeypatch
):
    (folder / "sub").mkdir()
    (folder / "sub" / "p.yaml").write_text(
        "extends: small\ndata: {name: rows, source: q.jsonl}\nenv: {name: 'env.py:E'}"
    )
    (folder / "sub" / "q.jsonl").write_text("")
    monkeypatch.chdir(folder)
    config = load_config("sub/p.yaml", ["env.tools=[search,t.py:t,package.module:t]"])
    sub = folder.resolve() / "sub"
    assert config.env.name == f"{sub}/env.py:E" and config.data.source == str(sub / "q.jsonl")
    assert config.env.tools == ["search", f"{folder.resolve()}/t.py:t", "package.module:t"]
    assert config.trainer == load_config("small").trainer
    assert (
        preset_title(config.preset) == "p" and preset_title("/x/my-task/preset.yaml") == "my-task"
    )


def test_a_changed_file_makes_new_things_and_an_unchanged_configuration_keeps_its_names(folder):
    """... also where the change is in a file that the named one imports."""
    (folder / "helper_of_env.py").write_text("X = 1")
    (folder / "p.yaml").write_text("extends: small\nenv: {tools: ['t_hashed.py:double']}")
    said(folder, "t_hashed.py", "double", "import helper_of_env\n" + TOOL)
    before = Workspace(load_config(str(folder / "p.yaml")))
    (folder / "helper_of_env.py").write_text("X = 2")
    after = Workspace(load_config(str(folder / "p.yaml")))
    assert before.data == after.data  # made by no code of the user's
    assert set(plugins.code_hashes([f"{folder / 't_hashed.py'}:double"])) == {
        "t_hashed.py",
        "helper_of_env.py",
    }
    assert plugins.code_hashes(["search", "hermes"]) == {}


def test_a_reward_of_ones_own_is_paid_and_not_called_exact_match(folder):
    name = said(
        folder, "reward_fine.py", "score", "def score(answer, row): return len(answer) / 10"
    )
    assert paid(name, "abcde") == (0.5, {"answer": 0.5, "format": 0.0})
    assert paid(name, None, well_formed=False) == (-0.2, {"answer": 0.0, "format": -0.2})


@pytest.mark.parametrize(
    ("takes", "returned", "value"),
    [("answer", "len(answer)", 2), ("row, *, answer=None", "len(answer) + row['n']", 72),
     ("episode, **rest", "episode.turns + len(rest)", 300),
     ("answer, row, episode", "len(answer) + row['n'] + episode.turns", 372)],
)  # fmt: skip
def test_a_reward_takes_what_it_names(folder, takes, returned, value):
    code = f"def score({takes}): return {returned}"
    config = EnvConfig(reward=said(folder, f"takes_{abs(hash(takes))}.py", "score", code))
    assert (
        asyncio.run(score_by_name("ab", True, {"n": 70} | ROW, config, Episode(turns=300)))[0]
        == value
    )


GUESSED = "def score({}): return float(answer in ground_truth)"


@pytest.mark.parametrize(
    ("takes", "command"),
    [
        ("answer, ground_truth", ["train", "--dry-run"]),
        ("answer, /", ["try"]),
        ("*given", ["train"]),
    ],
)
def test_a_wrong_signature_is_refused_in_one_line_before_anything_is_played(
    folder, monkeypatch, capsys, takes, command
):
    """The right answer was paid 0.000: the second argument is the row, and `in` asks its keys."""
    monkeypatch.setenv("AGENT_R1_HOME", str(folder / "home"))
    name = said(folder, f"guessed_{abs(hash(takes))}.py", "score", GUESSED.format(takes))
    assert main(*command, "--preset=small", f"env.reward={name}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "guessed_" in line
    assert not (folder / "home").exists()


DOOR = '''
class Door:
    def reset(self, key, **row): self.key, self.reward, self.done = key, 0.0, False

    def turn(self, key: int) -> str:
        """Try a key.

        Args:
            key: From 0 to 9.
        """
        self.done, self.reward = True, float(key == self.key)
        return "click"

def questions(split, count, rng):
    for i in range(count): yield {"question": f"{split} {i}", "metadata": {"key": 7}}
'''


def test_the_methods_of_an_environment_are_listed_and_played_by_hand_before_anything_is_made(
    folder, monkeypatch, capsys
):
    monkeypatch.setenv("AGENT_R1_HOME", str(folder))
    (folder / "door_env.py").write_text(DOOR)
    (folder / "door_tool.py").write_text(TOOL)
    (folder / "p.yaml").write_text(
        "extends: small\ndata: {name: 'door_env.py:questions', train: 96, val: 2, test: 2}\n"
        "env: {name: 'door_env.py:Door', tools: ['door_tool.py:double']}"
    )
    preset = f"--preset={folder / 'p.yaml'}"
    assert main("tools", preset) == 0
    listed = capsys.readouterr().out
    assert "Double a number." in listed and "Try a key." in listed
    monkeypatch.setattr("sys.stdin", io.StringIO("turn key=7\n"))
    assert main("try", preset) == 0
    said = capsys.readouterr().out
    assert "turn: ok" in said and "reward +1.000" in said
    assert (
        main("tools", preset, "--call", "turn", "key=7") == 2
        and "`agent-r1 try`" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_the_written_task_passes_its_own_test(tmp_path, capsys):
    assert main("new", str(tmp_path / "my-task")) == 0
    assert main("new", str(tmp_path / "my-task")) == 1  # nothing is overwritten
    capsys.readouterr()
    assert main("new", str(tmp_path / "a b")) == 0
    commands = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  agent-r1 ")
    ]
    assert commands and all(shlex.split(line)[-1] == str(tmp_path / "a b") for line in commands)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "my-task"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_command_that_somebody_else_named_is_not_started(folder):
    mark = folder / "started"
    config = load_config("small", ["env.tools=[files]", f"env.mcp.files=touch {mark}"])
    plugins._trusted_names.clear()
    (folder / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(
        ConfigError, match="env.mcp.files=touch .* is code that a run or a model named, not you"
    ):
        Workspace(from_yaml(folder / "config.yaml")).load_tools()
    assert not mark.exists()
