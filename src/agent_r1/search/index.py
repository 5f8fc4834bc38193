"""Build an index of a corpus, and find the passages nearest to a query.

In: `corpus.jsonl` and an encoder. Out: passages with scores. Next: `searcher.py`. An index is a
folder, built once:

    index/manifest.json   its inputs: encoder and settings, hash of the corpus, count, kind
    index/vectors.faiss   kind Flat: a FAISS IndexFlatIP, every passage vector, compared exactly
                          IVF, HNSW: an approximate FAISS index, which proposes candidates ...
    index/vectors.npy     ... for the exact vectors, read from the disk to rank (not with Flat)
    index/encoder.npz     what the encoder learned from the corpus (the n-gram encoder only)

Flat compares a query with everything: exact, and fast up to some hundred thousand passages. HNSW
searches a graph over all vectors, in memory. IVF,PQ keeps a few bytes per passage in lists mapped
from the disk: for five million passages on a machine that also trains. `choose_kind` chooses by
size. An approximation's loss against Flat is measured at building.

Encoding millions of passages takes hours. Vectors are appended to a file, so an interrupted build
continues.

The manifest is written last: a folder with a manifest is complete. An index refuses another corpus
or encoder. A mixture would return wrong passages without an error, and the agent would learn that
searching does not help.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_r1.data.spellings import title_key
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.ground.files import hold_lock, sha256, write_whole
from agent_r1.ground.ui import progress
from agent_r1.search.encoders import Encoder, make_encoder

if TYPE_CHECKING:
    import faiss

    from agent_r1.data.storage import Passage

INDEX_FORMAT = 1
METRIC = "inner product of unit vectors"
INDEX_MANIFEST = "manifest.json"
REBUILD = "delete that folder, or set search.index=auto, and `agent-r1 index` builds it again"
QUERY_BATCH = 256
"""Queries per encoding and comparison; limits memory."""
VECTORS_PER_ADD = 50_000
"""Vectors per call of FAISS while an index is built."""
SPARE = {"Flat": 5, "approximate": 50}
"""Extra candidates requested from FAISS; see `PassageIndex.nearest`."""
EXACT = 200_000
"""Passages up to which exact search takes about ten milliseconds, so it is not approximated."""
ONE_THREAD_NUMBERS = 1 << 26
"""Numbers in the index up to which one thread is best.

