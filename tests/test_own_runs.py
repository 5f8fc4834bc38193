"""Evaluate runs with code of the user by their names, and open small doors."""

from __future__ import annotations

import io
import json
import subprocess

import pytest
import runs
from conftest import fails_with, question_row

from agent_r1.cold_start import demonstrate
from agent_r1.config import from_yaml, load_config, plugins, to_yaml
from agent_r1.core import StopReason
from agent_r1.env.hermes import Hermes
from agent_r1.training.run_dir import OWN_SETTINGS, RunDir, check_same_settings, open_run

ENVIRONMENT = '''
from agent_r1 import Hermes


class Lamp:
    """A lamp with a switch."""

    def reset(self, **row):
        self.on = False
        return "Switch the lamp on."

    def switch(self) -> str:
        """Press the switch."""
        self.on = not self.on
        return "on" if self.on else "off"

    def get_reward(self) -> float:
        """1 for light."""
        return float(self.on)


def questions(split, count, rng):
    for number in range(count):
        yield {"question": f"Lamp {rng.random()}: light, please.", "answer": "x"}


def demonstrate(row, history, rng):
    if history[-1]["role"] == "tool" or rng.random() < 0.5:
        return Hermes.answer("done")
    return Hermes.call("switch")
'''
TINY_RUN = [word for word in runs.TINY if "call_reward" not in word]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a run with a class of the user. Return its home and the words that started it."""
    home = tmp_path_factory.mktemp("own")
    (home / "world.py").write_text(ENVIRONMENT)
    words = [
        "grpo", *TINY_RUN, "--run=lamp", "--plain",
        f"env.name={home / 'world.py'}:Lamp", "env.tools=[]",
        f"data.name={home / 'world.py'}:questions",
        f"cold_start.demonstrator={home / 'world.py'}:demonstrate",
        "trainer.steps=2", "critic.warmup_steps=1",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(home))
        assert runs.main("train", *words) == 0
    return home, words


@pytest.fixture
def forgetful(trained, monkeypatch):
    """Another process: it trusts no code yet."""
    home, _ = trained
    monkeypatch.setenv("AGENT_R1_HOME", str(home))
    monkeypatch.setattr(plugins, "_trusted_names", set())
    return home


def error_of(capsys, *words):
    capsys.readouterr()
    assert runs.main(*words) != 0
    text = capsys.readouterr().err
    assert "delete" not in text and "--resume" not in text
    return text


def test_eval_of_a_run_asks_for_permission_once(forgetful, capsys):
    text = error_of(capsys, "eval", "--run", "lamp", "--limit", "2")
    assert f"env.name={forgetful / 'world.py'}:Lamp" in text and "--trust-run" in text


def test_eval_of_a_run_takes_its_own_settings(forgetful):
    assert runs.main("eval", "--run", "lamp", "--trust-run", "--limit", "2") == 0


def test_naming_the_code_is_the_permission(forgetful):
    code = [
        f"env.name={forgetful / 'world.py'}:Lamp",
        f"data.name={forgetful / 'world.py'}:questions",
    ]
    assert runs.main("eval", "--run", "lamp", *code, "--limit", "2") == 0


@pytest.mark.parametrize("setting", ["actor.lr=0.5", "--preset=discover", "--seed=3", "ppo"])
def test_eval_with_other_settings_says_that_it_takes_the_runs_own(forgetful, capsys, setting):
    text = error_of(capsys, "eval", "--run", "lamp", "--trust-run", setting, "--limit", "2")
    assert "an evaluation takes the run's own settings" in text


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Begin a run of a user's recipe, with paths in three of its settings. Return its folder."""
    home = tmp_path / "home folder"
    folder = home / "my-task"
    (home / "model").mkdir(parents=True)
    folder.mkdir()
    (folder / "world.py").write_text(ENVIRONMENT)
    (folder / "rows.jsonl").write_text("{}")
    (folder / "preset.yaml").write_text(
        "extends: smoke\n"
        "env: {name: world.py:Lamp, tools: []}\n"
        "data: {name: rows, source: rows.jsonl}\n"
    )
    (home / "link").symlink_to(folder)
    for name in ("AGENT_R1_HOME", "HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.chdir(home)
    config = load_config("my-task/preset.yaml", ["model.path=model"])
    for name in ("mine", "my-task-grpo"):
        run = RunDir(home / "runs" / name)
        open_run(run, config)
        run.metrics.path.write_text("")
    monkeypatch.setattr(plugins, "_trusted_names", set())
    return folder


SPELLINGS = ["my-task", "./my-task/", "../home folder/my-task", "link", "~/my-task", "ABSOLUTE"]


@pytest.mark.parametrize("place", SPELLINGS)
@pytest.mark.parametrize(
    "words",
    [
        ["--run=mine"],
        ["--run=mine", "--limit=2"],
        ["--run=mine", "data.source=link/rows.jsonl", "model.path=./model/"],
        ["--run=my-task-grpo", "grpo"],
        ["--run=mine", "env.name=~/link/world.py:Lamp"],
    ],
)
def test_a_run_is_found_again_by_any_spelling_of_its_paths(begun, capsys, place, words):
    """It is the same run, so what is missing is its training, and not its settings."""
    place = str(begun) if place == "ABSOLUTE" else place
    for recipe in ([f"--recipe={place}"], [f"--preset={place}/preset.yaml"]):
        text = error_of(capsys, "eval", *recipe, *words)
        assert "has not finished its" in text, text


def test_another_recipe_of_the_same_name_is_another_run(begun, capsys):
    other = begun.parent / "other" / "my-task"
    other.mkdir(parents=True)
    for file in begun.iterdir():
        (other / file.name).write_text(file.read_text())
    text = error_of(capsys, "eval", "--recipe=other/my-task", "--run=mine", "--trust-run")
    assert f"preset: {begun / 'preset.yaml'} there, {other / 'preset.yaml'} now" in text


def test_eval_of_a_run_with_changed_code_or_weights_never_advises_deletion(forgetful, capsys):
    file = forgetful / "world.py"
    file.write_text(ENVIRONMENT + "\n# changed\n")
    text = error_of(capsys, "eval", "--run", "lamp", "--trust-run", "--limit", "2")
    file.write_text(ENVIRONMENT)
    assert "undo the change to evaluate what was trained" in text
    weights = forgetful / "runs/lamp/checkpoints/step_000002/model/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    text = error_of(capsys, "eval", "--run", "lamp", "--trust-run", "--limit", "2")
    weights.write_bytes(content)
    assert "does not match its checksum; restore the file" in text


def test_try_counts_in_the_tokens_and_limits_of_training(trained, monkeypatch, capsys):
    """Before the cold start a byte is a token, and there are no limits. It says so."""
    home, words = trained
    settings = [word for word in words if not word.startswith(("grpo", "--run", "--plain"))]
    said = []
    for place in (home, home / "elsewhere"):
        monkeypatch.setenv("AGENT_R1_HOME", str(place))
        monkeypatch.setattr("sys.stdin", io.StringIO("switch\n= done\n"))
        assert runs.main("try", *settings) == 0
        said.append(capsys.readouterr().out)
    assert "of at most 48" in said[0] and "as in training" in said[0]
    assert "of at most" not in said[1] and "each token is one byte here" in said[1]


def test_inspect_opens_a_run(trained, capsys):
    home, _ = trained
    assert runs.main("inspect", str(home / "runs" / "lamp")) == 0
    assert "reward" in capsys.readouterr().out
    (home / "empty").mkdir(exist_ok=True)
    assert "name a run's folder" in error_of(capsys, "inspect", str(home / "empty"))


def test_resume_with_nothing_to_resume_says_so(trained, monkeypatch, capsys):
    home, words = trained
    monkeypatch.setenv("AGENT_R1_HOME", str(home))
    words = [word for word in words if not word.startswith("--run")]
    assert runs.main("train", *words, "--run=nothing", "--resume") == 0
    assert "starting from step 0" in capsys.readouterr().out


def test_a_demonstrator_that_hits_a_limit_is_told_its_setting(monkeypatch):
    config = load_config(
        "small", ["env.tools=[calculator]", "env.max_turns=9", "env.max_tool_calls=2"]
    )
    from agent_r1.tool.calculator import Calculator

    monkeypatch.setattr(
        demonstrate.plugins,
        "load_trusted",
        lambda name, setting: lambda row, history: Hermes.call("calculator", expression="1+1"),
    )
    with fails_with("unfinished_demonstration", "env.max_tool_calls=2"):
        demonstrate.play_demonstrations(
            "f.py:f", [question_row("q", ("1",))], {"calculator": Calculator()},
            config.rollout, config.env, 0,
        )  # fmt: skip
    assert "env.max_turns=9" in demonstrate.limit_of(StopReason.MAX_TURNS, config.env)


def test_a_manifest_that_names_a_device_is_refused_before_it_is_read(forgetful, capsys):
    file = forgetful / "runs/lamp/checkpoints/step_000002/manifest.json"
    text = file.read_text()
    for name in ("/dev/zero", "../../config.yaml", "model"):
        manifest = json.loads(text)
        manifest["files"][name] = "0" * 64
        file.write_text(json.dumps(manifest))
        message = error_of(capsys, "eval", "--run", "lamp", "--trust-run", "--limit", "2")
        assert "which is not a file of this checkpoint" in message
    file.write_text(text)


@pytest.mark.parametrize("text", ["extends: [small]", "extends: 5", "x: " + "[" * 5000])
def test_a_preset_of_another_form_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text + "\n")
    with fails_with("bad_preset"):
        load_config(str(file))


