"""Few tasks in a folder: what is trained on is not evaluated."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import fails_with
from harbor_tasks import config_of, ten_tasks

from agent_r1.app.cli import _split_of_models
from agent_r1.app.stages import make_missing
from agent_r1.workspace import Workspace
from agent_r1_recipes.harbor.source import TASKS


@pytest.mark.parametrize(
    ("count", "settings", "sizes"),
    [
        (10, [], (7, 1, 2)),
        (3, [], (1, 1, 1)),
        (10, ["data.train=3", "data.val=2", "data.test=1"], (3, 2, 1)),
        (2, ["data.test=0"], (1, 1, 1)),  # test is val
        (9, ["data.train=1", "data.val=99", "data.test=99"], (1, 4, 4)),
    ],
)
def test_few_tasks_are_shared_out_and_none_is_in_two_splits(tmp_path, count, settings, sizes):
    made = TASKS.make(config_of(ten_tasks(tmp_path, count), *settings).data, 0)
    questions = {split: [a.question for a in asked] for split, asked in made.splits.items()}
    assert tuple(len(questions[split]) for split in ("train", "val", "test")) == sizes
    assert "untrainable" not in made.manifest
    assert len(set(questions["all"])) == len(questions["all"]) == count
    assert not set(questions["train"]) & {*questions["val"], *questions["test"]}
    if "data.test=0" not in settings:
        assert not set(questions["val"]) & set(questions["test"])


@pytest.mark.parametrize(("count", "settings"), [(1, []), (2, []), (1, ["data.test=0"])])
def test_too_few_tasks_are_played_but_not_trained_on(tmp_path, count, settings):
    config = config_of(ten_tasks(tmp_path / "tasks", count), *settings)
    paths = Workspace(config, tmp_path)
    paths.make_data()
    assert len(paths.load_rows("train")) == len(paths.load_rows("test")) == count
    with fails_with("too_few_questions", "without a common one"):
        make_missing(paths)
    with fails_with("too_few_questions", "without a common one"):
        TASKS.check_settings(config.data, 0)  # as the plan of a run does
    assert paths.held_out("test") == {"questions": {"all": count, "for_training": 0}}


def test_a_plan_refuses_a_folder_without_tasks(tmp_path):
    with fails_with("no_tasks", "there is no task.toml"):
        TASKS.check_settings(config_of(tmp_path).data, 0)


def test_a_copy_of_a_task_is_counted_once(tmp_path):
    ten_tasks(tmp_path, 3)
    shutil.copytree(tmp_path / "task1", tmp_path / "task1-again")
    made = TASKS.make(config_of(tmp_path).data, 0)
    assert len(made.splits["all"]) == 3
    assert made.manifest["skipped"] == ["task1-again: the same task as task1"]


def test_a_model_that_was_not_trained_on_the_folder_plays_all_tasks(tmp_path, monkeypatch):
    config = config_of(ten_tasks(tmp_path / "tasks"), "seed=3")
    own = {"trained": config, "foreign": None, "elsewhere": config_of(tmp_path / "other")}
    monkeypatch.setattr("agent_r1.inference.agent.own_settings", lambda model: own[model.name])
    asked = config_of(tmp_path / "tasks")
    assert _split_of_models([Path("foreign")], asked) == (asked, "all")
    assert _split_of_models([Path("elsewhere")], asked) == (asked, "all")
    # Its own seed decides which tasks it was trained on.
    kept, split = _split_of_models([Path("foreign"), Path("trained")], asked)
    assert (kept.data, kept.seed, split) == (config.data, 3, "test")
    paths = Workspace(config, tmp_path)
    paths.make_data()
    assert len(paths.load_rows("all")) == 10
    assert paths.held_out("all") == {"questions": {"all": 10, "for_training": 0}}
    assert paths.held_out("test") == {"questions": {"all": 10, "for_training": 7}}
