"""Measure the CPU seconds of each test file, and compare them with a budget.

A plugin of pytest (conftest.py loads it), active with `--cpu-budget FILE`, as in `make test`. In:
the CPU seconds that each test file may take (`tests/cpu_budget.json`). Out: a table at the end of
the session. The seconds of child processes count. The session fails if the whole took more than one
and a half of its budget. It also fails if a test was skipped because a package is missing.

Wall time says little on a machine that runs something else, too. CPU seconds hardly change.
"""

from __future__ import annotations

import json
import os
import re
import resource
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

TOLERANCE = 1.5
"""The whole may take so many times its budget."""
REFERENCE = "reference work"
"""Row with the CPU seconds of `do_reference_work` on the machine of the budget. A slower machine
may take as many times longer: machines differ by two times."""
SAMPLE_S = 0.5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OWN, WAITED, SEEN = "own", "waited", "seen"
MISSING = re.compile("not installed|could not import|No module named")
"""In the reason of a skip: the environment is not the one of `make install`."""


class Process(NamedTuple):
    """A process of `/proc`. Ids are used again, so its start time belongs to its name."""

    pid: int
    started: int


def read_processes() -> dict[Process, tuple[int, float]]:
    """Read each process of this machine: its parent's id, and its own CPU seconds so far."""
    processes = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is a name, which may have blanks, in parentheses.
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        parent, started = int(fields[1]), int(fields[19])
        ticks = int(fields[11]) + int(fields[12])
        processes[Process(int(file.parent.name), started)] = (parent, ticks / TICKS_PER_S)
    return processes


def do_reference_work() -> float:
    """Return the CPU seconds of a fixed computation in Python, the least of three."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        sum(number * number % 7 for number in range(1_000_000))
        seconds.append(time.process_time() - begin)
    return min(seconds)


class ChildSampler(threading.Thread):
    """Add up the CPU seconds of all descendants of this process.

    `getrusage` has only the children that somebody has waited for. Ray waits for none of its
    workers, and those are the dearest processes here.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.seconds: dict[Process, float] = {}
        """What each descendant had used when it was last seen, also if its parent has ended."""
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.look()

    def look(self) -> float:
        """Look once; return the seconds of all descendants so far."""
        with self.lock:
            processes = read_processes()
            family = {os.getpid()} | {p.pid for p in processes if p in self.seconds}
            # A child is younger than its parent, so one pass in that order finds grandchildren.
            for process in sorted(processes, key=lambda process: process.started):
                parent, seconds = processes[process]
                if parent in family or process in self.seconds:
                    family.add(process.pid)
                    self.seconds[process] = seconds
            return sum(self.seconds.values())


class CpuMeter:
    """Charge CPU seconds to rows: test files, and fixtures that a session makes once."""

    def __init__(self):
        self.sampler = ChildSampler()
        self.sampler.start()
        self.rows: dict[str, Counter[str]] = {}
        self.row = "collection"
        self.last = dict.fromkeys((OWN, WAITED, SEEN), 0.0)

    def clocks(self) -> dict[str, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        waited = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            OWN: own.ru_utime + own.ru_stime,
            WAITED: waited.ru_utime + waited.ru_stime,
            SEEN: self.sampler.look(),
        }

    def switch(self, row: str) -> None:
        """Charge what was used since the last call to the current row."""
        if row == self.row:  # the clocks cost some milliseconds
            return
        now = self.clocks()
        used = self.rows.setdefault(self.row, Counter())
        for clock, seconds in now.items():
            used[clock] += seconds - self.last[clock]
        self.last = now
        self.row = row

    def seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each row.

        A child of less than `SAMPLE_S` is only among those waited for, and a child of Ray only
        among those seen: the larger sum counts.
        """
        return {row: used[OWN] + max(used[WAITED], used[SEEN]) for row, used in self.rows.items()}

    def pytest_runtest_logstart(self, nodeid):
        self.switch(nodeid.partition("::")[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Give what a session makes once a row of its own.

        Chance decides which file asks for it first.
        """
        if fixturedef.scope != "session":
            return (yield)
        before = self.row
        self.switch(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.switch(before)

    def pytest_sessionfinish(self, session):
        self.switch("end")
        self.sampler.ended.set()
        if hasattr(session.config, "workeroutput"):  # of xdist
            session.config.workeroutput["cpu_seconds"] = self.seconds()
        else:
            session.config.pluginmanager.get_plugin("cpu_report").used.update(self.seconds())


class CpuReport:
    """Collect what the processes of a session have measured, and judge it at the end.

    The budget has the CPU seconds that a file, or a fixture, may take.
    """

    def __init__(self, file: Path):
        self.file = file
        self.budget: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
        reference = self.budget.pop(REFERENCE, None)
        self.slowness = max(1.0, do_reference_work() / reference) if reference else 1.0
        self.used: Counter[str] = Counter()
        self.missing: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.used.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_runtest_logreport(self, report):
        self.note_skip(report)

    def pytest_collectreport(self, report):
        self.note_skip(report)

    def note_skip(self, report) -> None:
        if report.skipped and MISSING.search(str(report.longrepr)):
            self.missing.append(report.nodeid)

    @property
    def limit(self) -> float:
        return TOLERANCE * self.slowness * sum(self.budget.values())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        """Fail the session. The controller has all reports; a worker of xdist judges nothing."""
        if "PYTEST_XDIST_WORKER" in os.environ or session.exitstatus != pytest.ExitCode.OK:
            return
        if self.missing or (self.budget and sum(self.used.values()) > self.limit):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter, config):
        if config.getoption("--write-cpu-budget"):
            self.write()
        line = terminalreporter.write_line
        terminalreporter.section(f"CPU seconds, and the budget of {self.file.name}")
        for row, seconds in sorted(self.used.items(), key=lambda item: -item[1]):
            if seconds >= 1 or row in self.budget:
                line(f"{seconds:8.1f} {self.budget.get(row, 0):8.1f}  {row}")
        total = sum(self.used.values())
        line(
            f"{total:8.1f} {sum(self.budget.values()):8.1f}  all, and it fails at {self.limit:.0f}"
        )
        if self.budget and total > self.limit:
            line("FAILED: the tests took too much CPU time; `make long` is for what takes minutes")
        for nodeid in self.missing:
            line(f"FAILED: {nodeid} was skipped, because a package is missing: make install")

    def write(self) -> None:
        """Write the budget anew: what each row has used, and a tenth more."""
        rows = {row: round(1.1 * used, 1) for row, used in self.used.items() if used >= 1}
        self.budget = dict(sorted(rows.items()))
        rows = {REFERENCE: round(do_reference_work(), 4)} | self.budget
        self.file.write_text(json.dumps(rows, indent=1) + "\n")


def pytest_addoption(parser):
    group = parser.getgroup("CPU seconds")
    group.addoption(
        "--cpu-budget",
        type=Path,
        metavar="FILE",
        help="measure CPU seconds, compare them with this file, and fail if a package is missing",
    )
    group.addoption(
        "--write-cpu-budget", action="store_true", help="write that file anew, with a tenth more"
    )


def pytest_configure(config):
    file = config.getoption("--cpu-budget")
    if file is None:
        return
    config.pluginmanager.register(CpuReport(file), "cpu_report")
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.register(CpuMeter(), "cpu_meter")