def test_a_recipe_table_of_5000_brackets_is_refused_in_one_line(tmp_path):
    from agent_r1.config import tables

    file = tmp_path / "recipe.toml"
    file.write_text("x = " + "[" * 5000)
    with fails_with("bad_recipe"):
        tables.add_recipe(file)


def test_a_recipe_with_a_line_break_in_its_name_is_refused(tmp_path, capsys):
    assert "choose another name" in error_of(capsys, "new", str(tmp_path / "a\nb"))
    assert not (tmp_path / "a\nb").exists()


def test_a_tool_maker_that_returns_nothing_is_refused_in_one_line(monkeypatch):
    from agent_r1 import tool

    monkeypatch.setattr(tool.tables, "resolve", lambda *names: lambda **resources: None)
    with fails_with("wrong_code", "which is no tool"):
        tool.make_tools(["calculator"], env=load_config("small", []).env)


def test_the_chat_ends_quietly_without_a_reader_or_a_keyboard(tmp_path):
    """Run `agent-r1 chat | head`, and a chat with standard input closed."""
    env = runs.environment(tmp_path)
    chat = f"{runs.AGENT} chat --demo"
    piped = subprocess.run(
        ["bash", "-c", f"for i in $(seq 30); do echo Q; done | {chat} | head -1; "
         "echo ${PIPESTATUS[1]}"],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert piped.stdout.splitlines()[-1] == "0" and "Traceback" not in piped.stderr
    closed = subprocess.run(
        ["bash", "-c", f"{chat} --json --question 'In which city is the publisher of Sosnum "
         "based?' <&-"],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in closed.stderr
    record = json.loads(closed.stdout)
    assert len(record["token_ids"]) == len(record["action_mask"]) > 50
    assert sum(record["action_mask"]) == record["sampled_tokens"]


def test_a_run_of_a_shipped_recipe_is_evaluated_by_todays_code(tmp_path, capsys):
    """Its code changes with every version of the project, and the user changed nothing. Going on
    with its training is refused: the weights would be of two codes."""
    run = RunDir(tmp_path / "old")
    config = load_config("tinymath", algorithm="grpo")
    (run.path / "checkpoints").mkdir(parents=True)
    run.config.write_text(to_yaml(config))
    run.code.write_text(json.dumps({"questions.py": "0" * 64}))
    stored = from_yaml(run.config)
    assert plugins.is_trusted(stored.data.name)  # the preset is ours, and names it
    check_same_settings(run, stored, OWN_SETTINGS)
    assert "questions.py changed" in capsys.readouterr().out
    with fails_with("other_code", "--run NAME"):
        check_same_settings(run, stored)