Starting more costs more, while PyTorch's threads spin.
"""

BY_COLUMN_NUMBERS = 1 << 24
"""Numbers in the index up to which a second copy, by column, is worth its memory (64 MB)."""


@dataclass(frozen=True)
class Hit:
    """A retrieved passage, with the cosine of its angle to the query (-1 to 1)."""

    id: str
    title: str
    text: str
    score: float


# ----------------------------------------------------------------------------------------- building


def build_index(
    corpus: Path, out: Path, encoder: Encoder, kind: str = "auto", memory: float = math.inf
) -> dict[str, Any]:
    """Encode every passage of `corpus`, and write the index to the folder `out`.

    Return its manifest.

    `kind` is a FAISS factory string, or auto: `choose_kind` for `memory` bytes. Raises AgentR1Error
    for a wrong corpus, or if `out` has an index or cannot be written.
    """
    import faiss

    if (out / INDEX_MANIFEST).exists():
        raise AgentR1Error(
            f"{out} already exists; use it, delete it, or choose another folder",
            code="already_exists",
        )
    passages, digest = _read_corpus(corpus)
    pairs = [(passage.title, passage.text) for passage in passages]
    encoder.fit(pairs)
    if kind == "auto":
        kind = choose_kind(len(pairs), encoder.dim, memory)
    index = _empty_index(kind, encoder.dim, len(pairs))
    inputs = {
        "encoder": encoder.settings,
        "dim": encoder.dim,
        "metric": METRIC,
        "count": len(pairs),
        "corpus_sha256": digest,
    }
    # Relative, so that a run's folder may be moved.
    where = os.path.relpath(corpus.resolve(), out.resolve())
    manifest = {"format": INDEX_FORMAT, **inputs, "corpus": where, "index": kind}
    # Named by the vectors' inputs: they survive an interrupted build, and serve an index of another
    # kind too.
    text = json.dumps(inputs, sort_keys=True).encode()
    name = f"vectors-{hashlib.sha256(text).hexdigest()[:16]}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(out.parent / f".lock-{name}"):
            vectors_file = out.parent / f".{name}.npy"
            vectors = encode_corpus(pairs, encoder, vectors_file)
            out.mkdir(exist_ok=True)
            encoder.save(out)
            _fill(index, vectors)
            faiss.write_index(index, str(out / "vectors.faiss"))
            if kind == "Flat":
                vectors_file.unlink()
            else:
                vectors_file.rename(out / "vectors.npy")
                manifest["recall_at_10"] = recall_against_flat(
                    PassageIndex(passages, index, vectors, encoder)
                )
        # For evaluation cards.
        manifest["files"] = {path.name: sha256(path) for path in sorted(out.iterdir())}
        write_whole(out / INDEX_MANIFEST, json.dumps(manifest, indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # FAISS reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or first_line(error)
        raise AgentR1Error(
            f"cannot write the index {out} ({reason}); free space or choose another folder",
            code="cannot_write",
        ) from None
    return manifest


def choose_kind(count: int, dim: int, memory: float) -> str:
    """Choose the FAISS factory string for `count` vectors of width `dim`.

    Uses half of `memory` (bytes).
    """
    size = 4 * count * dim
    if count <= EXACT and size <= memory / 2:
        return "Flat"
    # 32 neighbours per vector, twice that in the lowest layer, 4 bytes each.
    if size + 300 * count <= memory / 2:
        return "HNSW32"
    lists = 2 ** round(math.log2(4 * math.sqrt(count)))  # FAISS recommends 4 to 16 times the root
    if dim % 8 == 0:
        return f"IVF{lists},PQ{dim // 8}"
    return f"IVF{lists},SQ8"


def encode_corpus(pairs: list[tuple[str, str]], encoder: Encoder, path: Path) -> np.ndarray:
    """Encode all passages to the file `path`: float32 [count, dim], returned as a mapped array.

    Vectors are appended, `encoder.chunk` at a time. Complete chunks of an earlier build are kept.
    """
    header = io.BytesIO()
    size = 4 * encoder.dim * encoder.chunk  # bytes of one chunk
    shape = (len(pairs), encoder.dim)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    starts = range(0, len(pairs), encoder.chunk)
    with path.open("ab") as file, progress("encoding", len(starts)) as advance:
        done = (file.tell() - len(header.getvalue())) // size
        if done < 0:  # the header itself is incomplete
            file.truncate(0)
            file.write(header.getvalue())
        else:
            file.truncate(len(header.getvalue()) + done * size)
        for number, start in enumerate(starts):
            if number >= done:
                file.write(encoder.encode_passages(pairs[start : start + encoder.chunk]).tobytes())
            advance()
    return np.load(path, mmap_mode="r")


def _empty_index(kind: str, dim: int, count: int) -> faiss.Index:
    """Make an empty index. Done before hours of encoding, because FAISS may refuse `kind`."""
    import faiss

    try:
        index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
        least = getattr(index, "nlist", 0)  # a centre per cell
        if "PQ" in kind:
            least = max(least, 256)  # and 256 per code
        problem = ""
        if count < least:
            problem = f"it takes {least} passages to learn from"
    except RuntimeError as error:  # FAISS's only exception; its text begins with a source location
        problem = str(error).splitlines()[0].rpartition(": ")[2]
    if problem:
        raise ConfigError(
            f"search.index={kind} does not fit {count} vectors of width {dim} ({problem}); set "
            "search.index=auto",
            code="unfit_index",
        )
    return index


def _fill(index: faiss.Index, vectors: np.ndarray) -> None:
    """Train the index if its kind needs it, and add all vectors."""
    import faiss

    count = len(vectors)
    ivf = index if isinstance(index, faiss.IndexIVF) else None
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False  # minutes of annealing for an unused filter.
    # Centres of cells and codes come from a sample: 64 vectors per cell, 39 for each of 256 codes.
    if not index.is_trained:
        sample = max(64 * ivf.nlist, 10_000) if ivf else EXACT
        sample = min(count, sample)
        rows = np.random.default_rng(0).choice(count, sample, replace=False)
        index.train(vectors[np.sort(rows)])
    for start in range(0, count, VECTORS_PER_ADD):
        index.add(np.ascontiguousarray(vectors[start : start + VECTORS_PER_ADD]))
    if ivf:  # the file stores how many cells, or neighbours, a query visits
        ivf.nprobe = max(16, ivf.nlist // 64)
    elif hasattr(index, "hnsw"):
        index.hnsw.efSearch = 128


# ---------------------------------------------------------------------------------------- searching


class PassageIndex:
    """A loaded index: passages in memory, candidates from FAISS. Made by `load`."""

    def __init__(
        self,
        passages: list[Passage],
        candidates: faiss.Index,
        vectors: np.ndarray,
        encoder: Encoder,
    ):
        import faiss

        self.passages = passages
        self.encoder = encoder
        self.vectors = vectors
        """float32 [count, dim]: FAISS's with Flat, freed with this object; else a mapped file."""
        self.manifest: dict[str, Any] = {}
        self._candidates = candidates
        flat = isinstance(candidates, faiss.IndexFlat)
        # A small corpus is stored again by column for sparse queries, whose zeros FAISS would
        # multiply.
        by_columns = flat and encoder.sparse and vectors.size <= BY_COLUMN_NUMBERS
        self._columns = None
        if by_columns:
            self._columns = np.ascontiguousarray(vectors.T)
        self._spare = SPARE["Flat" if flat else "approximate"]

    @classmethod
    def load(
        cls, folder: Path, corpus: Path | None = None, encoder: Encoder | None = None
    ) -> PassageIndex:
        """Read the index in `folder`.

        `corpus` is the passages' present path (default: that of the build). `encoder` is the
        expected encoder (default: that of the build). Raises AgentR1Error if the index is missing
        or damaged, or has another corpus or encoder.
        """
        manifest = _read_manifest(folder)
        encoder = encoder or make_encoder(manifest["encoder"]["name"], manifest["dim"])
        if encoder.settings != manifest["encoder"]:
            theirs = _settings_text(manifest["encoder"])
            raise AgentR1Error(
                f"the index {folder} was built with the encoder {theirs}, not with "
                f"{_settings_text(encoder.settings)}; {REBUILD}",
                code="index_of_other_encoder",
            )
        passages, digest = _read_corpus(corpus or folder / manifest["corpus"])
        if digest != manifest["corpus_sha256"]:
            raise AgentR1Error(
                f"the index {folder} belongs to another corpus (the SHA-256 differs); {REBUILD}",
                code="index_of_other_corpus",
            )
        candidates, vectors = _read_vectors(folder, (len(passages), manifest["dim"]))
        encoder.load(folder)
        index = cls(passages, candidates, vectors, encoder)
        index.manifest = manifest
        return index

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` best passages for each query, best first.

        A smaller corpus gives fewer. A query without anything to compare ("?!") has no hits.
        Results do not depend on the other queries in the list.
        """
        results: list[list[Hit]] = []
        for start in range(0, len(queries), QUERY_BATCH):
            vectors = self.encoder.encode_queries(queries[start : start + QUERY_BATCH])
            best, scores = self.nearest(vectors, top_k)
            for vector, row, row_scores in zip(
                vectors, best.tolist(), scores.tolist(), strict=True
            ):
                results.append(self._hits(row, row_scores) if vector.any() else [])
        return results

    def nearest(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and scores of the best passages: [len(queries), min(top_k, count)].

        Positions are int64, and scores float32.

        FAISS uses BLAS, whose last digits depend on the batch size. Two passages with nearly equal
        scores could then swap because of other queries, and the same seed would give another run.
        So FAISS proposes extra candidates, which are ordered here: by the score to five digits,
        then by position. This also repairs most of an approximation's error.
        """
        import faiss

        k = min(top_k + self._spare, len(self.passages))
        if self._columns is not None:
            candidates = np.stack(
                [_nearest_by_columns(self._columns, query, k) for query in queries]
            )
        else:
            threads = faiss.omp_get_max_threads()
            if self.vectors.size <= ONE_THREAD_NUMBERS:
                faiss.omp_set_num_threads(1)
            _, candidates = self._candidates.search(queries, k)
            faiss.omp_set_num_threads(threads)  # PyTorch would keep the number in this thread
        scores = np.einsum("qd,qcd->qc", queries, self.vectors[candidates])
        scores[candidates < 0] = -np.inf  # IVF returns -1 if its lists have no more
        order = np.lexsort((candidates, -np.round(scores, 5)))[:, :top_k]
        return np.take_along_axis(candidates, order, axis=1), np.take_along_axis(
            scores, order, axis=1
        )

    def _hits(self, positions: list[int], scores: list[float]) -> list[Hit]:
        hits = []
        for position, score in zip(positions, scores, strict=True):
            if position >= 0:  # FAISS pads with -1
                passage = self.passages[position]
                hits.append(Hit(passage.id, passage.title, passage.text, score))
        return hits


def _nearest_by_columns(vectors_DN: np.ndarray, query_D: np.ndarray, k: int) -> np.ndarray:
    """Return `k` candidates, unordered. A query has some 60 columns of 2,048 that are not zero."""
    (columns,) = query_D.nonzero()
    scores_N = query_D[columns] @ vectors_DN[columns]
    return scores_N.argpartition(-k)[-k:]


def _read_corpus(path: Path) -> tuple[list[Passage], str]:
    """Read all passages and the file's SHA-256.

    Raise AgentR1Error if it is missing, damaged or empty.
    """
    from agent_r1.data.storage import (
        read_corpus,
    )  # here, because pyarrow comes with it, and `--help` need not wait

    passages = list(read_corpus(path))
    if not passages:
        raise AgentR1Error(
            f"{path} is empty; make a corpus with `agent-r1 data`", code="no_records"
        )
    (most_common, count), *_ = Counter(passage.id for passage in passages).most_common(1)
    if count > 1:
        raise AgentR1Error(
            f"{path}: {count} passages have the id {most_common!r}; give each its own",
            code="duplicate_ids",
        )
    return passages, sha256(path)


def _settings_text(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items() if value != "")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_MANIFEST
    if not path.exists():
        state = "is not an index" if folder.exists() else "does not exist"
        raise AgentR1Error(
            f"the index {folder} {state}; build it with `agent-r1 index`", code="missing_index"
        )
    try:
        manifest = bounds.read_json(path)
        readable = (manifest["format"], manifest["metric"]) == (INDEX_FORMAT, METRIC)
    except (ValueError, KeyError, TypeError):
        readable = False
    if not readable:
        raise AgentR1Error(
            f"{path} is damaged or of another version; {REBUILD}", code="damaged_index"
        )
    return manifest


def _read_vectors(folder: Path, shape: tuple[int, int]) -> tuple[faiss.Index, np.ndarray]:
    """Read the FAISS index and the exact vectors, float32 of that shape.

    Raise AgentR1Error for a fault.
    """
    import faiss

    try:
        # Inverted lists stay on the disk until searched; other kinds have nothing to map.
        candidates = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP)
        if isinstance(candidates, faiss.IndexFlat):  # shared memory instead of a copy
            vectors = faiss.rev_swig_ptr(candidates.get_xb(), candidates.ntotal * candidates.d)
            vectors = vectors.reshape(-1, candidates.d)
        else:
            vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        sound = vectors.shape == (candidates.ntotal, candidates.d) == shape
    except (RuntimeError, OSError, ValueError, EOFError):  # RuntimeError is FAISS's only exception
        sound = False
    if not sound:
        raise AgentR1Error(
            f"the vectors of the index {folder} are missing, damaged, or not those of its "
            f"manifest; {REBUILD}",
            code="damaged_index",
        )
    return candidates, vectors


# ------------------------------------------------------------------------------------------ quality


def recall_against_flat(index: PassageIndex, k: int = 10, sample: int = 200) -> float:
    """Return the share of the exact `k` nearest passages that `index` finds. Queries are titles."""
    import faiss

    positions = np.random.default_rng(0).choice(
        len(index.passages), min(sample, len(index.passages)), replace=False
    )
    titles = [index.passages[position].title for position in positions]
    queries = index.encoder.encode_queries(titles)
    k = min(k, len(index.passages))
    _, best = faiss.knn(queries, index.vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    approximate, _ = index.nearest(queries, k)
    common = 0
    for row, exact_row in zip(approximate.tolist(), best.tolist(), strict=True):
        common += len(set(row) & set(exact_row))
    return common / best.size


def recall_at_k(index: PassageIndex, rows: Iterable[dict[str, Any]], k: int) -> float:
    """Return the share of correct queries that find their passage: the agent's ceiling.

    Each row of TinyHop lists in extra_info.lookups the facts that its answer needs, as {entity,
    relation, value, passage_id}. The correct query for a fact is "entity relation".
    """
    lookups = []
    for row in rows:
        lookups += row["extra_info"]["lookups"]
    results = index.search([f"{lookup['entity']} {lookup['relation']}" for lookup in lookups], k)
    hit_count = 0
    for lookup, hits in zip(lookups, results, strict=True):
        hit_count += lookup["passage_id"] in [hit.id for hit in hits]
    return hit_count / len(lookups)


def title_recall(
    index: PassageIndex, rows: list[dict[str, Any]], k: int, sample: int = 500
) -> float:
    """Return the share of supporting titles among the first `k` hits for the question.

    A lower bound: an agent that searches again, with what it has read, finds more. Uses the first
    `sample` rows.
    """
    rows = rows[:sample]
    results = index.search([row["prompt"][-1]["content"] for row in rows], k)
    hit_count = 0
    title_count = 0
    for row, hits in zip(rows, results, strict=True):
        titles = {title_key(title) for title in row["extra_info"]["supporting"]}
        hit_count += len(titles & {title_key(hit.title) for hit in hits})
        title_count += len(titles)
    return hit_count / title_count
