"""What is said about small runs of own tasks: lab/experiments/own_task_runs.py made them.

When the rules were written, only the first two runs of TUNED_ON existed. Three more were judged
wrong at first (a healthy one and two broken ones), and three rules were changed for them, so they
count as tuned on. All runs of HELD_BACK were judged as now. A wrong *likely* costs more trust than
silence, so a broken run may have no cause, and a healthy one must not have any. The last three runs
were recorded later, with today's cold start. The healthy runs of `mcp` and `tools` are sound, and
too short to learn.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import main

from agent_r1 import AgentR1Error
from agent_r1_recipes.diagnose.archive import pack, unpack
from agent_r1_recipes.diagnose.causes import findings
from agent_r1_recipes.diagnose.files import read_evidence

ARCHIVE = Path(__file__).with_name("own_tasks.zip")
MEMORISED = "the cold start was memorised"
CUT = "turns are cut off"
LARGE = "updates are too large"
UNSEEDED = "the samples of a group begin in different states"
FAIL = "calls fail"
NO_CALLS = "tools were never called"
TUNED_ON = {
    "class-healthy-0": None,
    "questions-memorised": MEMORISED,
    "gym-lr": LARGE,
    "native-cut": CUT,
    "questions-healthy-1": None,
}
HELD_BACK = {
    "questions-healthy-0": None,
    "gym-healthy-0": None,
    "native-healthy-0": None,
    "mcp-healthy-0": None,
    "tools-healthy-0": None,
    "gym-unseeded": UNSEEDED,
    "tools-no-calls": NO_CALLS,
    "questions-cut": CUT,
    "class-unseeded": UNSEEDED,
    "mcp-no-calls": NO_CALLS,
    "class-healthy-1": None,
    "class-lr": LARGE,
    "native-healthy-1": None,
    "native-memorised": MEMORISED,
    "tools-healthy-1": None,
    "tools-fail": FAIL,
    "gym-healthy-1": None,
    "mcp-healthy-1": None,
    "mcp-fails": FAIL,
}
ALL = TUNED_ON | HELD_BACK


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return unpack(ARCHIVE, tmp_path_factory.mktemp("own_tasks"))


def named(run: Path) -> list[str]:
    return [sign.cause.name for sign in findings(read_evidence(run))]


def test_every_run_is_recorded(recorded):
    assert sorted(path.name for path in recorded.iterdir()) == sorted(ALL)


def test_packing_again_gives_the_same_archive_and_another_byte_is_refused(recorded, tmp_path):
    archive = tmp_path / ARCHIVE.name
    pack(recorded, archive)
    assert archive.read_bytes() == ARCHIVE.read_bytes()
    content = archive.read_bytes()
    archive.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(AgentR1Error, match="has the hash"):
        unpack(archive, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("run", [name for name, cause in ALL.items() if cause is None])
def test_a_healthy_run_has_no_cause(run, recorded, capsys):
    assert named(recorded / run) == []
    assert main("diagnose", str(recorded / run)) == 0
    assert "likely" not in capsys.readouterr().out


@pytest.mark.parametrize("runs", [TUNED_ON, HELD_BACK], ids=["tuned on", "held back"])
def test_three_of_four_broken_runs_have_their_cause(runs, recorded):
    broken = {run: cause for run, cause in runs.items() if cause}
    right = [run for run, cause in broken.items() if named(recorded / run) == [cause]]
    assert broken and 4 * len(right) >= 3 * len(broken), right


def test_at_most_one_cause_is_likely(recorded, capsys):
    for run in ALL:
        assert main("diagnose", str(recorded / run)) == 0
        assert capsys.readouterr().out.count("(likely)") <= 1, run


def test_the_count_of_episodes_is_that_of_the_run(recorded, capsys):
    main("diagnose", str(recorded / "gym-healthy-0"))
    assert "36 recorded of 360 episodes" in capsys.readouterr().out
