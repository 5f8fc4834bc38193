"""Run shell commands of an agent in its own folder, without Docker and network.

In: a folder, which is the root of the episode's file system. Out: what a command printed, and how
it ended. Next: `env.py` builds a task in it and runs its tests.

    bubblewrap   namespaces: no network, no other process; this machine's /usr, read-only
    seccomp      refuses the system calls of `REFUSED_CALLS`
    limits       of time, memory, file size, output, and the folder's size

A shell starts processes, so this sandbox allows more than the sandbox of recipes/code. Like that
one it is not assumed but tried: a probe must fail in it before it is used. All processes of a
command end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error
from agent_r1_recipes.code.sandbox import bubblewrap_paths
from agent_r1_recipes.code.seccomp import (
    ALLOW,
    EQUAL,
    GIVE,
    LARGER,
    LOAD,
    REFUSE,
    call_numbers,
    check_architecture,
    instruction,
)

MEMORY = 2 << 30
"""Bytes of address space of each process."""
FILE_SIZE = 64 << 20
FOLDER_SIZE = 256 << 20
"""Bytes of all files of an episode, checked after each command."""
PROCESSES = 256
MAX_OUTPUT = 64 << 10
"""Bytes of output that are kept; the command goes on if it prints more."""
MOST_OUTPUT = 16 << 20
"""Bytes of output after which it is ended."""
OURS = "/opt/agent-r1"
"""Where our Python, its packages and the stand-ins are inside."""
_REFUSED_TEXT = """
mount umount2 pivot_root chroot ptrace bpf perf_event_open keyctl add_key request_key unshare setns
userfaultfd io_uring_setup io_uring_enter io_uring_register kexec_load kexec_file_load init_module
finit_module delete_module open_by_handle_at name_to_handle_at process_vm_readv process_vm_writev
quotactl swapon swapoff reboot acct settimeofday clock_settime adjtimex clock_adjtime syslog
move_pages mbind migrate_pages fsopen fsconfig fsmount fspick move_mount open_tree mount_setattr
memfd_secret pidfd_getfd kcmp lookup_dcookie nfsservctl vhangup iopl ioperm
"""
REFUSED_CALLS = _REFUSED_TEXT.split()
"""System calls that a shell and its programs do not need."""
STAND_IN = """#!/bin/sh
# Stands in for an installer: what it would install was checked before.
exit 0
"""
UV = """#!/bin/sh
# Stands in for uv, uvx and pytest's environment: runs our pytest, without its report file.
while [ $# -gt 0 ]; do
  case "$1" in
    pytest) shift; break ;;
    python|python3) shift; exec python3 "$@" ;;
    init|venv|add|sync|pip|self) exit 0 ;;
    -p|-w|--with|--python) shift 2 ;;
    *) shift ;;
  esac
done
exec /opt/agent-r1/bin/pytest "$@"
"""
PYTEST = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
  case "$1" in
    --ctrf) shift; n=$((n-1)) ;;
    --ctrf=*) ;;
    *) set -- "$@" "$1" ;;
  esac
  shift
  n=$((n-1))
done
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=/opt/agent-r1/site
exec python3 -m pytest -p no:cacheprovider "$@"
"""
"""`--ctrf FILE` needs a plugin; the reward does not depend on it."""


@dataclass(frozen=True)
class Ran:
    """Result of a command."""

    output: str
    code: int | None
    """None if a limit ended it."""
    ended: str | None = None
    """`time`, `output` or `size`."""


class Container:
    """The file system of one episode."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="agent-r1-harbor-"))
        for name in ("root/.local/bin", "tmp", "etc", "logs/verifier", "home", "opt", "var/tmp"):
            (self.root / name).mkdir(parents=True)
        (self.root / "root/.local/bin/env").write_text("# uv's environment; ours is on the PATH\n")
        (self.root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
        (self.root / "etc/group").write_text("root:x:0:\n")
        self.directory = "/"
        self.variables: dict[str, str] = {}

    def path(self, name: str) -> Path:
        """Return the path outside of a path inside. Raises ValueError if it leaves the root."""
        inside = os.path.normpath(os.path.join("/", self.directory, name))
        outside = self.root / inside.lstrip("/")
        # A link that the agent made may point anywhere.
        if not outside.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"{name} leads out of the container")
        return outside

    def run(self, command: str, within_s: float) -> Ran:
        """Run a command in bash, in the present directory."""
        return _run(self.root, self.directory, self.variables, command, within_s)

    def size(self) -> int:
        """Return the bytes of all files."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def remove(self) -> None:
        """Delete everything."""
        for folder, _, _ in os.walk(self.root):
            with contextlib.suppress(OSError):  # the agent may have taken our rights away
                os.chmod(folder, 0o700)
        shutil.rmtree(self.root, ignore_errors=True)


