"""Room 1: MuSiQue's records, with aliases and without an answer."""

from __future__ import annotations

import pytest
from qa_files import musique, write_jsonl

from agent_r1.config import DataConfig
from agent_r1.data.musique import parse
from agent_r1.data.qa_build import build
from agent_r1.data.records import BadRecord
from agent_r1.data.rows import read_rows
from agent_r1.errors import AgentR1Error
from agent_r1.reward.qa import qa_outcome


def test_one_record_by_hand():
    record = parse(musique()[1])
    assert record.answers == ["London", "London, Earth"] and (record.kind, record.hops) == ("2hop", 2)
    assert record.supporting == ["Frankenstein", "Mary Shelley"] and len(record.paragraphs) == 4


def test_an_alias_is_an_answer(tmp_path):
    source = write_jsonl(tmp_path / "musique.jsonl.gz", musique())
    build(DataConfig(name="musique", source=str(source), train=12, val=4, test=8), 0, tmp_path / "data", tmp_path)
    rows = [row for split in ("train", "val", "test") for row in read_rows(tmp_path / "data" / f"{split}.parquet")]
    (row,) = (row for row in rows if "Frankenstein" in row["prompt"][-1]["content"])
    reward, _, metrics = qa_outcome("london, earth", True, list(row["reward_model"]["ground_truth"]), 0.2)
    assert reward == 1 and metrics["em"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"answerable": False}, "without an answer; take MuSiQue-Ans"),
        ({"id": "hop2__1"}, "does not begin with its number of hops"),
        ({"answer_aliases": [1]}, "answer_aliases are no strings"),
        ({"paragraphs": []}, "no paragraphs"),
        ({"paragraphs": [{"title": "A", "paragraph_text": "x", "is_supporting": False}]}, "no supporting paragraph"),
        ({"paragraphs": [{"title": "A", "is_supporting": True}]}, "no paragraph_text"),
    ],
)
def test_what_is_wrong_with_a_record(change, reason):
    with pytest.raises(BadRecord, match=reason):
        parse(musique()[0] | change)


def test_a_broken_line_is_named_by_its_number(tmp_path):
    source = write_jsonl(tmp_path / "musique.jsonl", musique())
    lines = source.read_text().splitlines()
    source.write_text("\n".join([*lines[:4], lines[4][:-30], *lines[5:]]) + "\n")
    config = DataConfig(name="musique", source=str(source), train=12, val=4, test=7)
    with pytest.raises(AgentR1Error, match=r"1 of 24 records are corrupt: line 5 \(no JSON\)"):
        build(config, 0, tmp_path / "data", tmp_path)
    config.skip_bad = True
    assert build(config, 0, tmp_path / "data", tmp_path)["skipped"] == [f"{source}: line 5 (no JSON)"]
