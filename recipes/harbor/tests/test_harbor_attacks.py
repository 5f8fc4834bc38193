"""A task folder and an agent that want out: nothing is read, written, deleted or used up outside.

All marks are harmless: a file with a word, a folder that must not appear, a process that sleeps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from harbor_tasks import need_container, write_task

from agent_r1 import AgentR1Error
from agent_r1_recipes.code import watch
from agent_r1_recipes.harbor.container import FILE_SIZE, MOUNT_POINTS, Container, check_container
from agent_r1_recipes.harbor.env import HarborTask

pytestmark = pytest.mark.slow

TEST = """grep -q 42 /app/sum.txt
echo $((!$?)) > /logs/verifier/reward.txt
"""


@pytest.fixture(autouse=True, scope="module")
def _confined():
    need_container()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("tasks") / "sum", test=TEST)


@pytest.fixture
def world(task):
    yield from play(task)


def play(task: Path):
    world = HarborTask()
    try:
        world.reset(str(task), "bubblewrap")
        yield world
    finally:
        world.close()


@pytest.fixture
def victim(tmp_path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "secret").write_text("sings")
    return folder


def untouched(victim: Path) -> bool:
    return [file.name for file in victim.iterdir()] == ["secret"]


# ------------------------------------------------------------------------------- the task's folder


@pytest.mark.parametrize("door", ["Dockerfile", "task.toml"])
def test_variables_of_a_task_never_reach_bubblewrap(tmp_path, door):
    # With LD_DEBUG the loader of each program writes a file: LD_PRELOAD's harmless sister.
    mark = tmp_path / "mark"
    test = "echo $WORD > /logs/verifier/reward.txt\n"
    folder = write_task(tmp_path / "task", "FROM ubuntu\n", test)
    if door == "Dockerfile":
        lines = (
            f"ENV WORD=1 LD_DEBUG=statistics LD_DEBUG_OUTPUT={mark} GLIBC_TUNABLES=x\nRUN true\n"
        )
        (folder / "environment/Dockerfile").write_text(f"FROM ubuntu\n{lines}")
        (folder / "task.toml").write_text("")
    else:
        lines = f'WORD = 1\nLD_DEBUG = "statistics"\nLD_DEBUG_OUTPUT = "{mark}"\n'
        (folder / "task.toml").write_text(f"[verifier.env]\n{lines}")
    for world in play(folder):
        assert world.get_reward() == 1.0, "the variables are there inside"
    assert list(tmp_path.glob("mark*")) == []


@pytest.mark.parametrize(
    "line", ["COPY . /app", "COPY victim /app/victim", "COPY victim/x /app/victim/x",
             "ADD packed.tar /app/victim", "WORKDIR /app/victim/y"],
)  # fmt: skip
def test_no_step_follows_a_link_out(tmp_path, victim, line):
    context = tmp_path / "task/environment"
    (context / "victim").mkdir(parents=True)
    (context / "victim/x").write_text("evil")
    os.system(f"tar -cf {context}/packed.tar -C {context} victim")
    write_task(
        tmp_path / "task", f"FROM ubuntu\nRUN mkdir /app && ln -s {victim} /app/victim\n{line}"
    )
    try:
        HarborTask().reset(str(tmp_path / "task"), "bubblewrap")
    except AgentR1Error as error:
        assert error.code == "build_failed"
    assert untouched(victim)


@pytest.mark.parametrize(
    "source", ["$UP/victim/secret", "*/../../../victim/secret", "${UP}/tests/."]
)
def test_a_copy_reads_only_the_context(tmp_path, victim, source):
    lines = f"ENV UP=..\nWORKDIR /app\nCOPY {source} /app/\n"
    folder = write_task(tmp_path / "task", f"FROM ubuntu\n{lines}")
    with pytest.raises(AgentR1Error, match="leaves environment/"):
        HarborTask().reset(str(folder), "bubblewrap")


def test_links_of_the_context_lead_nowhere(tmp_path):
    folder = write_task(tmp_path / "task", "FROM ubuntu\nCOPY . /app/\nWORKDIR /app\n")
    (folder / "environment/inside").symlink_to("../tests/test_outputs.py")
    for world in play(folder):
        assert world.read("inside") == "error: No such file or directory"


def test_the_build_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FOLDER_SIZE", 8 << 20)
    lines = "RUN for i in 1 2 3 4; do head -c 3000000 /dev/zero > /$i; done"
    folder = write_task(tmp_path / "task", f"FROM ubuntu\n{lines}\n")
    with pytest.raises(AgentR1Error, match="size|too much"):
        HarborTask().reset(str(folder), "bubblewrap")


# ---------------------------------------------------------------------------------------- the agent


@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "rm -rf /logs; ln -s /app /logs; echo 1 > reward.txt",
        "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "ln -s /app /tests; echo 'echo 1 > /logs/verifier/reward.txt' > test.sh",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) & disown",
        "mkfifo /tests; rm -rf /logs; mkfifo /logs",
        "mkdir -p /logs/verifier/reward.txt; chmod 0 /logs/verifier /logs",
        "cd /; rm -rf /app",
    ],
)
def test_reward_files_of_the_agent_are_not_read(world, cheat):
    world.run(cheat)
    assert world.get_reward() == 0.0


def test_the_agent_deletes_no_folder_of_this_machine(world, victim):
    (victim / "verifier").mkdir()
    world.run(f"rm -rf /logs /tests; ln -s {victim} /logs; ln -s {victim} /tests")
    assert world.get_reward() == 0.0
    assert (victim / "verifier").is_dir() and (victim / "secret").read_text() == "sings"


def test_links_and_dots_of_the_agent_lead_nowhere(world, victim):
    secret = victim / "secret"
    world.run(f"ln -s {secret} link; ln -s / root; ln -s {victim} folder")
    dots = "../" * 20 + str(secret).lstrip("/")
    for path in ("link", "folder/secret", "root/" + str(secret), dots, str(secret)):
        assert world.read(path) == "error: No such file or directory"
        assert "sings" not in world.run(f"cat {path}")
    world.write("folder/new", "x")
    world.write("link", "x")
    world.edit("link", "sings", "x")
    assert untouched(victim) and secret.read_text() == "sings"


def test_pipes_and_devices_are_not_waited_for(world):
    world.run("mkfifo p; mkdir d")
    for path in ("p", "/dev/zero", "/dev/stdin", "d"):
        assert world.read(path) == "error: not a regular file"
        assert world.edit(path, "a", "b") == "error: not a regular file"
        assert world.write(path, "x") == "error: not a regular file"
    assert "Operation not permitted" in world.run("mknod disk b 8 0")


def test_zero_bytes_and_half_characters_are_no_errors_of_ours(world):
    assert "none of them zero" in world.run("echo a\0b") and world.run("echo \ud800") == "?"
    assert "none of them zero" in world.read("a\0b") and "none of them" in world.write("\0", "x")
    assert world.write("\ud800", "a\0\ud800b") == "written"
    assert world.read("?") == "a\0?b"
    assert "at most 100000 bytes" in world.run("x" * 100_001)


@pytest.mark.parametrize(
    "deed",
    [
        "mv /opt /o; ln -s ../oldroot{victim} /opt",
        "mv /etc /e; ln -s ../oldroot{victim} /etc",
        "mv /tmp /t; ln -s {victim} /tmp",
        "for f in /usr /bin /proc /dev /agent-r1; do mv $f /x; ln -sfn ../oldroot{victim} $f; done",
    ],
)  # fmt: skip
def test_bubblewrap_follows_no_link_of_the_agent(world, victim, deed):
    world.run(deed.format(victim=victim))
    assert world.run("echo fine") == "fine" and world.get_reward() == 0.0
    assert untouched(victim)


def test_a_mount_point_that_is_a_link_is_refused(world, victim):
    # No command can do that, because it is busy. If one could, nothing would run any more.
    assert world.run("echo fine") == "fine"  # its shell is there, and makes no mount point now
    place = world.container.root / MOUNT_POINTS[0]
    place.rmdir()
    place.symlink_to(victim)
    assert "was replaced" in world.run("echo fine") and world.get_reward() == 0.0


FACTS = """
cat /proc/1/environ /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c SECRET
for file in /proc/sys/kernel/core_pattern /proc/sys/vm/swappiness /proc/sys/kernel/hostname \
    /proc/sysrq-trigger /proc/kcore /proc/bus/x /usr/x /dev/x /agent-r1/x; do
  (: >> $file) 2>/dev/null && echo "wrote $file"
