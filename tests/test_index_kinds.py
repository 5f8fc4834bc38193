"""Room 2, large corpora: shards that survive anything, approximate kinds with their recall, what is chosen when."""

from __future__ import annotations

import json
import random
from pathlib import Path

import faiss
import numpy as np
import pytest

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.search import index as index_module
from agent_r1.search.encoders import NgramEncoder
from agent_r1.search.index import PassageIndex, build_index, choose_kind, recall_against_flat

COUNT = 1500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(2000)]
    lines = [
        {"id": f"p{i}", "title": " ".join(rng.sample(words, 2)), "text": " ".join(rng.sample(words, 6))}
        for i in range(COUNT)
    ]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Counting(NgramEncoder):
    """Counts the passages that it encodes; dies after `limit` of them."""

    def __init__(self, dim: int = 64, limit: int = 10**9):
        super().__init__(dim)
        self.encoded, self.limit = 0, limit

    def encode_passages(self, passages):
        if self.encoded >= self.limit:
            raise KeyboardInterrupt
        self.encoded += len(passages)
        return super().encode_passages(passages)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(index_module, "SHARD", 250)


def vectors_of(folder: Path) -> np.ndarray:
    index = PassageIndex.load(folder)
    return index.vectors.copy()


# -------------------------------------------------------------------------------------------------------------- shards


def test_shards_give_the_same_bytes_as_one_piece(corpus, tmp_path, monkeypatch):
    build_index(corpus, tmp_path / "whole", NgramEncoder(64))
    monkeypatch.setattr(index_module, "SHARD", 700)  # not a divisor, nor a multiple of what the encoder takes at a time
    build_index(corpus, tmp_path / "sharded", NgramEncoder(64))
    assert (tmp_path / "whole" / "vectors.faiss").read_bytes() == (tmp_path / "sharded" / "vectors.faiss").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sharded", "whole"]


def test_an_interrupted_build_goes_on_and_a_lost_or_torn_shard_is_made_again(corpus, tmp_path, small_shards):
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, tmp_path / "index", Counting(limit=1000), shards=tmp_path / "shards")
    assert not (tmp_path / "index").exists()
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == [
        *(f"{i:05d}.npy" for i in range(4)),
        "made_of.json",
    ]
    (tmp_path / "shards" / "00001.npy").unlink()
    torn = tmp_path / "shards" / "00002.npy"
    torn.write_bytes(torn.read_bytes()[:-100])
    encoder = Counting()
    build_index(corpus, tmp_path / "index", encoder, shards=tmp_path / "shards")
    assert encoder.encoded == 4 * 250  # two that were not there yet, one lost, one torn
    assert not (tmp_path / "shards").exists()
    build_index(corpus, tmp_path / "fresh", NgramEncoder(64))
    np.testing.assert_array_equal(vectors_of(tmp_path / "index"), vectors_of(tmp_path / "fresh"))


def test_shards_of_another_encoder_or_corpus_are_not_used(corpus, tmp_path, small_shards):
    for other, dim in ((corpus, 128), (shortened(corpus, tmp_path), 64)):
        with pytest.raises(KeyboardInterrupt):
            build_index(other, tmp_path / "other", Counting(dim, limit=500), shards=tmp_path / "shards")
        encoder = Counting()
        build_index(corpus, tmp_path / f"index-{dim}", encoder, shards=tmp_path / "shards")
        assert encoder.encoded == COUNT


def shortened(corpus: Path, folder: Path) -> Path:
    path = folder / "other.jsonl"
    path.write_text("".join(corpus.read_text().splitlines(keepends=True)[1:]))
    return path


# --------------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize("kind", ["IVF32,PQ32", "IVF32,SQ8", "IVF32,Flat", "HNSW16", "HNSW16,SQ8"])
def test_an_approximate_index_finds_nearly_what_flat_finds_and_scores_it_exactly(corpus, tmp_path, small_shards, kind):
    build_index(corpus, tmp_path / "flat", NgramEncoder(256))
    manifest = build_index(corpus, tmp_path / "index", NgramEncoder(256), kind)
    flat, index = PassageIndex.load(tmp_path / "flat"), PassageIndex.load(tmp_path / "index")
    assert manifest["index"] == index.made_of["index"] == kind and isinstance(index.vectors, np.memmap)
    assert manifest["recall_at_10"] == recall_against_flat(index) > 0.8  # words at random have no cells
    assert recall_against_flat(flat) == 1.0
    queries = [passage.title for passage in flat.passages[:100]]
    same = 0
    for exact, found in zip(flat.search(queries, 3), index.search(queries, 3), strict=True):
        scores = {hit.id: hit.score for hit in exact}
        same += exact[0].id == found[0].id
        assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
        assert all(abs(scores[hit.id] - hit.score) < 1e-5 for hit in found if hit.id in scores)
    assert same >= 95


