"""What a test of own data measures: new names, groups that stay together, columns of pandas."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import fails_with, question_row
from other_values import is_harmless, with_other_values

from agent_r1.app.plan import print_plan
from agent_r1.config import load_config
from agent_r1.data.build import build
from agent_r1.data.names import count_new_names, describe_new_names, names_in
from agent_r1.data.own_rows import HARMLESS, ROWS, give_metadata_one_type, read_questions
from agent_r1.ground.errors import AgentR1Error
from agent_r1.workspace import refuse_long_context, words_that_exact_match_drops


def test_names_are_capitalised_words_inside_of_a_sentence():
    text = "How many of the Zorro bell are left? Ask Kim (or Lee): Really. I know A."
    assert names_in(text) == {"Zorro", "Kim", "Lee"}


def test_new_names_are_counted():
    train = ["Where is the Zorro bell?", "Kestro has it"]
    assert count_new_names(train, ["Is the Zorro here?", "Is Kestro?"]) == (0, 2)
    assert "0 of 2: this score says nothing" in describe_new_names(train, ["Has Kestro a Zorro?"])
    assert describe_new_names(train, ["Is Marn here?"]).endswith("1 of 1")
    assert describe_new_names(train, ["is it?"]) == ""


def write(tmp_path, *records) -> str:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def made(source, *settings):
    words = [f"data.source={source}", "data.name=rows", "env.tools=[]"]
    words += ["rollout.prompts_per_step=2", *settings]
    return ROWS.make(load_config("small", words).data, 0).splits


def test_split_by_keeps_groups_apart(tmp_path):
    records = [
        {"question": f"{item}{n}?", "answer": "x", "metadata": {"item": item}}
        for item in "abcdefghij"
        for n in range(4)
    ]
    sizes = ("data.train=16", "data.val=4", "data.test=4")
    splits = made(write(tmp_path, *records), *sizes, "data.split_by=item")
    items = {split: {one.question[0] for one in asked} for split, asked in splits.items()}
    assert {split: len(asked) for split, asked in splits.items()} == {
        "train": 16,
        "val": 4,
        "test": 4,
    }
    assert not (items["train"] & items["test"] or items["train"] & items["val"])
    assert not items["val"] & items["test"]
    with fails_with("missing_column"):
        made(write(tmp_path, *records), *sizes, "data.split_by=colour")
    with fails_with("too_few_questions"):
        made(write(tmp_path, *records[:8]), "data.train=4", "data.val=2", "data.test=2",
             "data.split_by=item")  # fmt: skip


def test_a_large_group_goes_where_it_fits(tmp_path):
    """... in one of several orders: in most of them it lands in val or test."""
    records = [
        {"question": f"{n}?", "answer": "x", "metadata": {"item": "all" if n < 60 else str(n)}}
        for n in range(80)
    ]
    sizes = ("data.train=60", "data.val=10", "data.test=10", "data.split_by=item")
    assert len(made(write(tmp_path, *records), *sizes)["train"]) == 60


def test_split_by_divides_one_file_only(tmp_path):
    """In a folder, and of a recipe's questions, the splits are made already."""
    record = {"question": "y?", "answer": "1", "metadata": {"item": 1}}
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(record | {"question": split}))
    sizes = ["data.train=1", "data.val=1", "data.test=1", "data.split_by=item"]
    sizes.append("rollout.prompts_per_step=1")
    folder = load_config("small", ["data.name=rows", f"data.source={tmp_path}", *sizes])
    for config in (folder, load_config("small", ["data.split_by=item"])):
        with fails_with("splits_are_made", "divides one file of questions"):
            build(config.data, 0, tmp_path / "made")
        with fails_with("splits_are_made"):
            print_plan(config, "run")


@pytest.mark.parametrize("ending", ["", "list"])
def test_a_repeated_key_is_named_by_its_line(tmp_path, ending):
    path = tmp_path / "q.jsonl"
    lines = ['{"question": "y?", "answer": "1"}']
    lines.append('{"question": "z?", "answer": "first", "answer": "second"}')
    path.write_text(f"[{','.join(lines)}]" if ending else "\n".join(lines))
    with fails_with("bad_records", match=r"2 \(the key 'answer' is there twice\)"):
        read_questions(path, False, [], {})


