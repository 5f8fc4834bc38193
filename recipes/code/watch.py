"""Bound what a confined command uses and the kernel does not limit.

In: the process of bubblewrap, and the folder that the command writes to. Out: the limit that is
exceeded, or None. Next: `confine.converse` asks about every 50 ms and ends the command.

The kernel limits each process (address space, size of a file). It limits a number of processes for
ordinary users only, not for root, and it has no limit for a folder. Without a control group, which
needs rights that a user may lack, someone has to look. A command may exceed a limit between two
looks.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from agent_r1_recipes.code.confine import Limit

PROCESSES = 256
"""Processes and threads of a command."""
MEMORY = 2 << 30
"""Bytes of memory of all processes of a command, and of the address space of each."""
FOLDER_SIZE = 256 << 20
"""Bytes of all files of a folder.

Each file counts as 4 KB at least, so a million empty ones do not fit.
"""
RESERVE = 256 << 20
"""Bytes of memory and of disk that are left to the machine.

They cover what is not counted, such as buffers of pipes.
"""
SHARE_OF_TIME = 0.05
"""Most of a command's time that counting its files takes."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Look at the processes of a command and at the files of its folder."""

    def __init__(self, process: int, folder: Path):
        self._process = process
        self._folder = folder
        self._used = _disk(folder)[0]
        self._next_count = time.monotonic() + 1

    def __call__(self) -> Limit | None:
        """Name the limit that is exceeded."""
        processes = descendants(self._process)
        threads = 0
        memory = 0
        for process in processes:
            with contextlib.suppress(OSError, ValueError):
                threads += len(os.listdir(f"/proc/{process}/task"))
                memory += _memory(process)
        if threads > PROCESSES:
            return "processes"
        available = _available_memory()
        if memory > MEMORY or (available is not None and available < RESERVE):
            return "memory"
        usage, free = _disk(self._folder)
        if free < RESERVE:
            return "size"
        # The file system says cheaply that something was written; only then files are counted.
        if usage > self._used + FOLDER_SIZE // 8 or time.monotonic() > self._next_count:
            start = time.monotonic()
            if not fits(self._folder, _size_of_deleted(processes)):
                return "size"
            end = time.monotonic()
            self._next_count = end + max(1, (end - start) / SHARE_OF_TIME)
            self._used = usage
        return None


def list_gaps() -> list[str]:
    """Say what a watch cannot bound on this machine."""
    missing = []
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        missing.append("the number of processes and their memory (/proc has no list of children)")
    if _available_memory() is None:
        missing.append("memory of the kernel (/proc/meminfo has no MemAvailable)")
    return missing


def descendants(process: int) -> list[int]:
    """List a process and all that came from it. Too many are cut off, because they are an error."""
    processes = [process]
    for parent in processes:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                processes += map(int, children.split())
        if len(processes) > 2 * PROCESSES:
            break
    return processes


def fits(folder: Path, more: int = 0) -> bool:
    """Return whether the files of a folder, and `more` bytes, are within `FOLDER_SIZE`.

    What cannot be listed does not fit: files below such a folder would not be counted. Links are
    not followed.
    """
    total = more
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    facts = entry.stat(follow_symlinks=False)
                    total += max(512 * facts.st_blocks, 4096)
                    if total > FOLDER_SIZE:
                        return False
                    if stat.S_ISDIR(facts.st_mode):
                        folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            continue
        except OSError:  # no right to list it, or a path that is too long
            return False
    return True


def _size_of_deleted(processes: list[int]) -> int:
    """Count the bytes of deleted files that processes keep open."""
    sizes: dict[tuple[int, int], int] = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"/proc/{process}/fd/{name}")
                    if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                        sizes[facts.st_dev, facts.st_ino] = 512 * facts.st_blocks
    return sum(sizes.values())


def _memory(process: int) -> int:
    """Return the bytes of a process that are not of a file."""
    _, resident, shared_pages, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return PAGE * (int(resident) - int(shared_pages))


def _available_memory() -> int | None:
    with contextlib.suppress(OSError), open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _disk(folder: Path) -> tuple[int, int]:
    """Return the used and the free bytes of the folder's file system."""
    facts = os.statvfs(folder)
    unit = facts.f_frsize
    return (facts.f_blocks - facts.f_bfree) * unit, facts.f_bavail * unit