done
head -c 10 /proc/kcore 2>/dev/null | grep -q . && echo "read memory"
ls -d /sys /home/* /root/.ssh /oldroot /var/lib/* 2>/dev/null
grep CapEff /proc/self/status
"""


def test_proc_and_dev_show_and_take_nothing_of_the_machine(world, monkeypatch):
    # Root may write to /proc/sys without any capability, so this is most telling as root.
    monkeypatch.setenv("SECRET", "sings")
    lines = world.run(FACTS).splitlines()
    assert [line.split() for line in lines if line] == [["0"], ["CapEff:", "0" * 16]]


CALLS = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(result):
    return result < 0 and ctypes.get_errno() in (1, 38)
print(refused(libc.unshare(0x10000000)), refused(libc.shmget(0, 4096, 0o1777)))
print(refused(libc.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0)))
print(refused(libc.syscall(435, 0, 0)), refused(libc.mount(b"x", b"/tmp", b"tmpfs", 0, 0)))
for call in (lambda: os.memfd_create("x"), lambda: socket.socket(40, 1, 0)):
    try:
        print(call())
    except OSError as error:
        print(error.errno == 1)
"""


def test_system_calls_for_namespaces_and_uncounted_memory_are_refused(world):
    world.write("calls.py", CALLS.format(clone=56 if os.uname().machine == "x86_64" else 220))
    assert set(world.run("python3 calls.py").split()) == {"True"}


@pytest.mark.parametrize(
    "deed",
    [
        "echo /app/x.so > /etc/ld.so.preload",
        "rm /etc/ld.so.cache; cp /agent-r1/ld.so.cache /etc/ld.so.cache",
        "mv /etc /e; mkdir /app/etc; cp -a /e/ld.so.cache /app/etc; ln -s /app/etc /etc",
    ],
)
def test_no_library_of_the_agent_lives_in_the_shell_that_answers(world, deed):
    # A library of the agent could start a process there, which the next command would not end.
    assert world.read("numbers.txt") and world.container._shell.poll() is None
    world.run(deed)
    assert "4\n5\n33\n" in world.read("numbers.txt")
    assert world.container._shell is None, "each answer has a sandbox of its own now"
    assert world.get_reward() == 0.0 and world.container._shell is None


# ------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("for i in $(seq 300); do sleep 60 & done; wait", "processes"),
        (":(){ :|:& };:; sleep 60", "processes"),
        (
            'python3 -c "\nimport os, time\nfor i in range(6):\n    if os.fork() == 0:\n'
            "        x = b'x' * (50 << 20); time.sleep(60)\ntime.sleep(60)\"",
            "memory",
        ),
    ],
)
def test_processes_and_memory_are_bounded_within_a_command(world, command, limit, monkeypatch):
    monkeypatch.setattr(watch, "MEMORY", 150 << 20)
    assert world.container.run(command, 60.0).ended == limit
    assert not world.done and world.run("echo on") == "on", "the episode goes on"


@pytest.mark.parametrize(
    "command",
    [
        "for i in 1 2 3 4; do head -c 3000000 /dev/zero > $i; done; sleep 60",
        # Deleted, but still open: no folder shows it.
        "for i in 1 2 3 4; do exec {fd}>x; rm x; head -c 3000000 /dev/zero >&$fd; done; sleep 60",
        # Deeper than a path may be long.
        "python3 -c \"\nimport os, time\nfor i in range(200): os.mkdir('d' * 50)"
        "; os.chdir('d' * 50)\ntime.sleep(60)\"",
    ],
)
def test_files_are_bounded_within_a_command(world, command, monkeypatch):
    monkeypatch.setattr(watch, "FOLDER_SIZE", 8 << 20)
    start = time.monotonic()
    result = world._within_size(world.container.run(command, 60.0))
    assert result.ended == "size" and world.done
    assert time.monotonic() - start < 50
    root = world.container.root
    world.close()
    assert not root.exists(), "however deep it is"


def test_shared_memory_and_one_file_are_bounded(world):
    shown = world.run(
        "for i in 1 2; do head -c 60000000 /dev/zero > /dev/shm/$i; done; df -B1 /dev/shm"
    )
    assert "No space left" in shown and f" {64 << 20} " in shown
    assert world.run(f"head -c {FILE_SIZE + 5000} /dev/zero > big; stat -c %s big").split()[
        -1
    ] == str(FILE_SIZE)
    assert "Read-only" in world.run("echo x > /dev/x")


def test_a_folder_is_counted_without_its_links(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FOLDER_SIZE", 1 << 20)
    big = tmp_path / "big"
    big.mkdir()
    (big / "file").write_bytes(b"x" * (2 << 20))
    small = tmp_path / "small"
    small.mkdir()
    (small / "link").symlink_to(big)
    assert watch.fits(small) and not watch.fits(big)
    assert watch.fits(small, 500_000) and not watch.fits(small, 1 << 20)
    for number in range(300):  # empty files take room, too
        (small / str(number)).touch()
    assert not watch.fits(small)


def test_what_cannot_be_bounded_is_said(monkeypatch, capsys):
    check_container.cache_clear()
    check_container()
    assert "not bounded here: memory of the kernel" in capsys.readouterr().err
    monkeypatch.setattr(watch.os.path, "exists", lambda path: False)
    assert "number of processes" in watch.list_gaps()[0]


# --------------------------------------------------------------------------------------- the host

EVENTS: list[tuple[str, str]] = []
RECORDED: list[str] = []


def record(event: str, arguments: tuple) -> None:
    if RECORDED:
        paths = [str(one) for one in arguments if isinstance(one, str | os.PathLike)]
        EVENTS.extend((event, path) for path in paths if path.startswith(RECORDED[0]))


def test_the_host_opens_no_file_of_an_episode(task, victim):
    sys.addaudithook(record)  # it cannot be removed, and does nothing without RECORDED
    for world in play(task):
        world.run(f"ln -s {victim} folder; mkfifo p; mkdir -p /logs/verifier")
        RECORDED.append(str(world.container.root))
        world.run("ls; echo 1 > x")
        for path in ("x", "p", "folder/secret", "numbers.txt"):
            world.read(path)
            world.write(path, "x")
            world.edit(path, "x", "y")
        world.get_reward()
        RECORDED.clear()
    # Counting lists folders. It opens nothing.
    assert {event for event, _ in EVENTS} == {"os.scandir"}


def test_an_episode_leaves_no_folder_and_no_process(task):
    for world in play(task):
        root = world.container.root
        world.run("mkdir -p a/b; chmod 000 a; (sleep 1000 & disown)")
    assert not root.exists()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(root) not in entry.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_a_broken_build_leaves_no_folder():
    container = Container()
    root = container.root
    container.remove()
    assert not root.exists()