def test_columns_of_pandas_are_counted_and_others_refused(tmp_path, capsys):
    record = {"question": "y?", "answer": "1", "__index_level_0__": 3}
    assert len(read_questions(write_path(tmp_path, record), False, [], {})) == 1
    line = capsys.readouterr().out.strip()
    assert line == f"q.jsonl: not read: __index_level_0__ (1: {HARMLESS['__index_level_0__']})"
    with fails_with("bad_records", match="colour"):
        read_questions(write_path(tmp_path, record | {"colour": "red"}), False, [], {})


def test_a_column_called_index_is_a_row_number_only_with_numbers(tmp_path):
    record = {"question": "y?", "answer": "1"}
    assert read_questions(write_path(tmp_path, record | {"index": 3.0}), False, [], {})
    for value in ("S&P 500", True):
        with fails_with("bad_records", match="index"):
            read_questions(write_path(tmp_path, record | {"index": value}), False, [], {})


PUBLISHED = {
    "question": "What is six times seven?", "answer": ["42", 42.5], "context": "c", "kind": "k",
    "system": "s", "tools": ["calculator"], "supporting": ["Six"], "metadata": {"level": 1.5},
    "passages": [{"title": "Six", "text": "A number."}],
    "__index_level_0__": 1, "Unnamed: 0": 2, "index": 3,
}  # fmt: skip
"""A question with every key, and with the columns that pandas adds."""


def test_each_value_of_a_question_is_read_refused_or_harmless(tmp_path):
    data = load_config("small").data

    def read(record):
        [question] = read_questions(write_path(tmp_path, record), False, [], {})
        return ROWS.asked(data, question), question.paragraphs

    before = read(PUBLISHED)
    named = set()
    for name, other in with_other_values(PUBLISHED):
        try:
            seen = read(other) != before
        except AgentR1Error:
            seen = True
        assert seen or is_harmless(name, HARMLESS), name
        named.update(key for key in HARMLESS if is_harmless(name, [key]))
    assert named == set(HARMLESS)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (decimal.Decimal("3.00"), 3),
        (decimal.Decimal("2.50"), 2.5),
        (datetime.date(2020, 1, 2), "of type date"),
        (datetime.datetime(2020, 1, 2), "of type datetime"),
        (b"x", "of type bytes"),
    ],
)
def test_metadata_of_parquet_are_values_of_json(tmp_path, value, read):
    """A run writes them as JSON, long after the file was read."""
    path = tmp_path / "q.parquet"
    record = {"question": "y?", "answer": "1", "metadata": {"value": value}}
    pq.write_table(pa.Table.from_pylist([record]), path)
    if isinstance(read, str):
        with fails_with("bad_records", match=read):
            read_questions(path, False, [], {})
    else:
        [question] = read_questions(path, False, [], {})
        assert json.loads(json.dumps(question.metadata)) == {"value": read}


def write_path(tmp_path, record):
    write(tmp_path, record)
    return tmp_path / "q.jsonl"


def test_whole_floats_of_a_file_are_integers(tmp_path):
    rows = [
        {"question": f"{n}?", "metadata": {"level": float(n), "price": n + 0.5 * (n == 2)}}
        for n in range(9)
    ]
    sizes = ("data.train=7", "data.val=1", "data.test=1", "env.name=hermes")
    splits = made(write(tmp_path, *rows), *sizes)
    values = [asked.extra["metadata"] for part in splits.values() for asked in part]
    assert {type(value["level"]) for value in values} == {int}
    assert {type(value["price"]) for value in values} == {float}
    give_metadata_one_type({})


def test_answers_that_exact_match_drops_are_named():
    rows = [{"reward_model": {"ground_truth": [answer]}} for answer in ("A", "B", "The", "Oslo")]
    assert words_that_exact_match_drops(rows) == {"A", "The"}


def test_a_long_question_is_refused_with_its_number():
    rows = [question_row("short", ("a",)), question_row("word " * 3000, ("a",))]
    with fails_with("context_too_long", match="question 2 of test"):
        refuse_long_context(rows, 320, "test")
