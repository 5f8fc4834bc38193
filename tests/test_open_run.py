"""`open_run` does in this process what the command line does."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from conftest import fails_with
from runs import TINY

import agent_r1
from agent_r1 import Evaluation, Run, Training, open_run
from agent_r1.config import load_config

SETTINGS = {
    key: yaml.safe_load(value)
    for key, value in (line.split("=", 1) for line in TINY if not line.startswith("--"))
} | {"cold_start.lr": 5e-3}


def tiny(algorithm: str = "grpo", **changes) -> Run:
    """Open a run with the settings of `TINY`."""
    names = {"seed", "run", "resume"} & changes.keys()
    chosen = {name: changes.pop(name) for name in names}
    return open_run("small", algorithm, **chosen, **(SETTINGS | changes))


def untimed(metrics: list[dict]) -> list[dict]:
    """Metrics without clock readings and memory."""
    return [
        {k: v for k, v in line.items() if not re.search(r"timing|perf|time|memory", k)}
        for line in metrics
    ]


# ------------------------------------------------------------------------------ without training


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    return tmp_path


def test_values_arrive_as_they_were_given(home):
    changes = {
        "trainer.steps": 7,
        "actor.lr": 1e-05,
        "trainer.recompute": True,
        "env.tools": [],
        "data.mix": {"2-hop": 1.0},
        "search.encoder": "ngram",
        "actor.loss_aggregation": "token-mean",
    }
    config = open_run("small", "grpo", **changes).config
    for name, value in changes.items():
        section, key = name.split(".")
        assert getattr(getattr(config, section), key) == value


def test_dotted_settings_override_the_preset(home):
    run = open_run("small", "grpo", seed=3, **{"trainer.steps": 7, "actor.lr": 1e-05})
    assert (run.config.trainer.steps, run.config.actor.lr, run.config.seed) == (7, 1e-05, 3)
    assert run.config == load_config(
        "small", ["trainer.steps=7", "actor.lr=1e-5"], algorithm="grpo", seed=3
    )
    assert run.name == "small-grpo-s3" and not list(home.iterdir())


def test_a_file_of_settings_is_a_preset(home, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: small\ntrainer: {steps: 5}\n")
    run = open_run(file, "grpo")
    assert run.config.trainer.steps == 5 and run.name == "mine-grpo"


def test_errors_are_those_of_the_command_line(home):
    with fails_with("unknown_setting", "did you mean 'trainer.steps'"):
        open_run("small", **{"trainer.stepz": 3})
    with fails_with("unknown_preset"):
        open_run("smokey")
    with fails_with("bad_run_name"):
        open_run("small", run="../elsewhere")
    with fails_with("unfinished_run"):
        open_run("small", "grpo").evaluate()


def test_chat_needs_a_terminal_or_a_question(home):
    assert not sys.stdin.isatty() or not sys.stdout.isatty()
    with fails_with("no_terminal"):
        open_run("small", "grpo").chat()


# ---------------------------------------------------------------------------------- with training


@pytest.fixture
def trained(home, produced) -> Path:
    """A home with the finished runs `grpo` and `ppo` of the command line."""
    shutil.copytree(produced, home, dirs_exist_ok=True)
    return home


@pytest.mark.slow
def test_it_trains_and_evaluates_like_the_command_line(trained):
    run = tiny(run="mine")
    done = run.train()
    assert (
        isinstance(done, Training)
        and done.checkpoint == trained / "runs/mine/checkpoints/step_000008"
    )
    theirs = [json.loads(line) for line in (trained / "runs/grpo/metrics.jsonl").open()]
    assert untimed(done.metrics) == untimed(theirs) and len(theirs) == 8
    result = run.evaluate()
    card = json.loads((trained / "runs/grpo/eval.json").read_text())
    assert isinstance(result, Evaluation)
    assert (result.score, list(result.interval)) == (card["score"], card["score_ci95"])
    assert result.questions == 12 and result.card["by_kind"] == card["by_kind"]
    assert re.match(r"EM \d\.\d{3} \(95 % .*12 questions$", str(result))
    before = json.loads((trained / "runs/grpo/eval_before.json").read_text())
    assert run.evaluate(before=True).score == before["score"]


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(trained, capsys):
    run = tiny(run="grpo")
    files = {p: p.stat().st_mtime_ns for p in (trained / "runs/grpo").rglob("*") if p.is_file()}
    first, second = run.train(), run.train()
    assert first == second and len(first.metrics) == 8
    assert capsys.readouterr().out.count("train: already done") == 2
    now = {p: p.stat().st_mtime_ns for p in (trained / "runs/grpo").rglob("*") if p.is_file()}
    assert now == files


@pytest.mark.slow
def test_an_existing_name_with_other_settings_is_refused(trained):
    with fails_with("other_settings"):
        tiny(run="grpo", **{"actor.lr": 0.1})


@pytest.mark.slow
def test_an_unfinished_run_needs_resume(trained):
    theirs = tiny(run="grpo").train().metrics
    shutil.rmtree(trained / "runs/grpo/checkpoints/step_000008")
    with fails_with("run_exists"):
        tiny(run="grpo").train()
    done = tiny(run="grpo", resume=True).train()
    assert done.checkpoint.name == "step_000008" and untimed(done.metrics) == untimed(theirs)


@pytest.mark.slow
def test_it_works_while_an_event_loop_runs(trained):
    """As in a notebook. The outer loop goes on afterwards."""

    async def cell() -> Training:
        done = tiny(run="in-a-notebook").train()
        tiny(run="in-a-notebook").evaluate()
        await asyncio.sleep(0)
        return done

    assert len(asyncio.run(cell()).metrics) == 8


@pytest.mark.slow
def test_prepare_makes_what_is_missing_and_says_so_in_one_line(home, capsys):
    workspace = tiny().prepare()
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"making data, index and start model \.\.\. \d+\.\d s, in .*/artifacts\n", said
    )
    assert workspace.load_rows("train") and workspace.start_model.is_dir()
    tiny().prepare()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_chat_answers_one_question_without_a_terminal(agent_home, home, capsys):
    shutil.copytree(agent_home, home, dirs_exist_ok=True)
    saved = yaml.safe_load((home / "runs/laptop-grpo/config.yaml").read_text())
    run = Run(agent_r1.load_config(str(home / "runs/laptop-grpo/config.yaml")), "laptop-grpo")
    assert run.config.seed == saved["seed"]

    async def cell():
        run.chat("In which city is the company that Lumlir works for based?")

    asyncio.run(cell())
    assert "Velnum" in capsys.readouterr().out
