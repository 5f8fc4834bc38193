"""Tasks that an OpenEnv server lists: no task is trained on and tested, and each is begun by its
number."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import runs
from conftest import ScriptedPolicy, call, fails_with, make_env_loop
from openenv_server import serving

from agent_r1 import Sampling, Task, Workspace, load_config, make_env, run_episodes
from agent_r1_recipes.openenv.source import TASKS, listed_tasks

SHARED = ["data.train=7", "data.val=1", "data.test=2"]


@pytest.fixture(scope="module")
def server():
    with serving() as url:
        yield url


def config_of(url: str, *settings: str):
    words = ["env.name=openenv", f"env.url={url}", "env.tools=[]", "data.name=openenv"]
    return load_config("small", [*words, f"data.source={url}", *settings], trains=False)


def numbers(rows) -> list[tuple[str, int]]:
    metadata = [row["extra_info"]["metadata"] for row in rows]
    return [(facts["split"], facts["index"]) for facts in metadata]


@pytest.mark.parametrize(
    ("kind", "settings", "sizes", "foreign"),
    [
        ("one", SHARED, (7, 1, 2), "all"),
        ("two", ["data.train=5", "data.val=2", "data.test=3"], (5, 2, 3), "test"),
        ("three", ["data.train=8", "data.val=2", "data.test=0"], (8, 2, 3), "test"),
        ("shared", ["data.train=8", "data.val=1", "data.test=3"], (8, 1, 3), "test"),
    ],
)
def test_no_task_is_in_two_splits(server, tmp_path, kind, settings, sizes, foreign):
    paths = Workspace(config_of(f"{server}/tasks-{kind}", *settings), tmp_path)
    paths.make_data()
    splits = {split: numbers(paths.load_rows(split))
              for split in ("train", "val", "test")}  # fmt: skip
    assert tuple(map(len, splits.values())) == sizes
    everything = [task for tasks in splits.values() for task in tasks]
    assert len(set(everything)) == sum(sizes)
    assert paths.foreign_split() == foreign
    if kind == "one":
        assert len(paths.load_rows("all")) == 10
        assert paths.held_out("test") == {"questions": {"all": 10, "for_training": 7}}
    else:
        assert {split for split, _ in splits["train"]} == {"train"}
        assert {split for split, _ in splits["test"]} == {"test"}
    if kind == "shared":  # three of the four validation tasks are listed as tests, too
        assert splits["val"] == [("validation", 3)]


def test_each_task_is_begun_by_its_number(chat, server, tmp_path):
    url = f"{server}/tasks-one"
    config = config_of(url, *SHARED)
    paths = Workspace(config, tmp_path)
    paths.make_data()
    rows = paths.load_rows("all")
    policy = ScriptedPolicy(chat, [call("step", number=4), "done"])
    loop = make_env_loop(policy, lambda row: make_env(row, {}, config.env), timeout_s=20)
    tasks = [Task(row, str(i), f"s{i}") for i, row in enumerate(rows)]
    played = asyncio.run(run_episodes(loop, tasks, Sampling(400), max_concurrent=4))
    won = [index for (_, index), t in zip(numbers(rows), played, strict=True) if t.steps[0].reward]
    assert won == [4]


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("tasks-none", "no_tasks", "lists no task"),
        ("tasks-empty", "no_tasks", "lists no task"),
        ("tasks-many", "bad_answer", "has 1000000000 tasks"),
        ("guess", "server_unreachable", "whose environment has the Task API"),
    ],
)
def test_a_server_without_a_list_of_tasks_is_refused(server, path, code, says):
    with fails_with(code, says):
        listed_tasks(f"{server}/{path}")


def test_too_few_tasks_are_refused_with_counts_that_fit(server):
    few = config_of(f"{server}/tasks-one").data
    with fails_with("too_few_questions", "set data.train=7 data.val=1 data.test=2"):
        TASKS.check_settings(few, 0)  # as the plan of a run does
    with fails_with("too_few_questions", "has 3 questions and test take 9"):
        TASKS.make(config_of(f"{server}/tasks-three", "data.test=9").data, 0)


def test_tasks_and_episodes_have_one_address(server):
    with fails_with("address_without_name", "give both the same address"):
        config_of(f"{server}/tasks-one", "env.url=http://127.0.0.1:1")


PLAY = """
from agent_r1 import Hermes


def play(row, history, rng):
    if history[-1]["role"] == "tool":
        return Hermes.answer("done")
    return Hermes.call("step", number=rng.randrange(10))
"""


def test_a_run_is_evaluated_on_tasks_that_it_did_not_train_on(server, tmp_path, monkeypatch):
    """Two steps and their evaluation; the server tells which tasks were begun."""

    def begun() -> list[int]:
        told = httpx.get(f"{server}/told", trust_env=False).json()["told"]
        return [data["index"] for data in told if "index" in data]

    (tmp_path / "player.py").write_text(PLAY)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    url = f"{server}/tasks-one"
    tiny = [word for word in runs.TINY if not word.startswith(("data.", "env."))]
    words = [
        "grpo", *tiny, "--run=tasks", "--plain", "env.name=openenv", f"env.url={url}",
        "env.tools=[]", "env.max_turns=3", "data.name=openenv", f"data.source={url}", *SHARED,
        f"cold_start.demonstrator={tmp_path / 'player.py'}:play", "cold_start.copy_steps=10",
        "cold_start.mix_steps=0", "trainer.steps=2", "critic.warmup_steps=1",
    ]  # fmt: skip
    before = len(begun())
    assert runs.main("train", *words) == 0
    trained = begun()[before:]
    assert runs.main("eval", "--run=tasks", "--trust-run") == 0
    tested = begun()[before + len(trained) :]
    assert len(set(trained)) == 8 and len(set(tested)) == 2  # 7 to train on, and 1 to validate
    assert not set(trained) & set(tested)
    card = json.loads((tmp_path / "runs/tasks/eval.json").read_text())
    assert card["n"] == 2 and card["questions"] == {"all": 10, "for_training": 7}
