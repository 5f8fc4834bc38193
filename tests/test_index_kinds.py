"""Room 2, large corpora: encoding that goes on, approximate kinds with their recall, what is chosen
when."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from conftest import fails_with

from agent_r1.search.encoders import NgramEncoder
from agent_r1.search.index import PassageIndex, build_index, choose_kind, recall_against_flat

COUNT = 1500


class Counting(NgramEncoder):
    """Counts the passages that it encodes; dies where it would encode more than `limit` of them."""

    limit = 10**9

    def encode_passages(self, passages):
        if self.encoded + len(passages) > self.limit:
            raise KeyboardInterrupt
        self.encoded += len(passages)
        return super().encode_passages(passages)


ENCODER = Counting(64)  # one for all tests: it remembers the words that it has hashed


def counting(limit: int = 10**9) -> Counting:
    ENCODER.encoded, ENCODER.limit = 0, limit
    return ENCODER


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(2000)]
    lines = [
        {
            "id": f"p{i}",
            "title": " ".join(rng.sample(words, 2)),
            "text": " ".join(rng.sample(words, 6)),
        }
        for i in range(COUNT)
    ]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def flat(corpus) -> PassageIndex:
    build_index(corpus, corpus.parent / "flat", counting())
    return PassageIndex.load(corpus.parent / "flat")


@pytest.fixture
def ivf(corpus, tmp_path) -> Path:
    """The test's own copy of an approximate index."""
    made = corpus.parent / "ivf"
    if not made.exists():
        build_index(corpus, made, counting(), "IVF32,PQ8")
    shutil.copytree(made, tmp_path / "index")
    return tmp_path / "index"


# ---------------------------------------------------------------------------- encoding that goes on


def started(corpus: Path, folder: Path, limit: int = 1100) -> Path:
    """The vectors that a build has left that was interrupted behind `limit` passages at most."""
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, folder / "index", counting(limit))
    assert not (folder / "index").exists()
    (left,) = folder.glob(".vectors-*.npy")
    return left


@pytest.mark.parametrize(
    ("lost", "again"),
    [(0, COUNT - 4 * 256), (100, COUNT - 3 * 256)],
    ids=["nothing lost", "torn"],
)
def test_an_interrupted_build_goes_on_where_it_stopped(corpus, flat, tmp_path, lost, again):
    left = started(corpus, tmp_path)
    with left.open("ab") as file:
        file.truncate(file.tell() - lost)
    build_index(corpus, tmp_path / "index", counting())
    assert ENCODER.encoded == again and not left.exists()
    index = PassageIndex.load(tmp_path / "index")
    np.testing.assert_array_equal(index.vectors, flat.vectors)


def test_what_was_encoded_serves_an_index_of_another_kind_and_no_other_corpus(
    corpus, flat, tmp_path
):
    left = started(corpus, tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(corpus.read_text().splitlines(keepends=True)[1:]))
    build_index(other, tmp_path / "of another corpus", counting())
    assert ENCODER.encoded == COUNT - 1 and left.exists()
    build_index(corpus, tmp_path / "index", counting(), "HNSW16")
    assert ENCODER.encoded == COUNT - 4 * 256 and not left.exists()
    np.testing.assert_array_equal(PassageIndex.load(tmp_path / "index").vectors, flat.vectors)


# -------------------------------------------------------------------------------------------- kinds


def test_a_search_leaves_pytorch_its_threads(corpus, tmp_path):
    """FAISS and PyTorch share an OpenMP library, which has one number of threads for both."""
    build_index(corpus, tmp_path / "index", counting(), "HNSW16")
    index, before = PassageIndex.load(tmp_path / "index"), torch.get_num_threads()
    torch.set_num_threads(2)
    index.search(["a question"], 3)
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == 2


@pytest.mark.parametrize("kind", ["IVF32,PQ32", "HNSW16,SQ8"])
def test_an_approximate_index_finds_nearly_what_flat_finds_and_scores_it_exactly(
    corpus, flat, tmp_path, kind
):
    manifest = build_index(corpus, tmp_path / "index", counting(), kind)
    index = PassageIndex.load(tmp_path / "index")
    assert manifest["index"] == index.manifest["index"] == kind and isinstance(
        index.vectors, np.memmap
    )
    assert (
        manifest["recall_at_10"] == recall_against_flat(index) > 0.8
    )  # words at random have no cells
    assert recall_against_flat(flat) == 1.0
    queries = [passage.title for passage in flat.passages[:100]]
    same = 0
    for exact, found in zip(flat.search(queries, 3), index.search(queries, 3), strict=True):
        scores = {hit.id: hit.score for hit in exact}
        same += exact[0].id == found[0].id
        assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
        assert all(abs(scores[hit.id] - hit.score) < 1e-5 for hit in found if hit.id in scores)
    assert same >= 95


def test_ivf_lists_stay_on_the_disk_and_recall_is_measured_and_not_assumed(corpus, ivf):
    index = PassageIndex.load(ivf, corpus)
    assert isinstance(
        faiss.downcast_InvertedLists(index._candidates.invlists), faiss.OnDiskInvertedLists
    )
    good = recall_against_flat(index)
    faiss.extract_index_ivf(index._candidates).nprobe = 1  # it looks into one cell of 32
    assert recall_against_flat(index) < good - 0.1
    (hits,) = index.search([index.passages[0].title], COUNT)  # fewer than asked for
    assert 0 < len(hits) < COUNT and all(np.isfinite(hit.score) for hit in hits)


@pytest.mark.parametrize(
    ("count", "dim", "gigabytes", "kind"),
    [
        (3_000, 2048, 1, "Flat"),  # the laptop
        (200_001, 768, 16, "HNSW32"),
        (5_233_329, 768, 200, "HNSW32"),  # all abstracts of Wikipedia: 16 GB of vectors
        (5_233_329, 768, 16, "IVF8192,PQ96"),
        (21_015_324, 768, 64, "IVF16384,PQ96"),
    ],
)
def test_auto_looks_at_the_corpus_and_the_memory(count, dim, gigabytes, kind):
    assert choose_kind(count, dim, gigabytes * 1e9) == kind


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: (index / "vectors.npy").write_bytes(b"\x93NUMPY half"),
        lambda index: faiss.write_index(faiss.IndexFlatIP(64), str(index / "vectors.faiss")),
        lambda index: edit(index, metric="l2"),
    ],
)
def test_a_damaged_or_foreign_index_is_refused(corpus, ivf, damage):
    damage(ivf)
    with fails_with("damaged_index"):
        PassageIndex.load(ivf, corpus)


def edit(index: Path, **changes) -> None:
    manifest = json.loads((index / "manifest.json").read_text()) | changes
    (index / "manifest.json").write_text(json.dumps(manifest))