def _run(
    root: Path, directory: str, variables: dict[str, str], command: str, within_s: float
) -> Ran:
    filter_file: Any = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    filter_file.write(_seccomp())
    filter_file.seek(0)
    own = {
        "PATH": f"{OURS}/bin:{OURS}/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = own | {k: v for k, v in variables.items() if k != "PATH"}
    # Bubblewrap itself gets no variable: a task's LD_PRELOAD would load a library into it, outside.
    assignments: list[str] = ["--clearenv"]
    for name, value in environment.items():
        assignments += ["--setenv", name, value]
    process: Any = subprocess.Popen(
        [*_bubblewrap(), *assignments, "--bind", str(root), "/", *_binds(),
         "--seccomp", str(filter_file.fileno()), "--chdir", directory, "--",
         "/bin/bash", "-c", command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={}, pass_fds=[filter_file.fileno()], start_new_session=True,
        preexec_fn=functools.partial(_limit, within_s),
    )  # fmt: skip
    try:
        return _collect(process, time.monotonic() + within_s)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        filter_file.close()


def _collect(process: Any, until: float) -> Ran:
    """Read output until the command ends or a limit is reached."""
    output = bytearray()
    count = 0
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while True:
        if not poll.poll(1000 * max(0.0, until - time.monotonic())):
            return Ran(output.decode(errors="replace"), None, "time")
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            break
        count += len(piece)
        output += piece[: MAX_OUTPUT - len(output)]
        if count > MOST_OUTPUT:
            return Ran(output.decode(errors="replace"), None, "output")
    try:
        code = process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Ran(output.decode(errors="replace"), None, "time")
    return Ran(output.decode(errors="replace"), code)


def _limit(within_s: float) -> None:
    """Set limits in the new process, which all of its children inherit."""
    limits = {
        "RLIMIT_AS": MEMORY,
        "RLIMIT_FSIZE": FILE_SIZE,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CPU": int(within_s) + 1,
    }
    for name, most in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (most, most))


# ------------------------------------------------------------------------------ how it is confined


@functools.cache
def _stand_ins() -> Path:
    """Write the stand-ins for installers and test runners once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="agent-r1-stand-ins-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    scripts = {"uv": UV, "uvx": UV, "pytest": PYTEST}
    scripts |= dict.fromkeys(("apt-get", "apt", "curl", "wget", "pip", "pip3", "sudo"), STAND_IN)
    scripts["sudo"] = '#!/bin/sh\nexec "$@"\n'
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def _bubblewrap() -> list[str]:
    return [
        _bubblewrap_path(), "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc",
        "--unshare-uts", "--unshare-cgroup-try", "--uid", "0", "--gid", "0", "--cap-drop", "ALL",
        "--hostname", "task", "--die-with-parent",
    ]  # fmt: skip


def _bubblewrap_path() -> str:
    paths = bubblewrap_paths()
    if not paths:
        raise AgentR1Error(
            "a Harbor task without Docker needs bubblewrap: pip install 'agent-r1[code]'",
            code="no_sandbox",
        )
    return paths[0]


@functools.cache
def _binds() -> tuple[str, ...]:
    """Return what is seen besides the episode's own files."""
    binds = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            binds += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            binds += ["--ro-bind", f"/{name}", f"/{name}"]
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.exists(file):
            binds += ["--ro-bind", file, file]
    binds += ["--ro-bind", str(_stand_ins()), f"{OURS}/bin"]
    runner = importlib.util.find_spec("pytest")
    if runner is not None and runner.origin:
        binds += ["--ro-bind", str(Path(runner.origin).parents[1]), f"{OURS}/site"]
    if not os.path.exists("/usr/bin/python3"):
        binds += ["--ro-bind", sys.base_prefix, f"{OURS}/python"]
    return (*binds, "--proc", "/proc", "--dev", "/dev")


@functools.cache
def _seccomp() -> bytes:
    """Return the program: allow all but `REFUSED_CALLS`, and other architectures' numbers."""
    audit, numbers = call_numbers()
    refuse = instruction(GIVE, REFUSE)
    program = check_architecture(audit)
    program += [instruction(LARGER, 0x40000000, 0, 1), refuse]  # x32
    for call in REFUSED_CALLS:
        if call in numbers:
            program += [instruction(EQUAL, numbers[call], 0, 1), refuse]
    # A socket of another family than AF_UNIX, AF_INET, AF_INET6 may not be in the namespace.
    program += [
        instruction(EQUAL, numbers["socket"], 0, 5),
        instruction(LOAD, 16),
        instruction(EQUAL, 1, 3),
        instruction(EQUAL, 2, 2),
        instruction(EQUAL, 10, 1),
        refuse,
    ]
    return b"".join([*program, instruction(GIVE, ALLOW)])


PROBE = """
cat {canary} 2>/dev/null && echo read the canary
(echo spoiled > {canary}) 2>/dev/null && test "$(cat {canary})" = spoiled && echo see
(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo connected
kill -0 {parent} 2>/dev/null && echo signalled
unshare -Ur true 2>/dev/null && echo made a namespace
mount -t tmpfs none /tmp 2>/dev/null && echo mounted
touch /usr/x 2>/dev/null && echo wrote to /usr
echo end
"""


@functools.cache
def check_container() -> None:
    """Try to break out of a container once in a process.

    Raises AgentR1Error if commands cannot run, or if an attempt succeeds.
    """
    container = Container()
    with (
        tempfile.NamedTemporaryFile("w", suffix=".canary", dir="/var/tmp") as canary,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        canary.write("sings\n")
        canary.flush()
        port = server.getsockname()[1]
        try:
            result = container.run(
                PROBE.format(canary=canary.name, port=port, parent=os.getpid()), 20.0
            )
            canary_changed = Path(canary.name).read_text() != "sings\n"
        finally:
            container.remove()
    lines = [line for line in result.output.split("\n") if line and line != "see"]
    if canary_changed or lines != ["end"]:
        raise AgentR1Error(
            f"a Harbor task is refused, because nothing here confines it: {' '.join(lines)[:200]}",
            code="no_sandbox",
        )
