"""The world of files: tasks, episodes, and attempts to be paid without a repair."""

from __future__ import annotations

import functools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_r1 import load_config
from agent_r1_recipes.code import sandbox
from agent_r1_recipes.code.sandbox import Ran
from agent_r1_recipes.files.env import Files, _run
from agent_r1_recipes.files.tasks import KINDS, arguments_of, questions, right_value


def tasks(split: str = "test", count: int = 60) -> list[dict]:
    return list(questions(split, count, random.Random(0)))


def begin(task: dict) -> Files:
    world = Files()
    world.reset(**task["metadata"])
    return world


def task_of(kind: str) -> dict:
    return next(task for task in tasks() if task["kind"] == kind)


def test_no_name_and_no_number_is_in_two_splits():
    seen = {}
    for split in ("train", "val", "test"):
        made = tasks(split, 100)
        seen[split] = {t["metadata"]["path"] for t in made} | {
            t["metadata"]["number"] for t in made
        }
    assert not seen["train"] & seen["test"] and not seen["train"] & seen["val"]


def test_there_are_as_many_tasks_as_the_preset_wants():
    data = load_config("files", [], algorithm="grpo").data
    for split, count in (("train", data.train), ("val", data.val), ("test", data.test)):
        assert len({task["question"] for task in tasks(split, count)}) == count


def test_the_number_is_not_in_the_question():
    assert not any(str(t["metadata"]["number"]) in t["question"] for t in tasks())


def test_edit_keeps_the_indentation_and_refuses_what_is_not_there():
    world = begin(task_of("add"))
    path = world.path
    assert world.edit(path, 2, "  return 7 ") == "return 7"
    assert world.files[path] == "def cost(a, b):\n    return 7\n"
    assert world.read(path) == "1 def cost(a, b):\n2     return 7"
    assert world.edit(path, 3, "x") == world.edit(path, 0, "x") == "no such line"
    assert world.edit("../etc/passwd", 1, "x") == world.read("/etc/passwd") == "no such file"
    assert "at most" in world.edit(path, 2, "x\ny") and "at most" in world.edit(path, 2, "x" * 999)


def test_an_episode_has_its_own_files():
    task = task_of("add")
    first, second = begin(task), begin(task)
    first.edit(first.path, 2, "return 0")
    assert "return 0" not in second.read(second.path)


@pytest.mark.slow
def test_the_repair_is_paid_and_near_misses_are_not():
    """Two tasks of each kind: no near miss passes the hidden calls."""
    for kind in KINDS:
        for task in [one for one in tasks() if one["kind"] == kind][:2]:
            check_texts(task)
    assert "wrong, it should be" in begin(task_of("add")).run()


def check_texts(task: dict) -> None:
    for text in [task["metadata"]["repair"], *task["metadata"]["misses"]]:
        world = begin(task)
        world.edit(world.path, 2, f"return {text}")
        right = text == task["metadata"]["repair"]
        assert world.get_reward() == float(right), (task["kind"], text)


FORGED = json.dumps([right_value("add", 1, 1, 1)] * 5)
CHEATS = {
    "it exits": "raise SystemExit(0)",
    "it prints a forged result": f"return print('\\n{FORGED}') or 0",
    "it equals everything": "return type('E',(int,),{'__eq__':lambda s,o:True})(1)",
    "it is true": "return True",
    "it changes json": "import json; json.dumps=lambda *a: '[1,1,1,1,1]'; return 1",
    "it ends the process": "import os; os._exit(0)",
    "it never ends": "import itertools; return sum(1 for _ in itertools.count())",
    "it looks for the right value": "import sys; return sys._getframe(1).f_locals.get('right', 0)",
    "it is no code": "return (",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_no_file_is_paid_for_a_trick(name):
    world = begin(task_of("add"))
    world.edit(world.path, 2, CHEATS[name])
    assert world.get_reward() == 0.0


@pytest.mark.slow
def test_a_constant_that_passes_the_example_is_not_paid():
    world = begin(task_of("add"))
    arguments = arguments_of(world.path, world.number)[0]
    world.edit(world.path, 2, f"return {right_value('add', world.number, *arguments)}")
    assert world.run().endswith("right") and world.get_reward() == 0.0


def test_concurrent_episodes_share_a_sandbox(monkeypatch):
    """Each episode runs in a thread of its own; each sandbox would start processes ahead."""
    made = []

    class Slow:
        protections = ["none"]

        def __init__(self, unconfined):
            time.sleep(0.05)
            made.append(self)

        def run(self, source, within_s):
            return Ran("\n[1, 1, 1, 1, 1]", 0)

    monkeypatch.setattr(sandbox, "Sandbox", Slow)
    # As in a new process; the sandbox of the other tests comes back afterwards.
    monkeypatch.setattr(
        sandbox, "_make_sandbox", functools.cache(sandbox._make_sandbox.__wrapped__)
    )
    _run.cache_clear()  # another test may have run these tasks
    worlds = [begin(task) for task in tasks()[:6]]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(Files.get_reward, worlds))
    assert len(made) == 1
