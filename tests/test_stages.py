"""Stages: made once, under a name that says what they were made of, whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time

import pytest
from conftest import fails_with
from runs import TINY, leftovers, main, prepare, tree

from agent_r1.app import stages
from agent_r1.config import Config, load_config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import whole
from agent_r1.ground.ui import progress
from agent_r1.training import run
from agent_r1.workspace import Workspace, stage


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("AGENT_R1_HOME", str(folder))
        prepare(folder, "cold_start.copy_steps=3", "cold_start.mix_steps=3")
        yield folder


@pytest.fixture
def config() -> Config:
    return load_config("small", [*TINY[1:], "cold_start.copy_steps=3", "cold_start.mix_steps=3"])


PLACES = (("model", "path"), ("search", "url"), ("env", "sandbox"), ("cold_start", "probe"),
          ("env", "mcp_variables"), ("env", "mcp_tokens"))  # fmt: skip
"""Settings that say where something is, and so make nothing new; and a check of the start."""
PRICES = (
    "reward", "judge_url", "judge_model", "judge_max_tokens", "format_penalty", "call_reward",
    "evidence_reward", "floor", "floor_reason", "rules", "reward_model_url",
    "reward_model", "reward_model_template", "reward_model_raw", "reward_model_label",
)  # fmt: skip
"""Settings of `env` that say what something earns; no demonstration depends on them."""


# ---------------------------------------------------------------------------------------- one stage


def fill(part, text="whole"):
    part.mkdir()
    (part / "file").write_text(text)
    return "a summary"


def test_a_stage_is_made_once(tmp_path, capsys):
    target = tmp_path / "artifacts" / "thing"
    stage("thing", target, fill)
    stage("thing", target, lambda part: pytest.fail("made again"))
    assert f"thing: already done, in {target}" in capsys.readouterr().out
    assert tree(tmp_path).keys() == {"artifacts/thing/file"}


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), KeyboardInterrupt(), AgentR1Error("cause; remedy")]
)
def test_a_stage_that_fails_leaves_nothing_and_its_error_as_it_was(tmp_path, error):
    def make(part):
        fill(part)
        with whole(part / "inner") as inner:
            fill(inner)
            raise error

    with pytest.raises(type(error)) as raised:
        stage("thing", tmp_path / "thing", make)
    assert raised.value is error
    assert tree(tmp_path) == {} and leftovers(tmp_path) == []
    stage("thing", tmp_path / "thing", fill)
    assert (tmp_path / "thing" / "file").read_text() == "whole"


def test_two_processes_make_it_once(tmp_path, capsys):
    made = []

    def slowly(part):
        made.append(1)
        time.sleep(0.2)
        return fill(part)

    threads = [
        threading.Thread(target=stage, args=("thing", tmp_path / "thing", slowly)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert capsys.readouterr().out.count("made by another process") == 2


# ------------------------------------------------------------------------------------------- places


def other(value):
    """A value of the same type that is not `value`."""
    if isinstance(value, dict):
        return value | {"another": 0.5}
    if isinstance(value, list):
        return [*value, "another"]
    return {bool: lambda v: not v, str: lambda v: v + "x", type(None): lambda v: "/x"}.get(
        type(value), lambda v: v + 1
    )(value)


def test_a_changed_setting_makes_a_new_start_model(config):
    """Whatever the demonstrations or the model depend on; so a stale one is never used. A price
    changes neither."""
    old = Workspace(config)
    for section in ("data", "search", "env", "model", "cold_start"):
        part = getattr(config, section)
        for name in type(getattr(Config(), section)).model_fields:
            if (section, name) in PLACES:
                continue
            changed = part.model_copy(update={name: other(getattr(part, name))})
            new = Workspace(config.model_copy(update={section: changed}))
            is_price = section == "env" and name in PRICES
            assert (new.cold_start == old.cold_start) == is_price, name
            assert (new.data != old.data) == (section == "data" or name == "name"), name
            assert (new.index != old.index) == (
                new.data != old.data or name in ("encoder", "dim", "index")
            ), name


def test_rl_settings_share_the_start_model_and_seeds_do_not(config, monkeypatch):
    monkeypatch.delenv("AGENT_R1_HOME", raising=False)
    assert str(Workspace(config).run("x")) == "runs/x"  # the working directory, unless it is said
    monkeypatch.setenv("AGENT_R1_HOME", "/elsewhere")
    assert str(Workspace(config).run("x")) == "/elsewhere/runs/x"

    def places(*settings, **options):
        p = Workspace(load_config("small", [*TINY[1:], *settings], **options))
        return p.data, p.index, p.cold_start

    assert places() == places(
        "actor.lr=1", "trainer.steps=3", "rollout.temperature=2", algorithm="grpo"
    )
    assert all(a != b for a, b in zip(places(), places(seed=1), strict=True))
    assert places()[2] != places("rollout.max_context=300")[2]


def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, capsys, micro_model
):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    longer = "rollout.max_context=5000"
    assert (
        main(
            "train",
            "grpo",
            *TINY,
            f"model.path={micro_model}",
            longer,
            "trainer.max_tokens_per_microbatch=5000",
        )
        == 2
    )
    assert (
        "max_context=5000 is more than the model's" in capsys.readouterr().err
        and not (tmp_path / "home").exists()
    )


def test_a_model_of_ones_own_needs_no_cold_start(
    config, tmp_path, monkeypatch, capsys, micro_model
):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    config.model.path = str(micro_model)
    assert Workspace(config).start_model == micro_model
    stages.make_cold_start(Workspace(config))
    assert "not needed" in capsys.readouterr().out and not (tmp_path / "home").exists()
    config.model.path = str(tmp_path / "nowhere")
    for needs_it in (run.start_model, stages.make_cold_start):
        with pytest.raises(AgentR1Error, match="model.path="):
            needs_it(Workspace(config))


# ------------------------------------------------------------------------------------ the real ones


def test_data_that_somebody_changed_is_refused(prepared, config, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    corpus = Workspace(config).data / "corpus.jsonl"
    corpus.write_text(
        corpus.read_text() + '{"id": "forged", "title": "Vexlor", "text": "Vexlor is nowhere."}\n'
    )
    with pytest.raises(AgentR1Error, match="corpus.jsonl has changed since it was made"):
        Workspace(config).make_data()
    with fails_with("index_of_other_corpus"):
        Workspace(config).load_tools()


def test_no_index_is_made_asked_for_or_read_where_nothing_searches(
    prepared, config, tmp_path, monkeypatch, capsys
):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    shutil.rmtree(Workspace(config).index)
    start = shutil.move(Workspace(config).start_model, tmp_path / "mine")
    settings = ["env.tools=[]", f"model.path={start}"]
    assert main("index", *TINY, *settings) == 0
    assert "index: not needed here, no tool searches" in capsys.readouterr().out
    without = load_config("small", [*TINY[1:], *settings])
    assert Workspace(without).load_tools() == {} and run.start_model(Workspace(without)) == start
    assert Workspace(without).retriever == "none"
    with fails_with("missing_stage"):
        Workspace(load_config("small", [*TINY[1:], settings[1]])).load_tools()


def test_eval_before_claims_the_run_for_its_settings(prepared, capsys):
    """Else a run could be reported beside the evaluation of another seed's start model."""
    tiny = [*TINY, "cold_start.copy_steps=3", "cold_start.mix_steps=3", "--run=claimed"]
    assert main("eval", "--before", "grpo", *tiny) == 0
    assert (prepared / "runs" / "claimed" / "config.yaml").exists()
    assert main("eval", "--before", "grpo", *tiny, "--seed=1") == 1
    assert main("train", "grpo", *tiny, "--seed=1") == 1
    said = capsys.readouterr().err.splitlines()
    assert all("seed: 0 there, 1 now" in line for line in said) and len(said) == 2


