"""Folders from strangers: one line and exit 1, in linear time, or a diagnosis; no traceback."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from runs import main

from agent_r1 import AgentR1Error
from agent_r1_recipes.diagnose import files
from agent_r1_recipes.diagnose.causes import findings, symptoms
from agent_r1_recipes.diagnose.files import between, read_evidence

VERL = {"input": "a", "output": "b", "score": 1, "step": 1}
ROW = {"tokens": ["a", "b"], "action_mask": [0, 1], "rewards": [0.0, 1.0], "advantages": [0, 1]}
OURS = {
    "step": 1,
    "group_id": "1-0",
    "question": "What?",
    "ground_truth": ["Rome"],
    "kind": "2-hop",
    "stop_reason": "answered",
    "reward": 1.0,
    "reward_parts": {"em": 1.0},
    "process": 0,
    "metrics": {"em": 1.0},
    "steps": [{"text": "b", "info": {"tool_calls": [{"arguments": {}, "content": "Rome"}]}}],
    "rows": [ROW],
}
DEEP = "[" * 100_000


def write(file: Path, *records: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def is_refused(folder: Path, capsys) -> bool:
    """Run the command; whatever it says is at most one line of error."""
    code = main("diagnose", str(folder))
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("\n") <= 1
    return code == 1


@pytest.mark.parametrize("key", ["step", "score", "input", "output", "uid"])
@pytest.mark.parametrize(
    "value",
    ["2", None, [], {}, float("nan"), 1e308, 10**400, -1, "\ud800", [[1]], {"a": None}, True],
)
def test_any_value_of_verl(tmp_path, capsys, key, value):
    write(tmp_path / "1.jsonl", VERL, VERL | {key: value})
    refused = is_refused(tmp_path, capsys)
    if key == "step":
        assert refused


@pytest.mark.parametrize("key", list(OURS))
@pytest.mark.parametrize(
    "value", ["2", None, [], {}, float("nan"), 10**400, [None], [{}], {"a": []}]
)
def test_any_value_of_ours(tmp_path, capsys, key, value):
    write(tmp_path / "rollouts/step_000001.jsonl", OURS, OURS | {key: value})
    # Some fields may be missing or empty. No field takes any of the other values.
    assert is_refused(tmp_path, capsys) or value in ("2", None, [], {})


@pytest.mark.parametrize("key", list(ROW))
@pytest.mark.parametrize("value", ["2", None, [], [1, 2, 3], [None, None], ["a", "b"], {"a": 1}])
def test_any_value_of_a_row(tmp_path, capsys, key, value):
    write(tmp_path / "rollouts/step_000001.jsonl", OURS | {"rows": [ROW | {key: value}]})
    # Advantages may be missing; one that stands at an action must be a number.
    may_be = (key == "advantages") != (value == ["a", "b"] and key in ("tokens", "advantages"))
    assert is_refused(tmp_path, capsys) == (not may_be)


@pytest.mark.parametrize("value", ["x", None, [], {}, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("key", ["training/global_step", "critic/score/mean", "actor/entropy"])
def test_any_value_of_metrics(tmp_path, capsys, key, value):
    lines = [{"training/global_step": n, "critic/score/mean": 0.5} for n in range(1, 13)]
    write(tmp_path / "metrics.jsonl", *lines, lines[0] | {key: value})
    assert is_refused(tmp_path, capsys) == (key == "training/global_step")


@pytest.mark.parametrize(
    "text", ["[]", "a: [", "x", DEEP, "a: &a [1]\nb: *a\n" * 30, "\x00", "env: 5"]
)
def test_any_config(tmp_path, capsys, text):
    write(tmp_path / "rollouts/step_000001.jsonl", OURS)
    (tmp_path / "config.yaml").write_text(text)
    assert is_refused(tmp_path, capsys) == (text != "env: 5")


@pytest.mark.parametrize("text", [DEEP, "{}", '{"log_history": 5}', '{"log_history": [5]}', "\x00"])
def test_any_state_of_trl(tmp_path, capsys, text):
    rows = [{"step": 1, "prompt": "a", "completion": "b", "reward": 1.0}]
    (tmp_path / "completions").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "completions/completions_1.parquet")
    (tmp_path / "trainer_state.json").write_text(text)
    assert is_refused(tmp_path, capsys)


def test_depth(tmp_path, capsys):
    (tmp_path / "1.jsonl").write_text(DEEP + "\n")
    assert is_refused(tmp_path, capsys)


def test_a_pipe_is_no_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "1.jsonl")
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert is_refused(tmp_path, capsys)


def test_unclosed_marks_take_linear_time(tmp_path):
    """The regular expression looked for the end of each mark anew: 17 s for 8,000 marks."""
    for mark in ("<tool_call>", "<answer>", "<tool_response>", "\\boxed{"):
        write(tmp_path / "1.jsonl", *[VERL | {"output": mark * 100_000}] * 4)
        start = time.process_time()
        evidence = read_evidence(tmp_path)
        findings(evidence)
        symptoms(evidence)
        assert time.process_time() - start < 5


def test_parts_between_marks():
    assert between("a<x>b</x>c<x>d<x>e</x>f", "<x>", "</x>") == (["b", "d<x>e"], "acf")
    assert between("</x><x>a", "<x>", "</x>") == ([], "</x><x>a")


def test_equal_rows_do_not_fill_the_memory(tmp_path, monkeypatch):
    rows = pyarrow.Table.from_pylist(
        [{"step": 1, "prompt": "a", "completion": "b" * 100, "reward": 1.0}] * 3000
    )
    (tmp_path / "completions").mkdir()
    pyarrow.parquet.write_table(rows, tmp_path / "completions/completions_1.parquet")
    assert len(read_evidence(tmp_path).episodes) == 3000
    for name, limit in (("MAX_EPISODES", 2000), ("MAX_CHARS", 10_000), ("MAX_BYTES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(files, name, limit)
            if name == "MAX_BYTES":
                patch.setattr(files._check_size, "__defaults__", (limit,))
            with pytest.raises(AgentR1Error) as error:
                read_evidence(tmp_path)
            assert error.value.code == "too_large"


def test_what_a_stranger_wrote_cannot_steer_the_terminal(tmp_path, capsys):
    escape = "\x1b[31m"
    lost = OURS | {"reward_parts": {"em": 5.0}, "stop_reason": escape, "question": escape}
    write(tmp_path / "rollouts/step_000001.jsonl", lost)
    assert not is_refused(tmp_path, capsys)
    main("diagnose", str(tmp_path))
    assert escape not in capsys.readouterr().out
