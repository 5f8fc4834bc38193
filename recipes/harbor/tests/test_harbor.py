"""Harbor task folders: the subset of Dockerfiles, refusals, an episode, and what confines it."""

from __future__ import annotations

import os
import subprocess
import tarfile
import time

import pytest
from conftest import fails_with
from harbor_tasks import DOCKERFILE, TEST, config_of, need_container, write_task

from agent_r1 import AgentR1Error
from agent_r1_recipes.harbor.container import Container
from agent_r1_recipes.harbor.dockerfile import read_dockerfile
from agent_r1_recipes.harbor.env import HarborTask, expert, read_reward
from agent_r1_recipes.harbor.ignore import MAX_DEPTH, is_ignored, read_patterns
from agent_r1_recipes.harbor.packages import Refused, check_verifier
from agent_r1_recipes.harbor.source import TASKS
from agent_r1_recipes.harbor.tasks import read_task, read_text


def test_a_dockerfile_of_the_subset_becomes_a_script():
    build = read_dockerfile(DOCKERFILE)
    assert build.variables == ["KIND"]
    assert [step.split()[0] for step in build.steps] == ["RUN", "WORKDIR", "ENV", "COPY", "RUN"]


def test_whatever_stands_in_a_dockerfile_is_one_word_of_the_shell():
    # Only variables are expanded. The shell itself says what else it would run.
    text = 'FROM ubuntu\nENV A="$(echo run)" B=\'$C\' D="`echo run`" E=\\$C F=a;b G=${C:-d e}\n'
    line = next(line for line in read_dockerfile(text).lines if line.startswith("export"))
    shown = subprocess.run(
        ["bash", "-c", f"{line}; printf '%s|' \"$A\" \"$B\" \"$D\" \"$E\" \"$F\" \"$G\""],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == "$(echo run)|$C|`echo run`|$C|a;b|d e|"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("FROM node:22", "FROM node:22"),
        ("FROM python:3.12\nFROM ubuntu", "several FROM"),
        ("FROM ubuntu\nUSER nobody", "USER nobody"),
        ("FROM ubuntu\nRUN true && useradd -m me", "RUN useradd -m me: all commands run as one"),
        ("FROM ubuntu\nRUN apt-get install -y postgresql-99", "Debian package postgresql-99"),
        ("FROM ubuntu\nRUN pip install no-such-package-here", "no-such-package-here is not here"),
        ("FROM ubuntu\nRUN pip install pyyaml==0.1", "pyyaml is here as"),
        ("FROM ubuntu\nRUN pip install -r x.txt", "a list of packages"),
        ("FROM ubuntu\nRUN curl -O https://example.org/x", "there is no network"),
        ("FROM ubuntu\nRUN git clone https://example.org/x", "there is no network"),
        ("FROM ubuntu\nCOPY --from=x /a /b", "COPY from another image"),
        ("FROM ubuntu\nCOPY --chown=me a /b", "COPY --chown=me"),
        ("FROM ubuntu\nCOPY ../a /b", "leaves environment/"),
        ("FROM ubuntu\nCOPY a/../../b /b", "leaves environment/"),
        ("FROM ubuntu\nRUN --mount=type=bind,target=/x true", "RUN --mount=type=bind"),
        ("FROM ubuntu\nENV A=${B/x/y}", "the expansion"),
        ('FROM ubuntu\nENV A="x', "a quotation without an end"),
        ("FROM ubuntu\nENV UID=5", "ENV UID: a shell keeps"),
        ("FROM ubuntu\nENV a.b=5", "ENV a.b"),
        ("FROM ubuntu\nRUN echo \0", "a zero byte"),
        ("# escape=`\nFROM ubuntu", "another escape character"),
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
    config = config_of(tmp_path).data
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
def test_a_reward_is_read_from_either_file(name, text, reward):
    assert read_reward(name, text) == reward


@pytest.mark.parametrize("text", ["nan", "inf", "one", "", '{"a": 1, "b": 2}', "[" * 9999])
def test_a_reward_that_is_no_number_is_an_error(text):
    with pytest.raises(AgentR1Error, match="no reward that can be read"):
        read_reward("reward.json" if text[:1] in ("{", "[") else "reward.txt", text)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("task.toml", "[verifier.env]\nKEY = '${KEY}'\n", "variable of this machine"),
        ("task.toml", "[verifier.env]\n'A B' = 'x'\n", "verifier.env.A B"),
        ("task.toml", "a = " + "[" * 50_000, "cannot be read"),
        ("instruction.md", "x" * (1 << 20) + "x", "more than 1 MB"),
        ("environment/Dockerfile", "FROM ubuntu\nRUN echo \0", "a zero byte"),
        ("environment/.dockerignore", "a/**/b", "line 1: .* is only read"),
        ("environment/.dockerignore", "a\n" * 101, "more than 100 patterns"),
        ("environment/Dockerfile.dockerignore", "*", "a .dockerignore of one Dockerfile"),
        ("tests/test_outputs.py", "subprocess.run(['x'], user='nobody')", "run as one user"),
        ("tests/test.sh", "set -e; su nobody -c true\n", "run as one user"),
    ],
)
def test_texts_that_cannot_be_meant_are_refused(tmp_path, name, text, reason):
    (write_task(tmp_path) / name).write_text(text)
    with pytest.raises(Refused, match=reason):
        read_task(tmp_path)


