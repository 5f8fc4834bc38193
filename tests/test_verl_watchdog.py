"""When a run on verl is over: by a clock that the test turns, and once by real processes.

The times are those of real runs: steps of five seconds, checkpoints and validations of minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.cluster import watchdog
from agent_r1.cluster.watchdog import ERROR_WAIT_S, RUN_VARIABLE, Watchdog, find_workers

STALL_S = 600
WORKERS = {
    11: "ray::WorkerDict.actor_rollout_update_actor",
    12: "ray::vLLMHttpServer",
    13: "VLLM::EngineCore",
}


class Run:
    """A run whose clock the test turns, as the launcher sees it."""

    def __init__(self):
        self.now = 0.0
        self.watchdog = Watchdog(STALL_S, self.now)
        self.workers = dict(WORKERS)
        self.progress = 0

    def go_on(self, seconds: int, progress_every: int | None = None) -> None:
        """Let time pass, with a look each second."""
        for second in range(1, seconds + 1):
            self.now += 1
            if progress_every and second % progress_every == 0:
                self.progress += 1
            self.watchdog.look(self.now, self.workers, self.progress)
            assert not self.ends, f"ended after {self.now} s"

    @property
    def ends(self) -> bool:
        return self.watchdog.has_lost_a_worker(self.now) or self.watchdog.is_stalled(self.now)


def test_what_takes_long_and_moves_does_not_end_a_run():
    run = Run()
    run.go_on(590)  # the start: nothing is seen before the first phase
    run.progress = "first weight sync"
    run.go_on(5)
    run.progress = 0
    run.go_on(2 * 3600, progress_every=595)  # a validation of two hours: an episode in ten minutes
    run.go_on(100, progress_every=5)  # steps of five seconds
    run.go_on(300)  # and a first checkpoint of five minutes
    run.go_on(100, progress_every=5)
    run.go_on(STALL_S)  # an episode as long as its limit, which is below the stall's
    assert not run.ends


def test_a_slow_start_is_seen_by_its_processes():
    run = Run()
    run.workers = {}
    for pid, title in WORKERS.items():
        run.go_on(500)
        run.workers[pid] = title
    run.go_on(STALL_S)
    assert not run.ends
    assert run.now > STALL_S * 2  # far longer than the limit: each new process counted as progress


def test_silence_of_living_workers_ends_a_run_after_its_limit_and_not_before():
    run = Run()
    run.go_on(50, progress_every=5)
    run.go_on(STALL_S)
    run.now += 1
    run.watchdog.look(run.now, run.workers, run.progress)
    assert run.watchdog.is_stalled(run.now) and not run.watchdog.has_lost_a_worker(run.now)


@pytest.mark.parametrize("pid", WORKERS)
@pytest.mark.parametrize("progress_every", [None, 1])
def test_a_worker_that_is_gone_ends_a_run_after_ten_seconds(pid, progress_every):
    """Also while the others move: the episodes of the second server go on."""
    run = Run()
    run.go_on(50, progress_every=5)
    title = run.workers.pop(pid)
    run.go_on(int(ERROR_WAIT_S), progress_every)  # the trainer's own error has its time
    run.now += 1
    run.watchdog.look(run.now, run.workers, run.progress)
    assert run.watchdog.has_lost_a_worker(run.now)
    said = run.watchdog.describe_loss()
    assert f"process {pid}" in said and title.removeprefix("ray::").partition(".")[0] in said


def test_the_first_of_several_deaths_is_named():
    """A server's engine dies, and the server ends because of it."""
    run = Run()
    run.go_on(5)
    run.workers.pop(13)
    run.go_on(3)
    run.workers.pop(12)
    run.go_on(int(ERROR_WAIT_S) - 3)
    run.now += 1
    run.watchdog.look(run.now, run.workers, run.progress)
    assert run.watchdog.has_lost_a_worker(run.now)
    assert "EngineCore, process 13" in run.watchdog.describe_loss()


@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=30))
def test_only_a_pause_longer_than_the_limit_is_a_stall(pauses):
    dog, now, moved_at, stalls = Watchdog(STALL_S, 0), 0, 0, False
    dog.look(0, {}, 0)
    for number, (pause, moves) in enumerate(pauses, start=1):
        now += pause
        if moves:
            moved_at = now
        dog.look(now, {}, number if moves else dog.progress)
        stalls = now - moved_at > STALL_S
        assert dog.is_stalled(now) == stalls


# ----------------------------------------------------------------------------- the real processes


def test_workers_are_found_by_their_titles_and_only_those_of_the_run():
    titles = ["ray::WorkerDict.update", "VLLM::EngineCore", "ray::IDLE", "ray::get_ip"]
    ours, theirs = (os.environ | {RUN_VARIABLE: mark} for mark in ("mine", "mine2"))
    processes = [
        subprocess.Popen([title, "600"], executable=shutil.which("sleep"), env=environment)
        for environment in (ours, theirs)
        for title in titles
    ]
    try:
        pids = [process.pid for process in processes]
        found = find_workers("mine")
        assert found == dict(zip(pids[:2], titles[:2], strict=True))
        dog = Watchdog(STALL_S, 0)
        dog.look(0, found, None)
        processes[1].kill()
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)  # a zombie: its parent is busy
        dog.look(1, find_workers("mine"), None)
        assert dog.gone == [pids[1]]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_progress_is_reported_by_each_process_and_at_most_once_a_second(tmp_path, monkeypatch):
    clock = iter([0.0, 0.4, 0.9, 1.0, 5.0])
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(watchdog, "_counts", watchdog.Counter())
    monkeypatch.setattr(watchdog, "_last_report", -watchdog.REPORT_S)
    watchdog.report("tokens", 5)  # outside of a run
    monkeypatch.setenv(watchdog.PROGRESS_VARIABLE, str(tmp_path))
    seen = []
    for count in (3, 4, 5, 6):
        watchdog.report("tokens", count)
        seen.append(json.loads(*watchdog.read_progress(tmp_path).values())["tokens"])
    assert seen == [3, 3, 3, 18]
    monkeypatch.setenv(watchdog.PROGRESS_VARIABLE, str(tmp_path / "full"))  # cannot be written
    watchdog.report("tokens")


def test_a_checkpoint_that_grows_is_progress(tmp_path):
    (tmp_path / "global_step_1").mkdir()
    before = watchdog.size_of(tmp_path)
    (tmp_path / "global_step_1" / "shard.pt").write_bytes(bytes(100))
    assert watchdog.size_of(tmp_path) - before == 100
    assert watchdog.size_of(tmp_path / "missing") == 0
