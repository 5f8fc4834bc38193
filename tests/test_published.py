"""Room 1, published questions: from files and from the hub to rows, corpus and index; what is corrupt."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ScriptedPolicy, call
from qa_files import hotpotqa, hub_form, musique, twowiki, write_json, write_jsonl
from runs import main, tree

from agent_r1.config import DATASETS, fingerprint, load_config
from agent_r1.data import corpora
from agent_r1.data.build import build
from agent_r1.data.prompts import INSTRUCTIONS
from agent_r1.data.published import DATASETS as PUBLISHED
from agent_r1.data.published import BadRecord, hotpotqa_record, musique_record
from agent_r1.data.rows import ROW_KEYS, read_corpus, read_rows, verify
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.reward.qa import qa_outcome
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.episode import Task, make_loop, run_episodes
from agent_r1.rollout.evaluate import eval_card
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import PassageIndex, build_index
from agent_r1.search.searcher import Searcher
from agent_r1.settings import DataConfig
from agent_r1.tool import make_tools
from agent_r1.types import Sampling

DISTRACTOR, FULLWIKI, TWOWIKI, MUSIQUE = (
    PUBLISHED[name] for name in ("hotpotqa", "hotpotqa-fullwiki", "twowiki", "musique")
)
SIZES = {"name": "hotpotqa", "train": 40, "val": 8, "test": 12}


def made(tmp_path: Path, source: Path, folder: str = "data", seed: int = 0, **changes) -> Path:
    config = DataConfig(**{**SIZES, "source": str(source)} | changes)
    build(config, seed, tmp_path / folder)
    return tmp_path / folder


def rows_of(folder: Path) -> dict[str, list[dict]]:
    return {split: read_rows(folder / f"{split}.parquet") for split in ("train", "val", "test")}


@pytest.fixture
def one_file(tmp_path) -> Path:
    return write_json(tmp_path / "mine.json", hotpotqa())


@pytest.fixture
def published(tmp_path) -> Path:
    """A folder as one has it after downloading; one of the two is gzipped."""
    write_json(tmp_path / "hotpot" / "hotpot_train_v1.1.json", hotpotqa()[:56])
    write_json(tmp_path / "hotpot" / "hotpot_dev_distractor_v1.json.gz", hotpotqa()[56:])
    return tmp_path / "hotpot"


def test_one_record_by_hand():
    record = hotpotqa_record(hotpotqa()[0])
    assert (record.question, record.answers) == ("Where was the author of Pride and Prejudice born?", ["Steventon"])
    assert (record.kind, record.hops) == ("bridge", 2)
    assert record.supporting == ["Pride and Prejudice", "Jane Austen"] and len(record.paragraphs) == 10
    assert ("Jane Austen", "Jane Austen was a writer. The writer was born in Steventon.") in record.paragraphs


def test_the_hubs_form_is_the_same_record():
    assert [hotpotqa_record(hub_form(r)) for r in hotpotqa()] == [hotpotqa_record(r) for r in hotpotqa()]


def test_a_bridge_comparison_of_2wiki_takes_four_hops():
    four = [["A", 0], ["B", 1], ["C", 0], ["D", 2], ["A", 1]]
    record = TWOWIKI.parse({**twowiki()[0], "type": "bridge_comparison", "supporting_facts": four})
    assert (record.kind, record.hops, record.supporting) == ("bridge_comparison", 4, ["A", "B", "C", "D"])


def test_published_names_and_kinds_of_2wiki(tmp_path):
    write_json(tmp_path / "2wiki" / "train.json", twowiki()[:14])
    write_json(tmp_path / "2wiki" / "dev.json.gz", twowiki()[14:])
    folder = made(tmp_path, tmp_path / "2wiki", name="twowiki", train=10, val=4, test=0)
    assert verify(folder)["splits"]["test"] == {"questions": 10, "kinds": {"compositional": 10}}
    assert {row["data_source"] for row in rows_of(folder)["test"]} == {"twowiki"}


def test_one_record_of_musique_by_hand():
    record = musique_record(musique()[1])
    assert record.answers == ["London", "London, Earth"] and (record.kind, record.hops) == ("2hop", 2)
    assert record.supporting == ["Frankenstein", "Mary Shelley"] and len(record.paragraphs) == 4


def test_an_alias_is_an_answer(tmp_path):
    source = write_jsonl(tmp_path / "musique.jsonl.gz", musique())
    rows = rows_of(made(tmp_path, source, name="musique", train=12, val=4, test=8))
    (row,) = (r for found in rows.values() for r in found if "Frankenstein" in r["prompt"][-1]["content"])
    reward, _, metrics = qa_outcome("london, earth", True, list(row["reward_model"]["ground_truth"]), 0.2)
    assert reward == 1 and metrics["em"] == 1


def test_rows_have_verls_keys_and_one_prompt(tmp_path, one_file):
    rows = rows_of(made(tmp_path, one_file))
    assert {split: len(found) for split, found in rows.items()} == {"train": 40, "val": 8, "test": 12}
    row = rows["test"][3]
    assert tuple(row) == ROW_KEYS and row["data_source"] == "hotpotqa" and row["env_kwargs"] == {"tools": None}
    truth = {record["question"]: record for record in hotpotqa()}[row["prompt"][-1]["content"]]
    assert row["reward_model"] == {"style": "rule", "ground_truth": [truth["answer"]]}
    assert row["extra_info"]["index"] == 3 and row["extra_info"]["id"] == truth["_id"]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == INSTRUCTIONS


def test_the_chat_format_takes_the_prompt(chat: ChatFormat, tmp_path, one_file):
    prompt = rows_of(made(tmp_path, one_file))["val"][0]["prompt"]
    text = chat.tokenizer.decode(chat.prompt_ids(prompt, []))
    assert INSTRUCTIONS in text and prompt[1]["content"] in text


def test_splits_of_one_file_do_not_overlap(tmp_path, one_file):
    rows = rows_of(made(tmp_path, one_file))
    ids = [row["extra_info"]["id"] for found in rows.values() for row in found]
    assert len(ids) == len(set(ids)) == 60


def test_published_files_train_val_from_one_and_the_whole_other_as_test(tmp_path, published):
    rows = rows_of(made(tmp_path, published, test=0))
    ids = {split: {row["extra_info"]["id"] for row in found} for split, found in rows.items()}
    assert ids["test"] == {record["_id"] for record in hotpotqa()[56:]}
    assert len(ids["train"] | ids["val"]) == 48 and not (ids["train"] | ids["val"]) & ids["test"]
    assert [row["extra_info"]["id"] for row in rows["test"]] == [record["_id"] for record in hotpotqa()[56:]]
    assert len(rows_of(made(tmp_path, published, "sample", test=5))["test"]) == 5


def test_same_seed_same_bytes_and_another_seed_another_sample(tmp_path, published):
    first, again, other = (made(tmp_path, published, name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert tree(first) == tree(again)
    assert tree(first)["train.parquet"] != tree(other)["train.parquet"]


def test_corpus_of_contexts_holds_every_paragraph_once(tmp_path, one_file):
    folder = made(tmp_path, one_file, train=50, val=10, test=12)
    passages = list(read_corpus(folder / "corpus.jsonl"))
    assert (
        len(passages) == 48 == len({passage.title for passage in passages}) == len({passage.id for passage in passages})
    )


def test_manifest_says_where_it_is_from_and_verify_sees_every_change(tmp_path, one_file):
    folder = made(tmp_path, one_file)
    manifest = verify(folder)
    assert (
        manifest["seed"] == 0
        and manifest["skipped"] == []
        and set(manifest["files"]) == {"train.parquet", "val.parquet", "test.parquet", "corpus.jsonl"}
    )
    assert manifest["splits"]["train"]["questions"] == 40 and list(manifest["sources"]) == [str(one_file)]
    with (folder / "corpus.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(AgentR1Error, match="corpus.jsonl is not the file that was made"):
        verify(folder)


def test_a_source_that_changed_is_noticed_and_one_that_is_gone_is_not_missed(tmp_path, one_file):
    folder = made(tmp_path, one_file)
    write_json(one_file, hotpotqa()[:61])
    with pytest.raises(AgentR1Error, match="mine.json has changed since .*delete that folder"):
        verify(folder)
    one_file.unlink()
    verify(folder)


# ------------------------------------------------------------------------------------------------------ what is corrupt


def without(key):
    return lambda record: record.pop(key)


def replaced(key, value):
    return lambda record: record.update({key: value})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("answer"), "no answer"),
        (replaced("answer", "  "), "no answer"),
        (replaced("question", 7), "no question"),
        (without("context"), "no context"),
        (replaced("context", []), "no context"),
        (replaced("context", [["Title"]]), r"context: not \[title"),
        (replaced("context", [["Title", "not a list"]]), "sentences are no strings"),
        (replaced("context", {"title": ["A"], "sentences": []}), "no sentences"),
        (replaced("context", {"title": ["A"], "sentences": [["x"], ["y"]]}), "1 titles and 2"),
        (replaced("supporting_facts", None), "no supporting_facts"),
        (replaced("_id", "5a" + "0" * 22), "a second time"),
    ],
)
def test_a_corrupt_record_is_named_and_left_out_only_when_asked(tmp_path, damage, reason):
    records = hotpotqa()
    damage(records[16])
    source = write_json(tmp_path / "mine.json", records)
    with pytest.raises(
        AgentR1Error, match=rf"1 of 72 records are corrupt: record 17 \(.*{reason}.*docs/data.md.*data.skip_bad=true"
    ):
        made(tmp_path, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json"]
    folder = made(tmp_path, source, skip_bad=True, train=51, val=8, test=12)
    assert len(verify(folder)["skipped"]) == 1 and "record 17" in verify(folder)["skipped"][0]


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
def test_what_is_wrong_with_a_record_of_musique(change, reason):
    with pytest.raises(BadRecord, match=reason):
        musique_record(musique()[0] | change)


def test_a_broken_line_is_named_by_its_number(tmp_path):
    source = write_jsonl(tmp_path / "musique.jsonl", musique())
    lines = source.read_text().splitlines()
    source.write_text("\n".join([*lines[:4], lines[4][:-30], *lines[5:]]) + "\n")
    sizes = {"name": "musique", "train": 12, "val": 4, "test": 7}
    with pytest.raises(AgentR1Error, match=r"1 of 24 records are corrupt: line 5 \(no JSON\)"):
        made(tmp_path, source, **sizes)
    assert verify(made(tmp_path, source, skip_bad=True, **sizes))["skipped"] == [f"{source}: line 5 (no JSON)"]


def test_a_file_of_another_form_is_told_all_that_it_lacks(tmp_path):
    mine = write_jsonl(tmp_path / "mine.jsonl", [{"question": "17 + 4?", "answer": "21"}] * 72)
    with pytest.raises(AgentR1Error, match=r"line 1 \(no type, no supporting_facts, no context\)"):
        made(tmp_path, mine)


def test_many_corrupt_records_are_counted_and_some_named(tmp_path):
    source = write_json(tmp_path / "mine.json", [*hotpotqa()[:60], *([None] * 7), 3, "x"])
    with pytest.raises(AgentR1Error, match=r"9 of 69 records are corrupt: record 61 \(no JSON object\), .*\.\.\."):
        made(tmp_path, source)


@pytest.mark.parametrize("content", [b"[" + b'{"_id": "1"}, ' * 10, b"[" * 100_000, b'[{"_id": "\xff"}]'])
def test_half_a_download_is_refused(tmp_path, content):
    (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(AgentR1Error, match="cut off or no JSON.*get the file again"):
        made(tmp_path, tmp_path / "mine.json", skip_bad=True)


def test_half_a_gzip_is_refused(tmp_path):
    source = write_json(tmp_path / "mine.json.gz", hotpotqa())
    source.write_bytes(source.read_bytes()[:-500])
    with pytest.raises(AgentR1Error, match="cut off or damaged.*get the file again"):
        made(tmp_path, source)


@pytest.mark.parametrize("content", [b"", b"[]", b"\n \n", b"hello\n"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(AgentR1Error, match="no usable record; is it the right file"):
        made(tmp_path, tmp_path / "mine.json", skip_bad=True)


def test_sizes_that_the_source_does_not_have(tmp_path, one_file, published):
    with pytest.raises(ConfigError, match="72 questions and train, val and test take 80"):
        made(tmp_path, one_file, train=60)
    with pytest.raises(ConfigError, match="56 questions and train and val take 68"):
        made(tmp_path, published, train=60)
    with pytest.raises(ConfigError, match="16 questions and test take 17"):
        made(tmp_path, published, test=17)
    with pytest.raises(ConfigError, match="data.test=0 .*one file"):
        made(tmp_path, one_file, test=0)


def test_a_source_that_is_not_there(tmp_path, published):
    with pytest.raises(AgentR1Error, match="nowhere does not exist; give a published file"):
        made(tmp_path, tmp_path / "nowhere")
    (published / "hotpot_train_v1.1.json").unlink()
    with pytest.raises(AgentR1Error, match=r"has no hotpot_train_v1.1.json \(or hotpot_train_v1.1.json.gz\)"):
        made(tmp_path, published)
    with pytest.raises(ConfigError, match="neither a file nor one of contexts, beir-hotpotqa .did you mean 'contexts'"):
        made(tmp_path, write_json(tmp_path / "x.json", hotpotqa()), corpus="context")


# ------------------------------------------------------------------------------------------------------------- the hub


def publish(folder: Path, config: str | None, **splits: list[dict]) -> None:
    """A repository of the hub as its copy on disk: a table of each split, and the README that names the configuration."""
    part = folder / (config or "data")
    part.mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        pq.write_table(pa.Table.from_pylist(records), part / f"{split}-00000-of-00001.parquet")
    files = [{"split": split, "path": f"{part.name}/{split}-*"} for split in splits]
    named = {"configs": [{"config_name": config or "default", "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(named)}\n---\n")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The package `datasets` without a network. It takes a folder called OWNER/NAME here for the repository of that name;
    as many records count as published as are made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for dataset in (DISTRACTOR, FULLWIKI, TWOWIKI, MUSIQUE):
        monkeypatch.setitem(dataset.counts, "train", 56 if dataset in (DISTRACTOR, FULLWIKI) else 16)
        monkeypatch.setitem(dataset.counts, "validation", 16 if dataset in (DISTRACTOR, FULLWIKI) else 8)
    records = [hub_form(record) for record in hotpotqa()]
    publish(tmp_path / DISTRACTOR.hub, "distractor", train=records[:56], validation=records[56:])
    return tmp_path


def from_hub(tmp_path, name="data", **changes) -> Path:
    build(DataConfig(**SIZES | {"test": 0} | changes), 0, tmp_path / name)
    return tmp_path / name


def test_the_hub_gives_the_same_rows_as_the_files(tmp_path, published, hub):
    folder = from_hub(tmp_path)
    assert rows_of(folder) == rows_of(made(tmp_path, published, "local", test=0))
    assert verify(folder)["dataset"] == {"hub": "hotpotqa/hotpot_qa", "revision": DISTRACTOR.revision}


def test_fullwiki_is_another_configuration_of_the_same(hub):
    records = [hub_form(record) for record in hotpotqa()]
    publish(hub / FULLWIKI.hub, "fullwiki", train=records[:56], validation=records[40:56])
    folder = hub / "data"
    build(DataConfig(**SIZES | {"name": "hotpotqa-fullwiki"}), 0, folder)
    held_out = {row["prompt"][-1]["content"] for row in rows_of(folder)["test"]}
    assert held_out <= {record["question"] for record in records[40:56]}


@pytest.mark.parametrize(("dataset", "records"), [(TWOWIKI, twowiki), (MUSIQUE, musique)])
def test_the_other_two_come_from_the_hub_as_from_files(hub, dataset, records):
    name, made_here = ("twowiki", [hub_form(r) for r in records()]) if dataset is TWOWIKI else ("musique", records())
    publish(hub / dataset.hub, dataset.config, train=made_here[:16], validation=made_here[16:])
    for split, part in (("train", records()[:16]), ("validation", records()[16:])):
        (write_json if dataset is TWOWIKI else write_jsonl)(hub / "files" / dataset.files[split], part)
    sizes = {"name": name, "train": 10, "val": 4, "test": 6}
    for folder, source in (("from-hub", None), ("from-files", str(hub / "files"))):
        build(DataConfig(**sizes, **({"source": source} if source else {})), 0, hub / folder)
    assert rows_of(hub / "from-hub") == rows_of(hub / "from-files")


def test_fewer_records_than_published_are_half_a_download(tmp_path, hub, monkeypatch):
    monkeypatch.setitem(DISTRACTOR.counts, "train", 57)
    with pytest.raises(AgentR1Error, match="56 records in train and 57 are published.*data.source=DIR"):
        from_hub(tmp_path)


def test_no_network_and_no_package_are_one_line_with_the_way_around(tmp_path, hub, monkeypatch):
    shutil.rmtree(tmp_path / "hotpotqa")
    with pytest.raises(AgentR1Error, match=r"cannot fetch hotpotqa/hotpot_qa \(\w+: .*; mend.*hotpot_train_v1.1.json"):
        from_hub(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(AgentR1Error, match=r"pip install 'agent-r1\[qa\]'.*data.source=DIR"):
        from_hub(tmp_path)


# --------------------------------------------------------------------------------------------------------- other corpora


@pytest.fixture
def beir(tmp_path, monkeypatch):
    """The hub's copy of BEIR's corpus: 50 passages in two files, in the form and under the names that it has there."""
    place = tmp_path / "server" / "corpus" / "corpus"
    place.mkdir(parents=True)
    for number, start in enumerate((0, 30)):
        rows = [{"_id": str(i), "title": f"T{i}", "text": "" if i == 7 else "x"} for i in range(start, 50)[:30]]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{number:04d}.parquet")
    asked = []

    def snapshot_download(repo_id, *, repo_type, revision, allow_patterns) -> str:
        asked.append((repo_id, repo_type, revision, allow_patterns))
        return str(tmp_path / "server")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return SimpleNamespace(place=place, asked=asked)


def test_beirs_corpus_comes_from_the_hub(tmp_path, beir, one_file, monkeypatch):
    monkeypatch.setattr(corpora.beir_hotpotqa, "__defaults__", (50,))
    found = list(read_corpus(made(tmp_path, one_file, corpus="beir-hotpotqa") / "corpus.jsonl"))
    assert [(p.id, p.title, p.text) for p in found] == [(str(i), f"T{i}", "" if i == 7 else "x") for i in range(50)]
    ((name, kind, revision, patterns),) = beir.asked
    assert (name, kind, revision) == ("BeIR/hotpotqa", "dataset", "refs/convert/parquet")
    assert all(fnmatch.fnmatch(str(p.relative_to(tmp_path / "server")), patterns[0]) for p in beir.place.iterdir())


def test_a_copy_on_the_hub_that_is_not_whole(beir, monkeypatch):
    with pytest.raises(AgentR1Error, match="has 50 passages and 51 are published; delete it"):
        list(corpora.beir_hotpotqa(51))
    second = beir.place / "0001.parquet"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(AgentR1Error, match="server cannot be read .*delete it"):
        list(corpora.beir_hotpotqa(50))

    def offline(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(AgentR1Error, match=r"ConnectionError: no route.*corpus.jsonl with data.corpus=FILE"):
        list(corpora.beir_hotpotqa(50))


def test_a_corpus_in_beirs_wiki18s_and_our_form(tmp_path, one_file):
    beir = [
        {"_id": "12", "title": "Moby-Dick", "text": "A novel.", "metadata": {}},
        {"_id": "13", "title": "E", "text": ""},
    ]
    wiki = [{"id": "0", "contents": '"Moby-Dick"\nA novel\nof two lines.'}]
    ours = [{"id": "a", "title": "Moby-Dick", "text": "A novel."}]
    found = []
    for number, (name, lines) in enumerate((("b.jsonl", beir), ("w.jsonl.gz", wiki), ("o.jsonl", ours))):
        corpus = write_jsonl(tmp_path / name, lines)
        folder = made(tmp_path, one_file, str(number), corpus=str(corpus))
        found.append([(p.id, p.title, p.text) for p in read_corpus(folder / "corpus.jsonl")])
        assert str(corpus) in verify(folder)["sources"]
    assert found[0] == [("12", "Moby-Dick", "A novel."), ("13", "E", "")]
    assert found[1] == [("0", "Moby-Dick", "A novel\nof two lines.")]
    assert found[2] == [("a", "Moby-Dick", "A novel.")]


def test_a_corrupt_line_of_a_corpus_is_named(tmp_path, one_file):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        '{"_id": "1", "title": "A", "text": "x"}\n\n{"_id": "2", "title": "B"\n{"_id": 3, "title": "C", "text": "z"}\n'
    )
    with pytest.raises(AgentR1Error, match=r"2 of 3 records are corrupt: line 3 \(no JSON\), line 4 \(no _id\)"):
        made(tmp_path, one_file, corpus=str(corpus))
    folder = made(tmp_path, one_file, corpus=str(corpus), skip_bad=True)
    assert [p.id for p in read_corpus(folder / "corpus.jsonl")] == ["1"]
    assert verify(folder)["skipped"] == [f"{corpus}: line 3 (no JSON)", f"{corpus}: line 4 (no _id)"]


def page(name: str, title: str, *paragraphs: str) -> dict:
    """A line of kilt_knowledgesource.json."""
    return {"_id": name, "wikipedia_id": name, "wikipedia_title": title, "text": [f"{title}\n", *paragraphs],
            "anchors": [], "categories": "Novels", "history": {}, "wikidata_info": {}}  # fmt: skip


def test_a_page_of_kilt_becomes_passages_of_a_hundred_words(tmp_path, one_file):
    words = [f"w{i}" for i in range(230)]
    pages = [
        page("12", "Moby-Dick", " ".join(words[:150]) + "\n", "Section::::Plot.\n", " ".join(words[150:])),
        page("13", "Whales", "BULLET::::- Sperm whale\n", "BULLET::::1. Blue whale\n"),
        page("14", "Empty"),
    ]
    corpus = write_jsonl(tmp_path / "k.jsonl", pages)
    found = list(read_corpus(made(tmp_path, one_file, corpus=str(corpus)) / "corpus.jsonl"))
    assert [(p.id, p.title) for p in found] == [("12-0", "Moby-Dick"), ("12-1", "Moby-Dick"), ("12-2", "Moby-Dick"),
                                                ("13-0", "Whales")]  # fmt: skip
    assert " ".join(p.text for p in found[:3]).split() == words and len(found[0].text.split()) == 100
    assert found[3].text == "Sperm whale 1. Blue whale"
    bad = [pages[0], {**pages[1], "text": "no list"}, {**pages[2], "wikipedia_title": 7}]
    write_jsonl(corpus, bad)
    with pytest.raises(
        AgentR1Error, match=r"2 of 3 records are corrupt: line 2 \(no text\), line 3 \(no wikipedia_title\)"
    ):
        made(tmp_path, one_file, "bad", corpus=str(corpus))


# ------------------------------------------------------------------------------------------------------ on the command line


def test_from_the_file_to_an_index_that_finds_it(tmp_path, one_file, monkeypatch, capsys):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    settings = ["--preset=smoke", "data.name=hotpotqa", f"data.source={one_file}", "data.train=40", "data.val=8",
                "data.test=12", "rollout.prompts_per_step=8", "search.dim=512"]  # fmt: skip
    assert main("data", *settings) == 0 and main("index", *settings) == 0
    said = capsys.readouterr().out
    assert "questions: train 40, val 8, test 12; corpus: contexts" in said and "Flat over 48 passages" in said
    assert main("data", *settings) == 0 and "done before" in capsys.readouterr().out
    (index,) = (path for path in (tmp_path / "artifacts").iterdir() if path.name.startswith("index-"))
    assert PassageIndex.load(index).search(["Kafka"], 1)[0][0].title == "Franz Kafka"


# ------------------------------------------------------------------------------------------------------- evidence found


def play(folder: Path, chat: ChatFormat, searches: list[list[str]], answer: str | None, *settings: str) -> list:
    """Trajectories of one episode for each list of queries, all of the same first training question, and its answer."""
    index = folder.parent / f"index-{folder.name}"
    if not index.exists():
        build_index(folder / "corpus.jsonl", index, make_encoder("ngram", 512))
    tools = make_tools(["search"], searcher=Searcher(PassageIndex.load(index)), top_k=1)
    config = load_config("hotpotqa-tiny", ["rollout.max_context=1000", *settings])
    row = rows_of(folder)["train"][0]
    said = [[call(query=q) for q in queries] + [f"<answer>{answer}</answer>"] for queries in searches]
    policy = ScriptedPolicy(chat, lambda session, turn, ids: said[int(session)][turn])
    tasks = [Task(row, "g", str(i)) for i in range(len(said))]
    return asyncio.run(run_episodes(make_loop(policy, chat, tools, config.rollout, config.env), tasks, Sampling(200)))


@pytest.mark.parametrize(("name", "records"), [("hotpotqa", hotpotqa), ("twowiki", twowiki), ("musique", musique)])
def test_evidence_is_the_share_of_the_supporting_titles_that_searches_brought(tmp_path, chat, name, records):
    write = write_jsonl if name == "musique" else write_json
    folder = made(tmp_path, write(tmp_path / "x.json", records()), name=name, train=12, val=6, test=6)
    first, second = rows_of(folder)["train"][0]["extra_info"]["supporting"]
    other = next(p.title for p in read_corpus(folder / "corpus.jsonl") if p.title not in (first, second))
    searches = [[], [other], [first], [first, first, other], [second, other, first]]
    done = play(folder, chat, searches, "nobody knows")
    assert [t.metrics["evidence"] for t in done] == [0, 0, 0.5, 0.5, 1]
    assert {t.reward for t in done} == {0} and all("evidence_reward" not in t.reward_parts for t in done)
    card = eval_card(done, model="m", split="train", seed=0, retriever="r", started=0.0)
    assert card["evidence"] == pytest.approx(0.4)


def test_evidence_is_paid_by_choice_and_beside_the_answer(tmp_path, chat, one_file):
    folder = made(tmp_path, one_file)
    row = rows_of(folder)["train"][0]
    titles, answer = row["extra_info"]["supporting"], row["reward_model"]["ground_truth"][0]
    wrong = play(folder, chat, [[], titles[:1], titles], "nobody knows", "env.evidence_reward=0.3")
    assert [t.reward for t in wrong] == pytest.approx([0, 0.15, 0.3])
    (right,) = play(folder, chat, [titles], answer, "env.evidence_reward=0.3")
    assert right.reward == pytest.approx(1.3) == sum(right.reward_parts.values())
    # Paid to the last action, like the rest of the outcome; and once, however often a title came up.
    (again,) = play(folder, chat, [[titles[0]] * 3], answer, "env.evidence_reward=0.3")
    assert again.reward == pytest.approx(1.15) == again.steps[-1].reward


def test_what_was_made_before_these_settings_existed_keeps_its_name():
    """The laptop's artifacts of the first release; set, the new fields count. An address never does."""
    base = load_config("laptop")
    assert fingerprint(DataConfig()) == fingerprint(DataConfig(corpus="contexts", skip_bad=False, source=None))
    old = {key: value for key, value in vars(base.data).items() if key not in ("source", "corpus", "skip_bad")}
    assert fingerprint(base.data) == fingerprint(old)
    assert len({fingerprint(load_config("laptop", [o])) for o in ("seed=0", "search.index=Flat", "seed=1")}) == 3
    assert fingerprint(load_config("laptop", ["search.url=http://127.0.0.1:8100"])) == fingerprint(base)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.name=hotpot", "data.name='hotpot' is unknown .did you mean 'hotpotqa'"),
        ("data.source=x.json", "tinyhop is generated and takes no data.source"),
        ("search.index=flat", "search.index='flat' is unknown; choose auto, Flat"),
        ("search.url=localhost", "search.url='localhost' is no address"),
    ],
)
def test_settings_that_make_no_sense_together(override, says):
    with pytest.raises(ConfigError, match=says):
        load_config("laptop", [override])


def test_every_data_set_has_a_reader():
    assert set(DATASETS) == {"tinyhop", *PUBLISHED}
