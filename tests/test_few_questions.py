"""Few questions in one file: no question is trained on and tested, and another model plays all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import fails_with
from runs import main

from agent_r1.app.cli import _split_of_models
from agent_r1.config import load_config
from agent_r1.data.splits import share_out
from agent_r1.workspace import MOST_OF_SMALL, Workspace

SHARED = ["data.train=7", "data.val=1", "data.test=2"]


def write(folder: Path, form: str, count: int = 10) -> Path:
    records = [{"question": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(count)]
    folder.mkdir(exist_ok=True)
    path = folder / f"q.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config_of(path: Path, *settings: str):
    words = ["env.tools=[]", "data.name=rows", f"data.source={path}", *settings]
    return load_config("small", words, trains=False)


def asked(rows) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_splits_of_a_small_file_share_nothing_and_all_is_all(tmp_path, form):
    paths = Workspace(config_of(write(tmp_path, form), *SHARED), tmp_path)
    paths.make_data()
    splits = {split: asked(paths.load_rows(split)) for split in ("train", "val", "test", "all")}
    assert [len(splits[split]) for split in ("train", "val", "test", "all")] == [7, 1, 2, 10]
    assert sorted(splits["train"] + splits["val"] + splits["test"]) == sorted(set(splits["all"]))
    assert paths.foreign_split() == "all"
    assert paths.held_out("all") == {"questions": {"all": 10, "for_training": 0}}
    assert paths.held_out("test") == {"questions": {"all": 10, "for_training": 7}}


def test_a_file_that_is_too_small_is_refused_with_counts_that_fit(tmp_path):
    paths = Workspace(config_of(write(tmp_path, "jsonl")), tmp_path)
    with fails_with("too_few_questions", "set data.train=7 data.val=1 data.test=2, or add some"):
        paths.make_data()
    two = Workspace(config_of(write(tmp_path, "jsonl", 2), *SHARED), tmp_path)
    with fails_with("too_few_questions", "has 2 questions and train, val and test take 10; add"):
        two.make_data()


def test_a_folder_of_splits_keeps_its_test(tmp_path):
    for split in ("train", "val", "test"):
        path = write(tmp_path / "q", "jsonl").rename(tmp_path / "q" / f"{split}.jsonl")
        path.write_text(path.read_text().replace("+ 1", f"+ 1 in {split}"))
    paths = Workspace(config_of(tmp_path / "q", *SHARED), tmp_path)
    assert paths.foreign_split() == "test"
    # A question of two files is refused.
    (tmp_path / "q" / "test.jsonl").write_text((tmp_path / "q" / "train.jsonl").read_text())
    with fails_with("bad_records", "the same question as train.jsonl"):
        paths.make_data()


def test_a_large_file_keeps_its_test(tmp_path):
    source = write(tmp_path, "jsonl", MOST_OF_SMALL + 1)
    sizes = [f"data.train={MOST_OF_SMALL - 9}", "data.val=5", "data.test=5"]
    assert Workspace(config_of(source, *sizes)).foreign_split() == "test"


def test_only_another_model_plays_all(tmp_path, monkeypatch):
    source = write(tmp_path, "jsonl")
    config = config_of(source, *SHARED, "seed=3")
    own = {"trained": config, "foreign": None, "elsewhere": config_of(tmp_path / "other", *SHARED)}
    monkeypatch.setattr("agent_r1.inference.agent.own_settings", lambda model: own[model.name])
    asked_for = config_of(source, *SHARED)
    assert _split_of_models([Path("foreign")], asked_for) == (asked_for, "all")
    assert _split_of_models([Path("elsewhere")], asked_for) == (asked_for, "all")
    kept, split = _split_of_models([Path("foreign"), Path("trained")], asked_for)
    assert (kept.data, kept.seed, split) == (config.data, 3, "test")


def test_eval_of_another_model_plays_all_whatever_a_step_takes(tmp_path, monkeypatch, capsys):
    """... in the default preset, a step of which is larger than the seven questions of train."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    agent = Path(__file__).parents[1] / "recipes" / "laptop" / "agent"
    words = ["--preset", "small", "env.tools=[]", "data.name=rows", *SHARED]
    source = f"data.source={write(tmp_path, 'jsonl')}"
    assert main("eval", "--model", str(agent), "--backend", "local", *words, source) == 0
    assert "10 all questions" in capsys.readouterr().out


@pytest.mark.parametrize("count", range(3, 40))
def test_shares_are_disjoint_parts_of_the_whole(count):
    sizes = share_out(count, {"train": 100, "val": 20, "test": 20})
    assert sizes is not None and sum(sizes.values()) == count and min(sizes.values()) >= 1