def test_recall_is_measured_and_not_assumed(corpus, tmp_path):
    """An index that looks into one cell of 64 misses a lot, and says so."""
    build_index(corpus, tmp_path / "index", NgramEncoder(64), "IVF64,PQ8")
    index = PassageIndex.load(tmp_path / "index")
    good = recall_against_flat(index)
    faiss.extract_index_ivf(index._candidates).nprobe = 1
    assert recall_against_flat(index) < good - 0.1


def test_ivf_lists_stay_on_the_disk(corpus, tmp_path):
    build_index(corpus, tmp_path / "index", NgramEncoder(64), "IVF32,PQ8")
    index = PassageIndex.load(tmp_path / "index")
    assert isinstance(faiss.downcast_InvertedLists(index._candidates.invlists), faiss.OnDiskInvertedLists)


def test_fewer_candidates_than_asked_for_are_no_passages(tmp_path):
    lines = [{"id": str(i), "title": f"word{i % 4}", "text": f"word{i % 4}"} for i in range(64)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_index(tmp_path / "c.jsonl", tmp_path / "index", NgramEncoder(64), "IVF4,Flat")
    index = PassageIndex.load(tmp_path / "index")
    faiss.extract_index_ivf(index._candidates).nprobe = 1
    (hits,) = index.search(["word2"], 64)
    assert 0 < len(hits) < 64 and all(np.isfinite(hit.score) for hit in hits)


@pytest.mark.parametrize(
    ("count", "dim", "gigabytes", "kind"),
    [
        (3_000, 2048, 1, "Flat"),  # the laptop
        (200_000, 768, 16, "Flat"),
        (200_001, 768, 16, "HNSW32"),
        (5_233_329, 768, 200, "HNSW32"),  # all abstracts of Wikipedia: 16 GB of vectors
        (5_233_329, 768, 16, "IVF8192,PQ96"),
        (5_233_329, 100, 1, "IVF8192,SQ8"),
        (21_015_324, 768, 64, "IVF16384,PQ96"),
    ],
)
def test_auto_looks_at_the_corpus_and_the_memory(count, dim, gigabytes, kind):
    assert choose_kind(count, dim, gigabytes * 1e9) == kind


@pytest.mark.parametrize("kind", ["IVF32,PQ7", "IVF9000,PQ8", "IVF32,nonsense"])
def test_a_kind_that_does_not_fit_is_refused(corpus, tmp_path, kind):
    with pytest.raises(
        ConfigError, match=f"search.index={kind} does not fit 1500 vectors of width 64.*search.index=auto"
    ) as e:
        build_index(corpus, tmp_path / "index", NgramEncoder(64), kind)
    assert "\n" not in str(e.value) and not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "vectors.npy").unlink(), "vectors.npy is missing or damaged"),
        (lambda folder: (folder / "vectors.npy").write_bytes(b"\x93NUMPY half"), "vectors.npy is missing or damaged"),
        (lambda folder: np.save(folder / "vectors.npy", np.zeros((5, 64), np.float32)), "holds 5 vectors"),
        (lambda folder: replace(folder, faiss.IndexFlatIP(64)), "is not an inner-product index of kind IVF32,PQ8"),
        (lambda folder: replace(folder, faiss.IndexHNSWFlat(64, 8)), "is not an inner-product index"),  # of distances
        (lambda folder: metric(folder), "damaged or of another version"),
    ],
)
def test_a_damaged_or_foreign_index_is_refused(corpus, tmp_path, damage, says):
    build_index(corpus, tmp_path / "index", NgramEncoder(64), "IVF32,PQ8")
    damage(tmp_path / "index")
    with pytest.raises(AgentR1Error, match=says):
        PassageIndex.load(tmp_path / "index", corpus)


def replace(folder: Path, other: faiss.Index) -> None:
    faiss.write_index(other, str(folder / "vectors.faiss"))


def metric(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("inner product of unit vectors", "l2"))


def test_an_index_without_a_kind_is_flat(corpus, tmp_path):
    """As of the first release."""
    build_index(corpus, tmp_path / "index", NgramEncoder(64))
    path = tmp_path / "index" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["index"]
    path.write_text(json.dumps(manifest))
    assert PassageIndex.load(tmp_path / "index").search(["x"], 1) is not None
