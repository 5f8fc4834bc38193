"""Run a task's commands in a folder, confined by bubblewrap, where there is no Docker.

In: a folder, which is the root of the episode's file system. Out: what a command printed, and how
it ended. Next: `env.py` plays a task in it. `docker.py` is the other engine.

    recipes/code   starts, limits and ends processes: `confine.py`, `watch.py`, `seccomp.py`
    here           the profile of a shell: this machine's /usr, read-only, and the folder as /

This process only makes the folder, copies the built one, counts it and deletes it. It opens no file
of it: a path of the agent or of a Dockerfile is followed inside alone. All processes of a command
end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, say
from agent_r1_recipes.code.confine import (
    STRANGER,
    Ran,
    bubblewrap_paths,
    canary,
    converse,
    end,
    make_users,
    namespaces,
    namespaces_of_root,
    start,
)
from agent_r1_recipes.code.seccomp import shell_filter
from agent_r1_recipes.code.watch import MEMORY, PROCESSES, Watch, fits, list_gaps
from agent_r1_recipes.harbor.dockerfile import END, Build

FILE_SIZE = 64 << 20
SHARED_MEMORY = 64 << 20
"""Bytes of /dev/shm."""
MAX_OUTPUT = 64 << 10
"""Bytes of output that are kept; the command goes on if it prints more."""
MOST_OUTPUT = 16 << 20
"""Bytes of output after which it is ended."""
SHELL_S = 60
"""Seconds of CPU of the shell that answers, and of each program that it starts."""
MAX_COMMAND = 100_000
"""Bytes of a command. Linux passes at most 128 KB."""
OURS = "/agent-r1"
"""Where our Python, its packages, the stand-ins and what is given to a command are inside."""
INPUTS = f"{OURS}/given"
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
MOUNT_POINTS = (*SYSTEM_FOLDERS, "proc", "dev", OURS.lstrip("/"))
"""Folders directly below the root, because bubblewrap follows links on the way to a mount point.
The agent can rename /opt and put a link there, but not a folder in which something is mounted."""
READ_ONLY_PROC = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""Parts of /proc that belong to the machine. They are for root, who is root inside where
`confine.make_users` fails."""
PATH = f"{OURS}/bin:{OURS}/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
VARIABLES = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
LIMITS = (
    f"ulimit -c 0 -n 256 -f {FILE_SIZE >> 10} -v {MEMORY >> 10} -u {PROCESSES} -t $1 || exit 125\n"
    "cd -- \"$2\" 2>/dev/null || cd /\nshift 2\n"
)  # fmt: skip
"""Runs before anything of a task does, without its variables. The number of processes is limited in
the new user namespace, so those of the user outside do not count."""
COMMAND = LIMITS + 'command=$1\nshift\nexport -- "$@"\nexec /bin/bash -c "$command" </dev/null\n'
"""Of the agent: with the variables of its task, which may change how a shell starts."""
OURS_ALONE = (
    LIMITS
    + "".join(f"export {name}={value}\n" for name, value in VARIABLES.items())
    + f"export PATH={PATH}\n"
)
"""Begins a script of ours.

It does not get the variables of the task, which could replace its programs.
"""
SERVE = """
answer() (
  cd -- "${words[0]}" 2>/dev/null || cd /
  set -- "${words[@]:1}"
  script=$1
  shift
  eval "$script"
)
while IFS= read -r -d '' mark && IFS= read -r -d '' count && IFS= read -r -d '' size; do
  words=()
  while [ ${#words[@]} -lt $count ]; do
    IFS= read -r -d '' word || exit 1
    words+=("$word")
  done
  if [ $size = 0 ]; then answer </dev/null; else answer; fi 2>&1
  code=$?
  printf '\\0%s %s\\n' "$mark" $code
  [ $code = 0 ] || [ $size = 0 ] || exit # what is left of the text is no request
done
"""
"""A shell that answers one script after another, so that reading a file starts no new sandbox. In:
a mark, the number of words, bytes of text, the words (directory, script, arguments), each with a
zero byte, and the text. Out: the output; then a zero byte, the mark, and a line with the exit code.

The mark is random, and no program of a task sees it, so no file can contain it. Nothing else is
started around a script, because each process takes about a millisecond.
"""
STAND_IN = """#!/bin/sh
# Stands in for an installer: what it would install was checked before.
exit 0
"""
FETCH = """#!/bin/sh
# uv's installer does nothing, because uv has a stand-in. Other addresses are those of the task.
case "$*" in *astral.sh/uv*) exit 0 ;; esac
exec "/usr/bin/${0##*/}" "$@"
"""
UV = f"""#!/bin/sh
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
exec {OURS}/bin/pytest "$@"
"""
PYTEST = f"""#!/bin/sh
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
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH={OURS}/site
exec python3 -m pytest -p no:cacheprovider "$@"
"""
"""`--ctrf FILE` needs a plugin; the reward does not depend on it."""


