"""Corpora in the published forms, and titles in any spelling."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import build_data, manifest_of, passages_in
from conftest import fails_with
from qa_files import hotpotqa, write_json, write_jsonl

from agent_r1.config.settings import DataConfig, EnvConfig
from agent_r1.data import corpora
from agent_r1.data.spellings import title_key
from agent_r1.env import HermesToolEnv
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import PassageIndex, build_index, title_recall
from agent_r1_recipes.laptop.demonstrator import lookups_of


@pytest.fixture
def one_file(tmp_path):
    return write_json(tmp_path / "mine.json", hotpotqa())


def made(tmp_path, source, **changes):
    sizes = {"name": "hotpotqa", "train": 40, "val": 8, "test": 12, "source": str(source)}
    return build_data(DataConfig(**sizes | changes), tmp_path / "data")


def test_a_folder_with_the_files_of_either_publisher_is_a_corpus(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "corpus.jsonl").write_text('{"_id": "1", "title": "T", "text": "x"}\n')
    part = tmp_path / "hub" / "corpus" / "corpus"
    part.mkdir(parents=True)
    rows = [{"_id": str(i), "title": f"T{i}", "text": "x"} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), part / "0000.parquet")
    for folder, count in (("hub", 50), ("mine", 1)):
        corpora.check_corpus(str(tmp_path / folder))
        assert len(list(corpora.corpus_passages(str(tmp_path / folder), [], False, []))) == count
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has neither .*parquet nor corpus.jsonl"):
        list(corpora.corpus_passages(str(tmp_path / "empty"), [], False, []))


WORDS = [f"w{i}" for i in range(230)]


def page(name: str, title: str, *paragraphs: str) -> dict:
    """A line of kilt_knowledgesource.json."""
    return {
        "_id": name,
        "wikipedia_id": name,
        "wikipedia_title": title,
        "text": [f"{title}\n", *paragraphs],
        "anchors": [],
        "categories": "Novels",
        "history": {},
        "wikidata_info": {},
    }


@pytest.mark.parametrize(
    ("name", "lines", "found"),
    [
        (
            "beir.jsonl",
            [
                {"_id": "12", "title": "Moby-Dick", "text": "A novel.", "metadata": {}},
                {"_id": "13", "title": "E", "text": ""},
            ],
            [("12", "Moby-Dick", "A novel."), ("13", "E", "")],
        ),
        (
            "wiki-18.jsonl.gz",
            [{"id": "0", "contents": '"Moby-Dick"\nA novel\nof two lines.'}],
            [("0", "Moby-Dick", "A novel\nof two lines.")],
        ),
        (
            "ours.jsonl",
            [{"id": "a", "title": "Moby-Dick", "text": "A novel."}],
            [("a", "Moby-Dick", "A novel.")],
        ),
        (
            "kilt.jsonl",
            [
                page(
                    "12",
                    "Moby",
                    " ".join(WORDS[:150]) + "\n",
                    "Section::::Plot.\n",
                    " ".join(WORDS[150:]),
                ),
                page("13", "Whales", "BULLET::::- Sperm whale\n", "BULLET::::1. Blue whale\n"),
                page("14", "Empty"),
            ],
            [
                *((f"12-{n}", "Moby", " ".join(WORDS[100 * n : 100 * n + 100])) for n in range(3)),
                ("13-0", "Whales", "Sperm whale 1. Blue whale"),
            ],
        ),
    ],
)
def test_a_corpus_in_each_published_form(tmp_path, one_file, name, lines, found):
    corpus = write_jsonl(tmp_path / name, lines)
    folder = made(tmp_path, one_file, corpus=str(corpus))
    assert [(p.id, p.title, p.text) for p in passages_in(folder)] == found and str(
        corpus
    ) in manifest_of(folder)["sources"]


def test_a_corrupt_line_of_a_corpus_is_named(tmp_path, one_file):
    good = json.dumps({"_id": "1", "title": "A", "text": "x"})
    bad = [
        ('{"_id": "2", "title": "B"', "no JSON"),
        ('{"_id": 3, "title": "C", "text": "z"}', "_id: input should be a valid string"),
        ('{"id": "4", "title": "", "text": ""}', "neither title nor text"),
        ('{"id": "5", "contents": "one line"}', r"contents: string should match pattern '\n'"),
        (json.dumps(page("13", "A") | {"text": "no list"}), "text: input should be a valid list"),
    ]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("\n".join([good, "", *(line for line, _ in bad)]))
    with pytest.raises(
        AgentR1Error, match=r"5 of 6 records are corrupt: line 3 \(no JSON\), line 4 \(_id: input"
    ):
        made(tmp_path, one_file, corpus=str(corpus))
    folder = made(tmp_path, one_file, corpus=str(corpus), skip_bad=True)
    assert [(p.id, p.title, p.text) for p in passages_in(folder)] == [("1", "A", "x")]
    assert manifest_of(folder)["skipped"] == [
        f"{corpus}: line {n} ({why})" for n, (_, why) in enumerate(bad, start=3)
    ]


SPELLINGS = [
    ("Björk Guðmundsdóttir", "Bjo\u0308rk Guðmundsdo\u0301ttir"),
    ("AT&T Corporation", "AT&amp;T Corporation"),
    ("IPod Touch", "iPod_Touch"),
    ("The  Wire", "The Wire"),
    ("Rock 'n' Roll", "Rock &#39;n&#39; Roll"),
]


@pytest.mark.parametrize(("ours", "theirs"), SPELLINGS)
def test_a_title_is_the_same_however_it_is_spelt(ours, theirs):
    assert title_key(ours) == title_key(theirs) and title_key(title_key(theirs)) == title_key(
        theirs
    )
    env = HermesToolEnv({}, EnvConfig())
    env.row = {"extra_info": {"supporting": [ours, "Other", theirs]}}
    env.titles = {theirs}
    assert env.evidence() == 0.5
    row = {
        "prompt": [{"content": f"Is {theirs} older than Other?"}],
        "reward_model": {"ground_truth": ["yes"]},
    }
    row["extra_info"] = {"supporting": ["Other", ours]}
    assert [lookup["entity"] for lookup in lookups_of(row)] == [ours, "Other"]


def test_titles_that_differ_are_two():
    pairs = [("Wasp", "WASP"), ("Faust", "Faust (opera)"), ("Résumé", "Resume"), ("A B", "AB")]
    assert not [pair for pair in pairs if title_key(pair[0]) == title_key(pair[1])]


def test_the_recall_of_an_index_counts_titles_in_any_spelling(tmp_path):
    corpus = write_jsonl(
        tmp_path / "c.jsonl",
        [{"id": str(i), "title": t, "text": "x"} for i, (_, t) in enumerate(SPELLINGS)],
    )
    build_index(corpus, tmp_path / "index", make_encoder("ngram", 512))
    rows = [
        {"prompt": [{"content": ours}], "extra_info": {"supporting": [ours]}}
        for ours, _ in SPELLINGS
    ]
    assert title_recall(PassageIndex.load(tmp_path / "index"), rows, len(SPELLINGS)) == 1.0


def test_a_pipe_for_a_table_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "corpus/corpus").mkdir(parents=True)
    os.mkfifo(tmp_path / "corpus/corpus/part.parquet")
    with fails_with("damaged_source", "is not a regular file"):
        list(corpora.read_folder(tmp_path))
