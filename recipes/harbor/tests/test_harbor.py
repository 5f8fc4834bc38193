"""Harbor task folders: the subset of Dockerfiles, refusals, an episode, and what confines it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import fails_with

from agent_r1 import AgentR1Error, load_config
from agent_r1_recipes.harbor.container import Container, check_container
from agent_r1_recipes.harbor.env import HarborTask, expert, read_reward
from agent_r1_recipes.harbor.source import TASKS
from agent_r1_recipes.harbor.tasks import (
    Refused,
    Step,
    check_verifier,
    read_dockerfile,
    read_task,
)

DOCKERFILE = """# A comment.
FROM python:3.13-slim AS base
RUN apt-get update && apt-get install -y --no-install-recommends tmux \\
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
ENV KIND=sum
COPY numbers.txt .
RUN chmod 644 numbers.txt && mkdir made
CMD ["bash"]
"""
TEST = """#!/bin/bash
apt-get update
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then R=1; else R=0; fi
echo $R > /logs/verifier/reward.txt
"""
OUTPUTS = """from pathlib import Path

def test_sum():
    assert Path("/app/sum.txt").read_text().strip() == "42"
"""


def write_task(folder: Path, dockerfile: str = DOCKERFILE, test: str = TEST) -> Path:
    texts = {
        "task.toml": '[verifier]\ntimeout_sec = 60\nenv = {WORD = "w"}\n[environment]\ncpus = 1\n',
        "instruction.md": "Write the sum of the numbers to sum.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/numbers.txt": "4\n5\n33\n",
        "tests/test.sh": test,
        "tests/test_outputs.py": OUTPUTS,
        "solution/solve.sh": "awk '{s+=$1} END {print s}' /app/numbers.txt > /app/sum.txt\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_dockerfile_of_the_subset_becomes_steps():
    assert read_dockerfile(DOCKERFILE) == [
        Step("workdir", ("/app",)),
        Step("env", ("KIND", "sum")),
        Step("copy", ("numbers.txt", ".")),
        Step("run", ("chmod 644 numbers.txt && mkdir made",)),
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("FROM node:22", "FROM node:22"),
        ("FROM python:3.12\nFROM ubuntu", "several FROM"),
        ("FROM ubuntu\nUSER nobody", "USER nobody"),
        ("FROM ubuntu\nRUN apt-get install -y postgresql-99", "Debian package postgresql-99"),
        ("FROM ubuntu\nRUN pip install no-such-package-here", "no-such-package-here is not here"),
        ("FROM ubuntu\nRUN pip install pyyaml==0.1", "pyyaml is here as"),
        ("FROM ubuntu\nRUN pip install -r x.txt", "a list of packages"),
        ("FROM ubuntu\nRUN curl -O https://example.org/x", "there is no network"),
        ("FROM ubuntu\nRUN git clone https://example.org/x", "there is no network"),
        ("FROM ubuntu\nCOPY --from=x /a /b", "COPY from another image"),
        ("FROM ubuntu\nADD https://example.org/x /x", "ADD https"),
        ("FROM ubuntu\nSHELL ['x']", "Dockerfile: SHELL"),
        ("FROM ubuntu\nRUN cat <<EOF > x", "here-document"),
        ("WORKDIR /app", "no FROM"),
    ],
)
def test_the_rest_is_refused_with_its_reason(lines, reason):
    with pytest.raises(Refused, match=reason):
        read_dockerfile(lines)


@pytest.mark.parametrize(
    "line",
    [
        "uvx -w pytest==8.4.1 -w no-such-package==1 pytest x",
        "pip install no-such-package",
        "apt-get install -y postgresql-99",
        "curl -o x https://example.org/data.bin",
        "git clone https://example.org/x",
    ],
)
def test_a_verifier_that_needs_what_is_not_here_is_refused(line):
    check_verifier(TEST)
    with pytest.raises(Refused):
        check_verifier(f"#!/bin/bash\n{line}\n")


def test_a_folder_is_refused_for_what_it_lacks_or_links_to(tmp_path):
    task = write_task(tmp_path / "task")
    assert read_task(task).verifier_s == 60
    (task / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(Refused, match="compose"):
        read_task(task)
    (task / "environment" / "docker-compose.yaml").unlink()
    (task / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(Refused, match="leaves the folder"):
        read_task(task)


def test_rows_are_made_and_refusals_counted(tmp_path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "bad", "FROM rust:1\n")
    config = load_config("harbor", [f"data.source={tmp_path}"], trains=False).data
    made = TASKS.make(config, 0)
    assert made.manifest["skipped"] == [
        "bad: FROM rust:1: only images of Python, Debian and Ubuntu"
    ]
    [asked] = made.splits["train"]
    assert asked.question.startswith("Write the sum")
    assert asked.extra["metadata"]["task"].endswith("good")
    (tmp_path / "good" / "tests" / "test.sh").unlink()
    with fails_with("no_tasks", "none of 2"):
        TASKS.make(config, 0)


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [("reward.txt", "0.5\n", 0.5), ("reward.json", '{"reward": 1, "speed": 3}', 1.0),
     ("reward.json", '{"score": 0.25}', 0.25)],
)  # fmt: skip
def test_a_reward_is_read_from_either_file(tmp_path, name, text, reward):
    (tmp_path / name).write_text(text)
    assert read_reward(tmp_path) == reward


@pytest.mark.parametrize("text", ["nan", "inf", "one", "", '{"a": 1, "b": 2}'])
def test_a_reward_that_is_no_number_is_an_error(tmp_path, text):
    (tmp_path / ("reward.json" if "{" in text else "reward.txt")).write_text(text)
    with pytest.raises(AgentR1Error, match="no reward that can be read"):
        read_reward(tmp_path)


# ------------------------------------------------------------------------------- with a container


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    try:
        check_container()
    except AgentR1Error as error:
        pytest.skip(str(error))
    return write_task(tmp_path_factory.mktemp("tasks") / "sum")


@pytest.fixture
def world(task):
    world = HarborTask()
    world.reset(str(task))
    yield world
    world.close()


@pytest.mark.slow
def test_the_solution_is_paid_and_no_work_is_not(task, world):
    row = {"extra_info": {"metadata": {"task": str(task)}}}
    turn = expert(row, [], None)
    assert "/solution/solve.sh" in turn and '"name": "write"' in turn
    assert world.get_reward() == 0.0
    world.write("/solution/solve.sh", (task / "solution/solve.sh").read_text())
    world.run("bash /solution/solve.sh")
    assert world.read("sum.txt") == "42\n" and world.get_reward() == 1.0


@pytest.mark.slow
def test_an_episode_sees_neither_tests_nor_another_episode(task, world):
    world.run("echo mine > mine.txt; echo $KIND > kind.txt")
    assert world.read("kind.txt") == "sum\n" and "made" in world.run("ls")
    assert "No such file" in world.run("ls /tests /solution")
    other = HarborTask()
    other.reset(str(task))
    assert "No such file" in other.read("mine.txt")
    place = other.container.root
    other.close()
    assert not place.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "rm -rf /logs; ln -s /app /logs; echo 1 > reward.txt",
        "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "ln -s /app /tests; echo 'def test_sum(): pass' > test_outputs.py",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) & disown",
    ],
)
def test_reward_files_of_the_agent_are_not_read(world, cheat):
    world.run(cheat)
    assert world.get_reward() == 0.0


@pytest.mark.slow
def test_a_link_out_of_the_container_is_not_followed(world, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("sings")
    world.run(f"ln -s {secret} link; ln -s / root")
    assert "leads out" in world.read("link") and "leads out" in world.write("link", "x")
    assert "sings" not in world.run("cat link") and "leads out" in world.read("root/etc/hostname")
    assert secret.read_text() == "sings"


@pytest.mark.slow
def test_time_output_and_folders_are_limited():
    check_container()
    container = Container()
    try:
        start = time.monotonic()
        assert container.run("sleep 60 & sleep 60", 0.5).ended == "time"
        assert container.run("yes", 5.0).ended == "output" and time.monotonic() - start < 20
        loud = container.run("head -c 200000 /dev/zero | tr '\\0' x", 5.0)
        assert len(loud.output) == 64 << 10 and loud.code == 0
        assert container.run("head -c 100000000 /dev/zero > big", 10.0).code != 0
        assert container.run("exit 3", 5.0).code == 3
        assert str(os.getpid()) not in container.run("ls /proc", 5.0).output.split()
    finally:
        container.remove()


@pytest.fixture
def refuses(task, tmp_path):
    """Return a function that builds a task with these lines, and expects this failure."""

    def build(lines: str, reason: str) -> Path:
        folder = write_task(tmp_path / "task", f"FROM ubuntu\n{lines}\n")
        with pytest.raises(AgentR1Error, match=reason):
            HarborTask().reset(str(folder))
        return folder

    return build


@pytest.mark.slow
@pytest.mark.parametrize("door", ["Dockerfile", "task.toml"])
def test_variables_of_a_task_never_reach_bubblewrap(task, tmp_path, door):
    # With LD_DEBUG the loader of each program writes a file: LD_PRELOAD's harmless sister.
    mark = tmp_path / "mark"
    folder = write_task(
        tmp_path / "task", "FROM ubuntu\n", "echo $WORD > /logs/verifier/reward.txt\n"
    )
    if door == "Dockerfile":
        lines = f"FROM ubuntu\nENV WORD=1 LD_DEBUG=statistics LD_DEBUG_OUTPUT={mark}\nRUN true\n"
        (folder / "environment/Dockerfile").write_text(lines)
        (folder / "task.toml").write_text("")
    else:
        lines = f'[verifier.env]\nWORD = 1\nLD_DEBUG = "statistics"\nLD_DEBUG_OUTPUT = "{mark}"\n'
        (folder / "task.toml").write_text(lines)
    world = HarborTask()
    try:
        world.reset(str(folder))
        assert world.get_reward() == 1.0, "the variables are there inside"
    finally:
        world.close()
    assert list(tmp_path.glob("mark*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["COPY . /app", "COPY victim /app/victim", "COPY victim/x /app/victim/x"]
)
def test_copy_follows_no_link_that_a_run_made(refuses, tmp_path, line):
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "task/environment/victim").mkdir(parents=True)
    (tmp_path / "task/environment/victim/x").write_text("evil")
    refuses(f"RUN mkdir /app && ln -s {victim} /app/victim\n{line}", "a link is on the way")
    assert list(victim.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("source", ["../outside.txt", "*/../../outside.txt", "../../outside.txt"])
def test_copy_reads_only_the_context(refuses, tmp_path, source):
    (tmp_path / "task/environment/folder").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("sings")
    (tmp_path / "task/outside.txt").write_text("sings")
    refuses(f"COPY {source} /app/", "leads out of the folder")


@pytest.mark.slow
def test_the_agent_deletes_no_folder_of_this_machine(world, tmp_path):
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier/x").write_text("sings")
    world.run(f"rm -rf /logs; ln -s {tmp_path} /logs")
    assert world.get_reward() == 0.0
    assert (tmp_path / "verifier/x").read_text() == "sings"