def test_preparing_shows_how_far_it_is_and_not_the_stages_lines(tmp_path, monkeypatch, capsys):
    """one_file.py and `open_run` prepare so: a minute of cloning, and on a busy machine several."""
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("agent_r1.ground.ui.time.monotonic", lambda: next(clock))

    def make_missing(paths):
        print("data: 300 questions")
        with progress("cloning", 4) as advance:
            for step in range(4):
                advance(f"copy loss {step}.5")

    monkeypatch.setattr(stages, "make_missing", make_missing)
    stages.prepare(Workspace(load_config("small", []), tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "making data, index and start model ... ",
        "  cloning 2/4 copy loss 1.5",
        "  cloning 4/4 copy loss 3.5",
    ]
    assert re.fullmatch(r"\d+\.\d s, in .*/artifacts", lines[3]) and len(lines) == 4


@pytest.mark.parametrize("other", ["", "questions_hash"])
def test_eval_prints_the_paired_difference_to_before(tmp_path, capsys, other):
    """The interval of each card alone does not say whether RL changed anything."""
    card = {"model": "a", "n": 4, "split": "test", "score_name": "em"}
    card |= {"questions_hash": "q", "rows_hash": "r", "question_scores": [0.0, 0.0, 0.0, 1.0]}
    after = card | {"model": "b", "question_scores": [1.0, 1.0, 0.0, 1.0]}
    if other:
        after[other] = "another"
    stages.print_change(run.RunDir(tmp_path), after, None)
    assert capsys.readouterr().out == ""  # there is nothing to compare with
    (tmp_path / "eval_before.json").write_text(json.dumps(card))
    stages.print_change(run.RunDir(tmp_path), after, None)
    assert ("after minus before" in capsys.readouterr().out) == (not other)
    if not other:
        stages.print_change(run.RunDir(tmp_path), after, None)
        assert "+0.500" in capsys.readouterr().out