@pytest.mark.parametrize("name", ["instruction.md", "tests/extra", "environment/Dockerfile"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path, name):
    task = write_task(tmp_path)
    (task / name).unlink(missing_ok=True)
    os.mkfifo(task / name)
    with pytest.raises(Refused, match="neither a file nor a folder"):
        read_task(task)
    with pytest.raises(Refused, match="no regular file"):
        read_text(task, name)


def test_ignored_files_are_those_of_docker():
    text = "# c\n*.md\n!README.md\n**/__pycache__/\nbuild/**\n/a/*/c\nx?y\n[ab]z\n**/q*r*s\n"
    patterns = read_patterns(text)
    ignored = ["a.md", "d/e/__pycache__/f.pyc", "build/x/y", "a/b/c", "xyy", "az", "d/qrsrs"]
    kept = ["README.md", "d/a.md", "d/build", "a/b/b/c", "xy", "cz", "d/qrst", "# c"]
    assert [path for path in ignored + kept if is_ignored(path, patterns)] == ignored


def test_no_ignored_pattern_takes_long():
    # Read as an ordinary regular expression, one of them would not end.
    patterns = read_patterns("\n".join(["**/" + "*a" * 100 + "*b"] * 100))
    assert not is_ignored("/".join(["a" * 200] * MAX_DEPTH), patterns)
    with pytest.raises(Refused, match="more than 50 folders"):
        is_ignored("/".join("a" * 51), patterns)


# ------------------------------------------------------------------------------- with a container


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    need_container()
    return write_task(tmp_path_factory.mktemp("tasks") / "sum")


@pytest.fixture
def world(task):
    world = HarborTask()
    world.reset(str(task), "bubblewrap")
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
    other.reset(str(task), "bubblewrap")
    assert "No such file" in other.read("mine.txt")
    place = other.container.root
    other.close()
    assert not place.exists()


@pytest.mark.slow
def test_the_open_shell_answers_each_question_with_its_own_output(world):
    world.write("text.txt", "first\n\0" + "0" * 32 + " 0\n")  # as the end of an answer looks
    shell = world.container._shell
    assert world.read("text.txt") == "first\n\0" + "0" * 32 + " 0\n"
    assert world.read("missing.txt").startswith("error: No such file")
    world.write("empty.txt", "")
    assert world.read("empty.txt") == ""
    assert world.container._shell is shell and shell.poll() is None
    world.run("mkdir folder")
    # A refused write leaves its text unread, and nothing of it is taken for the next question.
    assert world.write("folder", "x\0" * 30_000) == "error: not a regular file"
    shell.wait(timeout=30)  # it ends by itself: with a time limit of the next question, too late
    assert world.read("text.txt").startswith("first\n")


@pytest.mark.slow
def test_time_output_and_folders_are_limited():
    need_container()
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


VARIABLES = r"""ARG BASE=/srv
FROM ubuntu
ARG BASE
ARG NONE
ENV APP_HOME=$BASE/app KIND='$BASE'
ENV APP_HOME=/srv/app2 DATA=$APP_HOME/data
ENV SPOKEN a text of $APP_HOME
ENV PATH=$APP_HOME/bin:$PATH MISSING=${NONE:-${BASE}} SET=${BASE:+yes} COST=\$5
WORKDIR $APP_HOME
COPY input.txt ${DATA}/input.txt
COPY --chmod=750 *.sh tool.py ./bin/
COPY [".hidden", "with space", "."]
ADD packed.tar /unpacked/
ADD folder ${EMPTY}/copied
RUN for i in 1 2; do echo "$i;$KIND" >> loop; done; test "$BASE" = /srv
RUN ["sh", "-c", "pwd > where"]
WORKDIR sub
"""


@pytest.mark.slow
def test_the_shell_expands_variables_and_copies_as_docker_does(task, tmp_path):
    folder = write_task(tmp_path / "task", VARIABLES)
    context = folder / "environment"
    for name in ("input.txt", "a.sh", "b.sh", "tool.py", ".hidden", "with space", "folder/.x/y"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    with tarfile.open(context / "packed.tar", "w") as archive:
        archive.add(context / "a.sh", "inner/a.sh")
    world = HarborTask()
    try:
        assert world.reset(str(folder), "bubblewrap") == "Working directory: /srv/app2/sub"
        shown = world.run(
            'echo "$APP_HOME|$KIND|$DATA|$SPOKEN|$MISSING|$SET|$COST|$BASE|${PATH%%:*}"'
        )
        # ENV sees the values before it, ARG is gone after the build.
        assert (
            shown == "/srv/app2|$BASE|/srv/app/data|a text of /srv/app2|/srv|yes|$5||/srv/app2/bin"
        )
        assert world.read("/srv/app/data/input.txt") == "input.txt"
        assert world.run("stat -c %a:%n ../bin/*; ls -A ..").split() == [
            "750:../bin/a.sh", "750:../bin/b.sh", "750:../bin/tool.py",
            ".hidden", "bin", "loop", "sub", "where", "with", "space",
        ]  # fmt: skip
        assert world.read("../loop") == "1;$BASE\n2;$BASE\n"
        assert world.read("../where") == "/srv/app2\n"
        assert world.read("/unpacked/inner/a.sh") == "a.sh"
        assert world.read("/copied/.x/y") == "folder/.x/y"
        assert world.run("command -v uvx").endswith("/bin/uvx"), (
            "ours stand after those of the task"
        )
    finally:
        world.close()


@pytest.mark.slow
def test_ignored_files_are_not_copied(task, tmp_path):
    folder = write_task(tmp_path / "task", "FROM ubuntu\nCOPY . /app/\nWORKDIR /app\n")
    context = folder / "environment"
    (context / ".dockerignore").write_text("*\n!numbers.txt\n!kept/y\n")
    (context / "kept/z").mkdir(parents=True)
    (context / "kept/y").write_text("y")
    (context / "kept/link").symlink_to("..")
    world = HarborTask()
    try:
        world.reset(str(folder), "bubblewrap")
        assert world.run("find . -mindepth 1 | sort").split() == [
            "./kept",
            "./kept/y",
            "./numbers.txt",
        ]
    finally:
        world.close()
    assert (context / "kept/link").is_symlink(), "only our copy lost it"


@pytest.mark.slow
def test_a_step_that_fails_is_named(task, tmp_path):
    folder = write_task(tmp_path / "task", "FROM ubuntu\nRUN echo oh no; exit 3\nRUN true\n")
    with fails_with("build_failed", "RUN echo oh no; exit 3: oh no"):
        HarborTask().reset(str(folder), "bubblewrap")


@pytest.mark.slow
def test_an_edit_keeps_the_bytes_around_it(world):
    world.run(r"printf 'a\377b' > f")
    assert world.edit("f", "b", "\u20ac") == "written"
    assert world.run("od -An -tx1 f").split() == ["61", "ff", "e2", "82", "ac"]
    assert world.edit("f", "x", "y") == "error: the text occurs 0 times"
    assert world.edit("none", "x", "y") == "error: No such file or directory"


@pytest.mark.slow
def test_files_are_whole_in_the_shell_that_answers(world):
    long = "x\0\n" * 20_000
    for path, text in (
        ("empty", ""),
        ("-", "dash"),
        ("-n", "option"),
        ("a b/'c'\n$(d)", long),
        ("\u20ac", '\u20ac "'),
    ):
        assert world.write(path, text) == "written" and world.read(path) == text
    # More than a pipe holds, so some of it is not read.
    assert world.write("numbers.txt/x", "\u20ac" * 60_000).startswith("error: ")
    assert world.read("\u20ac") == '\u20ac "', "nothing of the refused text is left over"
    shell = world.container._shell
    shell.kill()
    shell.wait()
    assert world.read("empty") == "" and world.container._shell is not shell


@pytest.mark.slow
def test_tests_that_a_limit_ends_are_worth_nothing(task, tmp_path):
    test = "echo 1 > /logs/verifier/reward.txt\nsleep 60\n"
    folder = write_task(tmp_path / "task", "FROM ubuntu\n", test)
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 1\n")
    world = HarborTask()
    try:
        world.reset(str(folder), "bubblewrap")
        assert world.get_reward() == 0.0
    finally:
        world.close()
