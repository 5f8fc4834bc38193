"""Room 1, files of records: lists and lines are read as JSON reads them, and a small gzip takes
little memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
from conftest import fails_with
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.data import json_files
from agent_r1.data.json_files import json_records, parse_records
from agent_r1.ground.errors import AgentR1Error

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text('é"[]{},\\: \n0', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None)
@given(st.lists(VALUES, max_size=5), st.booleans(), st.sampled_from([None, 1]))
def test_a_list_is_read_as_json_reads_it(tmp_path_factory, values, ascii, indent):
    path, text = (
        tmp_path_factory.mktemp("list") / "x.json",
        json.dumps(values, ensure_ascii=ascii, indent=indent),
    )
    path.write_text(f" \n{text}\n ")
    assert list(json_records(path)) == [(f"record {n}", value) for n, value in enumerate(values, 1)]
    for broken in (text[:-1], f"{text}x", f"[{text}", text[:-1] + ",]", text.replace("[", "[,", 1)):
        path.write_text(broken)
        with fails_with("damaged_file"):
            list(json_records(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"question": "' + b"x" * 10_000_000, "line 1 has more than 65536 bytes"),
        (b'["' + b"x" * 3_000_000, "its gzip unfolds to more than"),
        (b"[" + b"{}," * 8_000, "its gzip unfolds to more than"),
    ],
    ids=["a line", "a text", "records"],
)
def test_a_small_gzip_that_unfolds_to_a_large_file_takes_little_memory(
    tmp_path, monkeypatch, content, says
):
    monkeypatch.setattr(json_files, "MAX_RECORD", 1 << 16)
    monkeypatch.setattr(json_files, "ALWAYS", 10_000)
    (tmp_path / "x.json").write_bytes(gzip.compress(content, 9))
    tracemalloc.start()
    try:
        with pytest.raises(AgentR1Error, match=says) as refused:
            for _ in json_records(tmp_path / "x.json"):
                pass
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ['{"a": 1}\n{"a": 1}\n', '[{"a": 1},\n{"a": 1}]'])
def test_a_mark_of_utf_8_at_the_beginning_is_no_text(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="utf-8-sig")
    assert [value for _, value in json_records(tmp_path / "x.json")] == [{"a": 1}] * 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", b"PAR1\x15\x04", "is a parquet file; let its name end in .parquet"),
        ("x.jsonl", b"PK\x03\x04\x14", "a zip or Excel file"),
        ("x.jsonl.zst", b"\x28\xb5\x2f\xfd\x24", "zstd"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16"), "UTF-16 text; write it as UTF-8"),
        ("x.csv", b"question;answer\nA?;x\n", "a table in text"),
        ("x.TSV", b"question\tanswer\nA?\tx\n", "a table in text"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with fails_with("other_form", says):
        list(json_records(tmp_path / name))


def test_a_file_of_nothing_but_corrupt_records_is_given_up(monkeypatch):
    monkeypatch.setattr("agent_r1.data.json_files.MAX_CORRUPT", 100)
    endless = ((f"line {n}", ValueError("no JSON")) for n in range(10**9))
    with fails_with("bad_records"):
        list(parse_records(endless, lambda value: value, "x.json", True, []))
