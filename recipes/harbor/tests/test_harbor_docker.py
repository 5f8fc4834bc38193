"""Docker and Podman as engines, with a stand-in executable that records its arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import fails_with
from harbor_tasks import config_of, write_task

from agent_r1_recipes.harbor import env
from agent_r1_recipes.harbor.docker import find_program
from agent_r1_recipes.harbor.env import HarborTask
from agent_r1_recipes.harbor.source import TASKS

STAND_IN = """#!{python}
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
text = sys.stdin.read() if "--interactive" in words else ""
with open({log!r}, "a") as file:
    print(json.dumps([name, *words, *(["stdin " + text] if text else [])]), file=file)
facts = json.load(open({facts!r}))
script = words[-1]
if words[0] == "info":
    if facts[name] is None:
        sys.exit("Cannot connect to the daemon")
    print(facts[name])
elif words[0] == "build" and facts.get("build"):
    sys.exit(facts["build"])
elif "pwd" in words:
    print("/app")
elif any("tests/test.sh" in word for word in words):
    sys.stdout.write("\\0tests\\0all passed")
elif any("/logs/verifier || exit" in word for word in words):
    sys.stdout.write("\\0reward\\0reward.txt\\0" + "0.5")
elif script == "too long":
    import time
    time.sleep(60)
elif words[0] == "exec":
    print("said", script)
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Return a function that puts engines on the PATH, and returns what they were asked."""
    log, facts = tmp_path / "log", tmp_path / "facts"
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    find_program.cache_clear()
    env._image.cache_clear()

    def put(**answers) -> Path:
        facts.write_text(json.dumps(answers))
        for name in answers:
            (folder / name).write_text(
                STAND_IN.format(python=sys.executable, log=str(log), facts=str(facts))
            )
            (folder / name).chmod(0o755)
        return log

    yield put
    find_program.cache_clear()
    env._image.cache_clear()


def read(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("answers", "name", "words"),
    [
        ({"docker": '["name=seccomp"]'}, "docker", "rights of root"),
        ({"docker": '["name=rootless"]', "podman": "false"}, "docker", "rootless"),
        ({"docker": '["name=seccomp"]', "podman": "true"}, "podman", "rootless"),
        ({"docker": None, "podman": "false"}, "podman", "rights of root"),
    ],
)
def test_a_rootless_engine_that_answers_is_preferred(engines, capsys, answers, name, words):
    engines(**answers)
    assert find_program("auto").name == name
    said = capsys.readouterr().err
    assert words in said and "not bounded here: bytes on the disk" in said


def test_without_an_engine_that_answers_it_is_bubblewrap(engines):
    engines(docker=None)
    assert find_program("auto") is None and find_program("bubblewrap") is None
    with fails_with("no_sandbox", "data.harbor_engine=docker: `docker info` fails here"):
        find_program("docker")


def test_an_episode_asks_for_its_limits(engines, tmp_path):
    log = engines(docker='["name=rootless"]')
    task = write_task(tmp_path / "task", "FROM node:22\nUSER me\n")
    (task / "tests/test.sh").write_text("git clone https://example.org/x\n")
    world = HarborTask()
    assert world.reset(str(task)) == "Working directory: /app"
    assert world.run("ls") == "said ls"
    world.write("a b", "text")
    assert "none of them zero" in world.run("a\0b")
    assert world.get_reward() == 0.5
    world.close()
    asked = [words[1:] for words in read(log) if words[1] != "info"]
    [build, start, *_] = asked
    assert build[0] == "build" and build[-1] == str(task / "environment")
    line = " ".join(start)
    for option in (
        "run --detach", "--network none", f"--memory {2 << 30} --memory-swap {2 << 30}",
        "--pids-limit 256", f"--shm-size {64 << 20}", "--cap-drop ALL",
        "--security-opt no-new-privileges", "--pull never",
    ):  # fmt: skip
        assert option in line
    assert "tests" not in line and "--mount" not in start and "--privileged" not in start
    kinds = [words[0] for words in asked]
    commit = kinds.index("commit")
    # Until the agent has ended, nothing names the tests or the network.
    assert not any("test.sh" in word for words in asked[:commit] for word in words)
    assert asked[4][:2] == ["exec", "--interactive"] and asked[4][-1] == "stdin text"
    second = " ".join(asked[commit + 1])
    assert f"source={task / 'tests'},target=/agent-r1/given,readonly" in second
    assert "--network" not in second and f"--memory {2 << 30}" in second
    [tests] = [words for words in asked if any("tests/test.sh" in word for word in words)]
    assert tests[-1] == "WORD=w", "a word of the command, no variable of Docker"
    assert asked.index(tests) < kinds.index("exec", asked.index(tests) + 1)
    assert kinds[-3:] == ["rm", "rm", "rmi"] and "--volumes" in asked[-2]


def test_a_limit_ends_the_processes_inside(engines, tmp_path, monkeypatch):
    log = engines(docker="[]")
    monkeypatch.setattr(env, "COMMAND_S", 0.5)
    world = HarborTask()
    world.reset(str(write_task(tmp_path / "task")))
    assert world.run("too long") == "[ended by the limit of time]"
    assert read(log)[-1][-3:] == ["/bin/sh", "-c", "kill -9 -1"]
    world.close()


def test_a_build_that_fails_is_told_in_one_line(engines, tmp_path):
    engines(docker="[]", build="step 3\nnot found: node:99")
    with fails_with("container_failed", "docker build: not found: node:99"):
        HarborTask().reset(str(write_task(tmp_path / "task")))


def test_with_an_engine_dockerfiles_are_not_refused(engines, tmp_path):
    engines(podman="true")
    write_task(tmp_path / "tasks/node", "FROM node:22\n")
    config = config_of(tmp_path / "tasks", "data.harbor_engine=podman")
    assert len(TASKS.make(config.data, 0).splits["all"]) == 1
