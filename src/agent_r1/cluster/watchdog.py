"""Decide whether a run on verl still lives, by its workers and their progress.

In: the processes of the run on this machine, and what they report. Out: a sentence that ends the
run (`launch.watch`). A worker that is gone ends it after seconds. Silence of living workers is a
weaker sign, because an episode, a validation or a checkpoint may take minutes: it ends the run
after `verl.stall_timeout_s`.

The workers import this module, so it imports neither Ray nor torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

from agent_r1.ground.files import write_whole

RUN_VARIABLE = "AGENT_R1_VERL_RUN"
"""Set in the environment of every process of a run; all descendants inherit it."""
PROGRESS_VARIABLE = "AGENT_R1_VERL_PROGRESS"
"""The folder in which the processes of a run report their progress."""
WORKERS = {
    "VLLM::": "a process of the vLLM server",
    "ray::vLLMHttpServer": "a vLLM server",
    "ray::WorkerDict": "a training worker",
    "ray::AgentLoopWorker": "a worker that runs episodes",
    "ray::SimpleStorageUnit": "a storage of the TransferQueue",
    "ray::TransferQueueController": "the TransferQueue's controller",
}
"""Beginnings of the titles of processes that live as long as the run, and what they are.

Ray and vLLM set the titles. Other processes of Ray come and go."""
ERROR_WAIT_S = 10.0
"""The trainer's own error says more than the launcher's, and often comes seconds after a death."""
REPORT_S = 1.0
"""A process writes its progress at most so often."""
ENDED = "ended.json"
"""A file in `verl/`: the training is over, well or not, and the workers named in it may end."""
LESS_MEMORY = (
    "take a machine with more (--dry-run says how much), or use less: verl.offload=false, one "
    "service (search.url)"
)


# --------------------------------------------------------------------------- what the processes say

_counts: Counter[str] = Counter()
_last_report = -REPORT_S


def report(unit: str, count: int = 1) -> None:
    """Count work that this process has done, where the launcher sees it.

    Outside of a run nothing happens. A full disk is no reason to end an episode.
    """
    global _last_report
    folder = os.environ.get(PROGRESS_VARIABLE)
    if folder is None:
        return
    _counts[unit] += count
    now = time.monotonic()
    if now - _last_report < REPORT_S:
        return
    _last_report = now
    # Processes of several machines report into one folder.
    path = Path(folder) / f"{socket.gethostname()}-{os.getpid()}.json"
    with suppress(OSError):
        write_whole(path, json.dumps(_counts))


def read_progress(folder: Path) -> dict[str, str]:
    """Read what each process has reported, by its file."""
    reports = {}
    for path in folder.glob("*.json"):
        with suppress(OSError):  # replaced meanwhile
            reports[path.name] = path.read_text()
    return reports


def size_of(folder: Path) -> int:
    """Return the bytes of all files below `folder`: a checkpoint of minutes grows."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # renamed or removed meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total


# -------------------------------------------------------------------------------- which ones live


def run_processes(mark: str) -> list[int]:
    """List the living processes with `mark` in their environment."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if has_mark(path, mark)]


def has_mark(process: Path, mark: str) -> bool:
    """Say whether a folder of /proc is a living process of this run."""
    variable = f"{RUN_VARIABLE}={mark}".encode()
    try:
        # A zombie has an empty environment, so it is not counted.
        return variable in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or another user's
        return False


def find_workers(mark: str) -> dict[int, str]:
    """Find the run's processes that live as long as the run: process id to title."""
    workers = {}
    for pid in run_processes(mark):
        with suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().strip()
            if title.startswith(tuple(WORKERS)):
                workers[pid] = title
    return workers


def note_end(folder: Path) -> None:
    """Note the end of training, and the workers that live then."""
    end = {"host": socket.gethostname(), "workers": find_workers(os.environ[RUN_VARIABLE])}
    write_whole(folder / ENDED, json.dumps(end))


def living_workers(folder: Path, mark: str) -> dict[int, str]:
    """Return the workers that live or that ended with the training: process id to title."""
    workers = find_workers(mark)
    if (folder / ENDED).exists():
        end = json.loads((folder / ENDED).read_text())
        if end["host"] == socket.gethostname():
            workers |= {int(pid): title for pid, title in end["workers"].items()}
    return workers


class Watchdog:
    """Judge a run by its workers and its progress. The caller has the clock.

    Attributes:
        workers: All workers that were seen, process id to title.
        gone: Those of them that have ended, in the order in which that was noticed.
        moved_at: Seconds of the clock at which something moved last.
    """

    def __init__(self, stall_timeout_s: float, now: float):
        self.stall_timeout_s = stall_timeout_s
        self.workers: dict[int, str] = {}
        self.gone: list[int] = []
        self.progress: Hashable = None
        self.moved_at = now
        self.died_at = now

    def look(self, now: float, workers: dict[int, str], progress: Hashable) -> None:
        """Take in what there is at `now` seconds.

        A worker that appears is progress, too: a large model takes minutes to load.
        """
        if progress != self.progress or workers.keys() - self.workers.keys():
            self.progress = progress
            self.moved_at = now
        self.workers = workers | self.workers
        gone = self.workers.keys() - workers.keys() - set(self.gone)
        if gone and not self.gone:
            self.died_at = now
        self.gone += sorted(gone)

    def has_lost_a_worker(self, now: float) -> bool:
        """Return whether a worker is gone, and the trainer had its time to report."""
        return bool(self.gone) and now - self.died_at >= ERROR_WAIT_S

    def is_stalled(self, now: float) -> bool:
        return now - self.moved_at > self.stall_timeout_s

    def describe_loss(self) -> str:
        """Name the worker that was gone first, by the title that `ps` shows."""
        pid = self.gone[0]
        title = self.workers[pid]
        kind = next(kind for beginning, kind in WORKERS.items() if title.startswith(beginning))
        name = title.removeprefix("ray::").partition(".")[0]
        return f"{kind} ({name}, process {pid})"
