"""Questions of one's own: every form that is read, and a line for each that is not."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import fails_with
from runs import main

from agent_r1.config import plugins
from agent_r1.config.settings import DataConfig
from agent_r1.data.build import build
from agent_r1.data.storage import read_corpus, read_rows
from agent_r1.ground.errors import AgentR1Error

GOOD = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(10)]
SIZES = {"train": 4, "val": 3, "test": 3}


def made(tmp_path, records, name="q.jsonl", **settings):
    """Rows by split of a source with `records` (or with that text)."""
    source = tmp_path / name
    if isinstance(records, str | bytes):
        source.write_bytes(records.encode() if isinstance(records, str) else records)
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), source)
    else:
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(**{"name": "rows", "source": str(source), **SIZES, **settings})
    build(config, 0, tmp_path / "out")
    return {split: read_rows(tmp_path / "out" / f"{split}.parquet") for split in SIZES}


@pytest.mark.parametrize("name", ["q.jsonl", "q.parquet", "q.json"])
def test_one_file_is_dealt_out_without_overlap(tmp_path, name):
    rows = made(tmp_path, json.dumps(GOOD) if name == "q.json" else GOOD, name)
    assert {split: len(some) for split, some in rows.items()} == SIZES
    asked = {row["prompt"][-1]["content"]: row for some in rows.values() for row in some}
    assert set(asked) == {record["question"] for record in GOOD}
    assert asked["What is 3 + 3?"]["reward_model"]["ground_truth"] == ["6"]
    assert all(
        len(row["prompt"]) == 1 and row["env_kwargs"]["tools"] is None for row in asked.values()
    )
    assert list(read_corpus(tmp_path / "out" / "corpus.jsonl")) == []


def test_all_that_a_line_may_say(tmp_path):
    rich = {
        "answer": [8, "eight"],
        "metadata": {"level": 1},
        "system": "Be brief.",
        "tools": ["search"],
    }
    rows = made(tmp_path, [record | rich for record in GOOD], system="Not this one.")
    row = rows["val"][1]
    assert row["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert row["reward_model"]["ground_truth"] == ["8", "eight"]
    assert row["extra_info"] == {"index": 1, "split": "val", "metadata": {"level": 1}}
    assert row["env_kwargs"] == {"tools": ["search"]}


def test_a_folder_with_splits_is_taken_as_it_is(tmp_path):
    (tmp_path / "set").mkdir()
    for split, start in (("train", 0), ("val", 4), ("test", 7)):
        records = GOOD[start : start + SIZES[split]]
        (tmp_path / "set" / f"{split}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in records)
        )
    config = DataConfig(name="rows", source=str(tmp_path / "set"), system="Add.", **SIZES)
    build(config, 0, tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "test.parquet")
    assert [row["prompt"] for row in rows] == [
        [{"role": "system", "content": "Add."}, {"role": "user", "content": r["question"]}]
        for r in GOOD[7:]
    ]
    (tmp_path / "set" / "val.jsonl").unlink()
    with pytest.raises(AgentR1Error, match="has no val.jsonl or val.parquet"):
        build(config, 0, tmp_path / "other")


@pytest.mark.parametrize(
    ("line", "found"),
    [("{", "line 11 (no JSON)"), ('{"answer": "1"}', "line 11 (no question)"),
     ('{"question": "q", "answer": ""}', "(answer.0: string should have at least 1"),
     (json.dumps(GOOD[2] | {"question": GOOD[2]["question"].replace(" ", "  ")}), "the same "
         "question as q.jsonl, line 3"),
     ('{"question": "q", "answer": "1", "level": 2}', "(level: extra inputs are not permitted"),
     (b'{"question": "\xff"}', "line 11 (no JSON)"),
     ('{"question": "?", "answer": NaN}', "nan or infinity"),
     (f'{{"question": "?", "answer": "1", "metadata": {{"x": {"[" * 70 + "]" * 70}}}}}', "line 11 "
         "(value error, json nested")],
)  # fmt: skip
def test_a_line_that_is_no_question_is_named_and_the_form_shown(tmp_path, line, found):
    text = "".join(json.dumps(record) + "\n" for record in GOOD).encode()
    with pytest.raises(AgentR1Error) as refusal:
        made(tmp_path, text + (line if isinstance(line, bytes) else line.encode()))
    assert found in str(refusal.value) and refusal.value.code == "bad_records"
    assert (
        sum(map(len, made(tmp_path, (tmp_path / "q.jsonl").read_bytes(), skip_bad=True).values()))
        == 10
    )


def test_a_function_makes_them_the_same_for_the_same_seed(tmp_path, monkeypatch):
    code = "def questions(split, count, rng):\n    for i in range(count):\n"
    code += "        yield {'question': f'{split} {i} {rng.random()}', 'answer': i}\n"
    (tmp_path / "made_questions.py").write_text(code)
    name = f"{tmp_path / 'made_questions.py'}:questions"
    monkeypatch.setattr(plugins, "_trusted", {name})
    for out in ("a", "b"):
        build(DataConfig(name=name, **SIZES), 3, tmp_path / out)
    a, b = ((tmp_path / out / "train.parquet").read_bytes() for out in ("a", "b"))
    assert a == b and len(read_rows(tmp_path / "a" / "test.parquet")) == 3


def test_what_a_function_holds_out_is_not_trained_on(tmp_path, monkeypatch):
    code = "def questions(split, count, rng):\n    for i in range(count):\n"
    code += (
        "        yield {'question': f'What is {i}?', 'answer': i, 'metadata': {'level': LEVEL}}\n"
    )
    for name, level in (("same.py", "0"), ("other.py", "split")):
        (tmp_path / name).write_text(code.replace("LEVEL", level))
        monkeypatch.setattr(plugins, "_trusted", {f"{tmp_path / name}:questions"})
        config = DataConfig(name=f"{tmp_path / name}:questions", train=8, val=4, test=2)
        manifest = build(config, 0, tmp_path / f"{name}.data")
        counts = [
            len(read_rows(tmp_path / f"{name}.data" / f"{split}.parquet"))
            for split in ("train", "val", "test")
        ]
        assert counts == ([4, 2, 2] if level == "0" else [8, 4, 2])
        assert manifest["skipped"][:1] == (
            ["val: 'What is 0?' is held out"] if level == "0" else []
        )
    config = DataConfig(name=f"{tmp_path / 'same.py'}:questions", train=3, val=4, test=2)
    monkeypatch.setattr(plugins, "_trusted", {config.name})
    with fails_with("questions_held_out"):
        build(config, 0, tmp_path / "none")


def test_questions_without_answers_are_refused_where_answers_are_paid_for(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"question": r["question"]}) + "\n" for r in GOOD)
    )
    (tmp_path / "score.py").write_text("def score(answer, row): return 1.0")
    run = ["data", "data.name=rows", *(f"data.{split}={count}" for split, count in SIZES.items())]
    run += ["rollout.prompts_per_step=4", f"data.source={tmp_path}/q.jsonl"]
    assert main(*run) == 1
    said = capsys.readouterr().err
    assert "q.jsonl: the question 'What is " in said and "env.reward" in said
    assert main(*run, f"env.reward={tmp_path}/score.py:score") == 0
