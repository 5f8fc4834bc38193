"""Each value of task.toml is read, refused, or named as harmless."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from typing import Any

import pytest
from harbor_tasks import config_of, write_task
from other_values import is_harmless, with_other_values

from agent_r1_recipes.harbor.env import HarborTask, expert
from agent_r1_recipes.harbor.packages import Refused
from agent_r1_recipes.harbor.source import TASKS
from agent_r1_recipes.harbor.tasks import HARMLESS, read_task

PUBLISHED = """
schema_version = "1.1"
source = "a set of tasks"
[task]
name = "org/sum"
description = "A sum."
authors = [{ name = "Ann", email = "ann@example.org" }]
keywords = ["sum"]
[metadata]
difficulty = "easy"
tags = ["trivial"]
[verifier]
timeout_sec = 120.0
environment_mode = "shared"
network_mode = "public"
user = "root"
env = { WORD = "w" }
[agent]
timeout_sec = 120.0
network_mode = "public"
user = "root"
[solution]
env = { KEY = "k e y" }
[environment]
build_timeout_sec = 600.0
docker_image = "org/sum:1"
allow_internet = true
network_mode = "public"
cpus = 1
memory_mb = 2048
storage_mb = 10240
memory = "2G"
storage = "10G"
gpus = 0
env = { TABLE = "t" }
"""
"""The keys of Harbor's form, without those that are refused."""


def read(folder, record: dict[str, Any]) -> dict[str, Any]:
    """Read a task with this task.toml."""
    lines = [f"{key} = {toml(value)}" for key, value in record.items()]
    (folder / "task.toml").write_text("\n".join(lines) + "\n")
    return asdict(read_task(folder))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def test_each_value_is_read_refused_or_harmless(tmp_path):
    record = tomllib.loads(PUBLISHED)
    folder = write_task(tmp_path)
    before = read(folder, record)
    assert before["environment_env"] == {"TABLE": "t"} and before["verifier_s"] == 120
    named = set()
    for name, other in with_other_values(record):
        try:
            seen = read(folder, other) != before
        except Refused:
            seen = True
        assert seen or is_harmless(name, HARMLESS), name
        named.update(key for key in HARMLESS if is_harmless(name, [key]))
    assert named == HARMLESS.keys() - {"version", "artifacts"}  # an older name, and a list


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[environment]\nskills_dir = '/skills'", "environment.skills_dir"),
        ("[environment]\nallowed_hosts = ['a.org']", "environment.allowed_hosts"),
        ("[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck"),
        ("[environment.env]\nKEY = '${KEY}'", "environment.env.KEY"),
        ("[environment.env]\nUID = '5'", "a shell keeps"),
        ("[environment]\nenv = ['A']", "environment.env in task.toml is no table"),
        ("[agent]\nuser = 'ann'", "agent.user = 'ann'"),
        ("[verifier]\nuser = 1000", "verifier.user = 1000"),
        ("[verifier]\ntimeout_sec = '60'", "timeout_sec = '60'"),
        ("[[verifier.collect]]\ncommand = 'x'", "verifier.collect"),
        ("verifier = 60", "verifier in task.toml is no section"),
        ("new_key = 1", "'new_key' has the value 1"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path, text, reason):
    (write_task(tmp_path) / "task.toml").write_text(text)
    with pytest.raises(Refused, match=reason.replace("[", r"\[")):
        read_task(tmp_path)


def test_harmless_keys_are_counted_in_one_line(tmp_path, capsys):
    for name in ("a", "b"):
        task = write_task(tmp_path / name)
        (task / "instruction.md").write_text(f"Do {name}.")
    TASKS.make(config_of(tmp_path).data, 0)
    assert capsys.readouterr().out.strip() == (
        f"{tmp_path.name}, task.toml: not read: environment.cpus (2: "
        f"{HARMLESS['environment.cpus']})"
    )


def test_variables_of_the_environment_and_of_the_solution_are_set(tmp_path):
    folder = write_task(tmp_path / "task")
    (folder / "task.toml").write_text(
        "[environment.env]\nTABLE = 'a b'\n[solution.env]\nKEY = 'k'\n[verifier.env]\nWORD = 'w'\n"
    )
    (folder / "tests" / "test.sh").write_text(
        '[ "$TABLE $WORD" = "a b w" ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
    )
    task = HarborTask()
    task.reset(str(folder), engine="bubblewrap")
    try:
        assert task.run('echo "$TABLE-$KEY"') == "a b-"
        assert task.get_reward() == 1.0
    finally:
        task.close()
    row: Any = {"extra_info": {"metadata": {"task": str(folder)}}}
    [written] = [path for path in (folder / "solution").rglob("*") if path.is_file()]
    assert written.name == "solve.sh"
    turn = expert(row, [{"role": "tool", "content": "written"}], None)
    assert "env KEY=k bash /solution/solve.sh" in turn