class Container:
    """The file system of one episode, or of a built task."""

    def __init__(self, built: Container | None = None) -> None:
        """Make an empty container, or a copy of a built one."""
        self.root = Path(tempfile.mkdtemp(prefix="agent-r1-harbor-"))
        self.directory = "/"
        self.variables: dict[str, str] = {"PATH": PATH}
        self._given: Path | None = None
        """A folder of this machine that later commands see, read-only, as `INPUTS`."""
        self._shell: subprocess.Popen[bytes] | None = None
        self.users = make_users()
        """Descriptor of its user namespace; None: commands run as this user."""
        if built:
            self.directory = built.directory
            self.variables = built.variables
            _copy("-a", built.root, self.root)  # with its owner
            self._start_shell()  # now, so that it is ready when the agent asks
            return
        folders = ("root/.local/bin", "tmp", "etc", "logs/verifier", "home", "opt", "var/tmp")
        for name in (*folders, *MOUNT_POINTS):
            (self.root / name).mkdir(parents=True)
        (self.root / "root/.local/bin/env").write_text("# uv's environment; ours is on the PATH\n")
        (self.root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
        (self.root / "etc/group").write_text("root:x:0:\n")
        for name in ("ld.so.cache", "alternatives"):
            (self.root / "etc" / name).symlink_to(f"{OURS}/{name}")
        if self.users is not None:
            _hand_over(self.root)

    def build(self, build: Build, context: Path, within_s: float) -> None:
        """Run the script of a Dockerfile. Raises AgentR1Error if a step fails."""
        self._given = _readable_copy(context, self.users is not None)
        for first in range(0, len(build.left_out), 100):
            paths = [str(self._given / path) for path in build.left_out[first : first + 100]]
            _host("rm", "-d", "--", *paths)  # a folder stays if something in it does
        try:
            result = self.call(build.script, within_s=within_s, keep=MOST_OUTPUT, directory="/")
        finally:
            _host("rm", "-rf", "--", str(self._given))
            self._given = None
        _, marker, state = result.output.rpartition(END)
        if not fits(self.root):
            raise AgentR1Error("the build wrote too much", code="build_failed")
        if result.code != 0 or not marker:
            *_, number, last = ["", "", *result.output.split("\0")]
            step = build.steps[int(number)] if number.isdecimal() else "the start"
            lines = last.strip().splitlines() or [str(result.ended or f"exit code {result.code}")]
            raise AgentR1Error(f"{step}: {lines[-1][:200]}", code="build_failed")
        directory, path, *values = state.split("\0")
        self.directory = directory
        self.variables = dict(zip(build.variables, values, strict=False))
        ours = [place for place in PATH.split(":") if place not in path.split(":")]
        self.variables["PATH"] = ":".join([path, *ours])

    def run(self, command: str, within_s: float) -> Ran:
        """Run a command of a task in bash, in its directory, with its variables."""
        refusal = refuse_command(command)
        if refusal:
            return refusal
        variables = VARIABLES | self.variables
        words = [command, *(f"{name}={value}" for name, value in variables.items())]
        return self._start(COMMAND, words, b"", within_s, MAX_OUTPUT, self.directory)

    def call(
        self,
        script: str,
        *words: str,
        text: bytes = b"",
        within_s: float = 20.0,
        keep: int = MAX_OUTPUT,
        directory: str | None = None,
    ) -> Ran:
        """Run a script of ours: `words` are its arguments, `text` is its input."""
        place = self.directory if directory is None else directory
        return self._start(OURS_ALONE + script, list(words), text, within_s, keep, place)

    def ask(
        self, script: str, *words: str, text: bytes = b"", within_s: float = 20.0,
        keep: int = MAX_OUTPUT,
    ) -> Ran:  # fmt: skip
        """Run a short script of ours in a shell that waits for the next one.

        No program of a task runs in that shell. Where a task changed what the loader of programs
        reads, each script gets a sandbox of its own, which ends all that it started.
        """
        shell = self._start_shell()
        if shell is None:
            return self.call(script, *words, text=text, within_s=within_s, keep=keep)
        mark = secrets.token_hex(16)
        fields = [mark, str(2 + len(words)), str(len(text)), self.directory, script, *words]
        request = "".join(f"{word}\0" for word in fields).encode("utf-8", "replace") + text
        end_mark = f"\0{mark} "
        result = self._converse(shell, request, within_s, MOST_OUTPUT, end_mark.encode())
        output, found, code = result.output.rpartition(end_mark)
        if result.ended or not found:
            self._end_shell()
            return Ran("", None, result.ended or "time")
        if text and code != "0\n":  # it ends itself, see `SERVE`
            self._end_shell()
        return Ran(output[:keep], int(code))

    def for_tests(self, tests: Path) -> Container:
        """Return the container in which the tests run: this one, with the folder as `INPUTS`."""
        self._given = _copy_of_tests(tests, self.users is not None)
        return self

    def fits(self) -> bool:
        """Return whether the files are within the limit."""
        return fits(self.root)

    def end_processes(self) -> None:
        """Do nothing, because all processes of a command end with it."""

    def remove(self) -> None:
        """Delete everything. Nothing runs in it any more."""
        self._end_shell()
        if self.users is not None:
            os.close(self.users)
            self.users = None
        _host("rm", "-rf", "--", str(self.root))
        if self.root.exists():  # a user may have taken the right to list a folder away
            _host("chmod", "-R", "u+rwX", "--", str(self.root))
            _host("rm", "-rf", "--", str(self.root))

    def _start(
        self, script: str, words: list[str], text: bytes, within_s: float, keep: int, place: str
    ) -> Ran:
        if not self._is_whole():
            return Ran("the container is broken: a folder of the system was replaced", 125)
        process = self._popen(script, [str(int(within_s) + 1), place, *words])
        try:
            return self._converse(process, text, within_s, keep)
        finally:
            end(process)

    def _popen(self, script: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Start a shell in a sandbox of its own."""
        options = ["--bind", str(self.root), "/", *_binds()]
        if self._given:
            options += ["--ro-bind", str(self._given), INPUTS]
        begin, change = namespaces(_bubblewrap(), 0, "task"), []
        if self.users is not None:
            begin, change = namespaces_of_root(_bubblewrap(), self.users, "task")
        with _filter_file() as filter_file:
            seccomp = filter_file.fileno()
            return start(
                [*begin, *options, "--seccomp", str(seccomp), "--chdir", "/", "--",
                 *change, "/bin/bash", "-c", script, "bash", *arguments],
                {}, (seccomp,) if self.users is None else (seccomp, self.users),
            )  # fmt: skip

    def _converse(
        self, process: subprocess.Popen[bytes], text: bytes, within_s: float, keep: int,
        mark: bytes = b"",
    ) -> Ran:  # fmt: skip
        watch = Watch(process.pid, self.root)
        until = time.monotonic() + within_s
        return converse(process, text, until, keep, MOST_OUTPUT, watch, mark)

    def _start_shell(self) -> subprocess.Popen[bytes] | None:
        """Return the shell of `ask`; None where programs of the task would run in it."""
        if not self._has_our_loader():
            self._end_shell()
        elif self._shell is None or self._shell.poll() is not None:
            self._end_shell()
            self._shell = self._popen(OURS_ALONE + SERVE, [str(SHELL_S), "/"])
        return self._shell

    def _end_shell(self) -> None:
        if self._shell is not None:
            end(self._shell)
            self._shell = None

    def _has_our_loader(self) -> bool:
        """Return whether programs inside load libraries of this machine's /usr alone.

        No program of the task runs meanwhile, so none can change that at the same time.
        """
        etc = self.root / "etc"
        with contextlib.suppress(OSError):
            if not self._is_whole() or not stat.S_ISDIR(os.lstat(etc).st_mode):
                return False
            with os.scandir(etc) as entries:  # as ld.so.preload, or ld-musl-x86_64.path
                names = {entry.name for entry in entries if entry.name.startswith("ld")}
            cache = os.readlink(etc / "ld.so.cache")
            return names == {"ld.so.cache"} and cache == f"{OURS}/ld.so.cache"
        return False

    def _is_whole(self) -> bool:
        """Return whether each mount point is a folder still, and no link."""
        with contextlib.suppress(OSError):
            return all(stat.S_ISDIR(os.lstat(self.root / name).st_mode) for name in MOUNT_POINTS)
        return False


def refuse_command(command: str) -> Ran | None:
    """Return the result of a command that cannot be passed on, or None."""
    if "\0" in command or len(command.encode("utf-8", "replace")) > MAX_COMMAND:
        return Ran(f"a command has at most {MAX_COMMAND} bytes, none of them zero", 126)
    return None


def _host(program: str, *words: str) -> str:
    """Run a program of this machine on a folder in which nothing runs. Return its complaint."""
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    result = subprocess.run(
        [program, *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        check=False,
    )  # fmt: skip
    return result.stderr.decode(errors="replace") if result.returncode else ""


def _copy(options: str, source: Path, target: Path) -> None:
    complaint = _host("cp", options, "--", f"{source}/.", str(target))
    if complaint:
        raise AgentR1Error(
            f"an episode's files cannot be copied: {complaint.splitlines()[0]}", code="cannot_write"
        )


def _hand_over(folder: Path) -> None:
    """Give a folder to the user of the sandbox."""
    _host("chown", "-hR", f"{STRANGER}:{STRANGER}", "--", str(folder))


def _readable_copy(folder: Path, for_stranger: bool) -> Path:
    """Copy a folder for the user of the sandbox, who may not read the original."""
    copy = Path(tempfile.mkdtemp(prefix="agent-r1-given-"))
    _copy("-dR", folder, copy)
    if for_stranger:
        _hand_over(copy)
    return copy


@functools.cache
def _copy_of_tests(folder: Path, for_stranger: bool) -> Path:
    """Copy the tests once in a process: no episode can write to them."""
    copy = _readable_copy(folder, for_stranger)
    atexit.register(_host, "rm", "-rf", "--", str(copy))
    return copy


# ------------------------------------------------------------------------------ how it is confined


def _filter_file() -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(shell_filter())
    file.seek(0)
    return file


@functools.cache
def _bubblewrap() -> str:
    paths = bubblewrap_paths()
    if not paths:
        raise AgentR1Error(
            "a Harbor task without Docker needs bubblewrap: pip install 'agent-r1[code]'",
            code="no_sandbox",
        )
    return paths[0]


@functools.cache
def _stand_ins() -> Path:
    """Write the stand-ins for installers and test runners, and the mount points below `OURS`."""
    folder = Path(tempfile.mkdtemp(prefix="agent-r1-stand-ins-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("bin", "site", "python", "given", "alternatives"):
        (folder / name).mkdir()
    scripts = {"uv": UV, "uvx": UV, "pytest": PYTEST, "curl": FETCH, "wget": FETCH}
    scripts |= dict.fromkeys(("apt-get", "apt", "pip", "pip3"), STAND_IN)
    scripts["sudo"] = '#!/bin/sh\nexec "$@"\n'
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    if os.path.exists("/etc/ld.so.cache"):
        shutil.copy("/etc/ld.so.cache", folder)
    return folder


@functools.cache
def _binds() -> tuple[str, ...]:
    """Return what is seen besides the episode's own files. Nothing of it can be written to.

    Bubblewrap gives /dev no size, so it becomes read-only; its /dev/shm has one.
    """
    binds: list[str] = []
    for name in SYSTEM_FOLDERS:
        if os.path.isdir(f"/{name}"):
            binds += ["--ro-bind", f"/{name}", f"/{name}"]
    binds += ["--ro-bind", str(_stand_ins()), OURS]
    if os.path.isdir("/etc/alternatives"):
        binds += ["--ro-bind", "/etc/alternatives", f"{OURS}/alternatives"]
    runner = importlib.util.find_spec("pytest")
    if runner is not None and runner.origin:
        binds += ["--ro-bind", str(Path(runner.origin).parents[1]), f"{OURS}/site"]
    if not os.path.exists("/usr/bin/python3"):
        binds += ["--ro-bind", sys.base_prefix, f"{OURS}/python"]
    binds += ["--proc", "/proc", "--dev", "/dev"]
    for name in READ_ONLY_PROC:
        if os.path.exists(f"/proc/{name}"):
            binds += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    memory = ["--perms", "1777", "--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm"]
    return (*binds, *memory, "--remount-ro", "/dev")


PROBE = """
cat "$1" 2>/dev/null && echo read the canary
(echo spoiled > "$1") 2>/dev/null && test "$(cat "$1")" = spoiled && rm -f "$1"
(exec 3<>"/dev/tcp/127.0.0.1/$2") 2>/dev/null && echo connected
kill -0 "$3" 2>/dev/null && echo signalled
unshare -Ur true 2>/dev/null && echo made a namespace
mount -t tmpfs none /tmp 2>/dev/null && echo mounted
touch /usr/x 2>/dev/null && echo wrote to /usr
touch /dev/x 2>/dev/null && echo wrote to /dev
for file in /proc/sys/kernel/core_pattern /proc/sys/vm/swappiness /proc/sysrq-trigger; do
  [ -w $file ] && echo may write to $file
done
[ $(( $(stat -f -c '%b * %S' /dev/shm) )) -le "$4" ] || echo has too much memory
echo end
"""


@functools.cache
def check_container() -> None:
    """Try once in a process to break out, and say what is not bounded here.

    Raises AgentR1Error if commands cannot run, or if an attempt succeeds.
    """
    container = Container()
    same_root = os.geteuid() == 0 and container.users is None
    try:
        with canary() as (file, port):
            own_process = str(os.getpid())
            result = container.call(PROBE, file, str(port), own_process, str(SHARED_MEMORY))
    finally:
        container.remove()
    if result.output != "end\n":
        lines = " ".join(result.output.split())
        raise AgentR1Error(
            f"a Harbor task is refused, because nothing here confines it: {lines[:200]}",
            code="no_sandbox",
        )
    missing = [*list_gaps(), "memory of the kernel, such as buffers of pipes"]
    if same_root:
        missing.insert(0, "processes between two looks, because root is root inside, too")
    say(
        "Harbor tasks run in bubblewrap and seccomp, without Docker; not bounded here: "
        f"{'; '.join(missing)}",
        sys.stderr,
    )
