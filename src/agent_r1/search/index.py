"""The index: in come `corpus.jsonl` and an encoder, out go the passages nearest to a query. Next: `searcher.py`.

An index is a folder that is built once and then only read:

    index/manifest.json   what it was made of: encoder and its settings, hash of the corpus, count, kind
    index/vectors.faiss   kind Flat: a FAISS IndexFlatIP, every passage vector, compared exactly (no approximation)
                          IVF, HNSW: an approximate FAISS index, which proposes candidates ...
    index/vectors.npy     ... whose exact vectors, read from the disk where needed, then decide (not with Flat)
    index/encoder.npz     what the encoder learned from the corpus (the n-gram encoder only)

Which kind? Flat compares a query with everything: exact, and quick enough for some hundred thousand passages. HNSW walks
a graph over all vectors, which must fit into memory. IVF,PQ keeps a few bytes a passage, in lists that are mapped from the
disk: for five million passages on a machine that trains as well. `choose_kind` knows the sizes, and what an approximation
loses against Flat is measured when it is built.

Encoding millions of passages takes hours. Vectors are appended to one file, so the next build goes on where an interrupted
one has stopped.

The manifest is written last: a folder that has one is a whole index. It refuses to be used with a corpus or an encoder other
than its own. A mixture would still return passages, only wrong ones, and the agent would learn that searching does not help.
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
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.ground.files import locked, sha256, write_whole
from agent_r1.ground.ui import progress
from agent_r1.search.encoders import Encoder, make_encoder

if TYPE_CHECKING:
    import faiss

    from agent_r1.data.storage import Passage

FORMAT = 1
METRIC = "inner product of unit vectors"
MANIFEST = "manifest.json"
REBUILD = "delete that folder, or set search.index=auto, and `agent-r1 index` builds it again"
CHUNK = 256
"""Queries that are encoded and compared at a time; it bounds memory."""
ADDED = 50_000
"""Vectors that FAISS gets at a time while an index is built."""
SPARE = {"Flat": 5, "approximate": 50}
"""Candidates taken from FAISS beyond those asked for; see `PassageIndex.nearest`."""
EXACT = 200_000
"""Up to this many passages an exact search takes some ten milliseconds, and nothing else is worth its error."""
SMALL = 1 << 26
"""Up to this many numbers in the index, one thread is best: starting more, while PyTorch's spin, costs more."""


@dataclass(frozen=True)
class Hit:
    """A passage found, with the cosine of its angle to the query (-1 to 1)."""

    id: str
    title: str
    text: str
    score: float


# ------------------------------------------------------------------------------------------------------------ building


def build_index(
    corpus: Path, out: Path, encoder: Encoder, kind: str = "auto", memory: float = math.inf
) -> dict[str, Any]:
    """Encode every passage of `corpus` and put the index into the folder `out`, which has none yet.

    `kind` is a FAISS factory string, or auto: `choose_kind` with that many bytes of memory.
    Returns the manifest. Raises AgentR1Error where the corpus is wrong, or `out` is taken or cannot be written.
    """
    import faiss

    corpus, out = Path(corpus), Path(out)
    if (out / MANIFEST).exists():
        raise AgentR1Error(
            f"{out} is taken; use it as it is, delete it, or choose another folder", code="already_exists"
        )
    passages, digest = _read_corpus(corpus)
    pairs = [(passage.title, passage.text) for passage in passages]
    encoder.fit(pairs)
    if kind == "auto":
        kind = choose_kind(len(pairs), encoder.dim, memory)
    index = _empty_index(kind, encoder.dim, len(pairs))
    made_of = {"encoder": encoder.settings, "dim": encoder.dim, "metric": METRIC, "count": len(pairs),
               "corpus_sha256": digest}  # fmt: skip
    where = os.path.relpath(corpus.resolve(), out.resolve())  # relative: a run folder may be moved as a whole
    manifest = {"format": FORMAT, **made_of, "corpus": where, "index": kind}
    # Named for what the vectors are made of: they stay when a build is interrupted, and serve an index of another kind too.
    name = f"vectors-{hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked(out.parent / f".lock-{name}"):
            encoded = out.parent / f".{name}.npy"
            vectors = encode_corpus(pairs, encoder, encoded)
            out.mkdir(exist_ok=True)
            encoder.save(out)
            _fill(index, vectors)
            faiss.write_index(index, str(out / "vectors.faiss"))
            if kind == "Flat":
                encoded.unlink()
            else:
                encoded.rename(out / "vectors.npy")
                manifest["recall_at_10"] = recall_against_flat(PassageIndex(passages, index, vectors, encoder))
        manifest["files"] = {path.name: sha256(path) for path in sorted(out.iterdir())}  # for eval cards
        write_whole(out / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # FAISS reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or first_line(error)
        raise AgentR1Error(
            f"cannot write the index {out} ({reason}); free space or choose another folder", code="cannot_write"
        ) from None
    return manifest


def choose_kind(count: int, dim: int, memory: float) -> str:
    """The FAISS factory string for `count` vectors of width `dim`, with `memory` bytes free: half of it is ours."""
    size = 4 * count * dim
    if count <= EXACT and size <= memory / 2:
        return "Flat"
    if size + 300 * count <= memory / 2:  # 32 neighbours a vector, twice that in the lowest layer, 4 bytes each
        return "HNSW32"
    lists = 2 ** round(math.log2(4 * math.sqrt(count)))  # FAISS's own advice is 4 to 16 times the root
    return f"IVF{lists},PQ{dim // 8}" if dim % 8 == 0 else f"IVF{lists},SQ8"


def encode_corpus(pairs: list[tuple[str, str]], encoder: Encoder, path: Path) -> np.ndarray:
    """Vectors of all passages, float32 [count, dim], mapped from the file `path`.

    They are appended to it, `encoder.chunk` at a time. Whole chunks that are there already are kept.
    """
    header, size = io.BytesIO(), 4 * encoder.dim * encoder.chunk
    shape = (len(pairs), encoder.dim)
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    starts = range(0, len(pairs), encoder.chunk)
    with path.open("ab") as file, progress("encoding", len(starts)) as advance:
        done = (file.tell() - len(header.getvalue())) // size
        if done < 0:  # not even the header is whole
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
    """Made before hours are spent on encoding, because it is where FAISS says what it thinks of `kind`."""
    import faiss

    try:
        index = faiss.index_factory(dim, kind, faiss.METRIC_INNER_PRODUCT)
        least = max(getattr(index, "nlist", 0), 256 if "PQ" in kind else 0)  # a centre for each cell and for each code
        problem = f"it takes {least} passages to learn from" if count < least else ""
    except RuntimeError as error:  # FAISS's one exception; it begins with the place in its source
        problem = str(error).splitlines()[0].rpartition(": ")[2]
    if problem:
        raise ConfigError(
            f"search.index={kind} does not fit {count} vectors of width {dim} ({problem}); set search.index=auto",
            code="unfit_index",
        )
    return index


def _fill(index: faiss.Index, vectors: np.ndarray) -> None:
    """Train where the kind has something to learn, and add all vectors."""
    import faiss

    count = len(vectors)
    ivf = index if isinstance(index, faiss.IndexIVF) else None
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False  # minutes of annealing for a filter that is not used here
    # Centres of cells and codes come from a sample: 64 vectors a cell, 39 for each of 256 codes.
    if not index.is_trained:
        wanted = min(count, max(64 * ivf.nlist, 10_000) if ivf else EXACT)
        index.train(vectors[np.sort(np.random.default_rng(0).choice(count, wanted, replace=False))])
    for start in range(0, count, ADDED):
        index.add(np.ascontiguousarray(vectors[start : start + ADDED]))
    if ivf:  # how many cells, or neighbours, a query looks at is kept in the file
        ivf.nprobe = max(16, ivf.nlist // 64)
    elif hasattr(index, "hnsw"):
        index.hnsw.efSearch = 128


# ----------------------------------------------------------------------------------------------------------- searching


class PassageIndex:
    """A loaded index: passages in memory, candidates from FAISS. Make it with `load`."""

    def __init__(self, passages: list[Passage], candidates: faiss.Index, vectors: np.ndarray, encoder: Encoder):
        import faiss

        self.passages = passages
        self.encoder = encoder
        self.vectors = vectors
        """float32 [count, dim]: FAISS's own memory with Flat (gone with this object), otherwise a file that is mapped."""
        self.made_of: dict[str, Any] = {}
        """The manifest."""
        self._candidates = candidates
        self._spare = SPARE["Flat" if isinstance(candidates, faiss.IndexFlat) else "approximate"]

    @classmethod
    def load(cls, folder: Path, corpus: Path | None = None, encoder: Encoder | None = None) -> PassageIndex:
        """Read the index in `folder`.

        `corpus` is where the passages are now (default: where they were when the index was built). `encoder` is the
        one that the caller means to use (default: whichever the index was built with).
        Raises AgentR1Error where the index is missing, damaged, or of another corpus or encoder.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        encoder = encoder or make_encoder(manifest["encoder"]["name"], manifest["dim"])
        if encoder.settings != manifest["encoder"]:
            theirs, ours = (
                " ".join(f"{key}={value}" for key, value in settings.items() if value != "")
                for settings in (manifest["encoder"], encoder.settings)
            )
            raise AgentR1Error(
                f"the index {folder} was built with the encoder {theirs}, not with {ours}; {REBUILD}",
                code="index_of_other_encoder",
            )
        passages, digest = _read_corpus(Path(corpus) if corpus else folder / manifest["corpus"])
        if digest != manifest["corpus_sha256"]:
            raise AgentR1Error(
                f"the index {folder} belongs to another corpus (the SHA-256 differs); {REBUILD}",
                code="index_of_other_corpus",
            )
        candidates, vectors = _read_vectors(folder, (len(passages), manifest["dim"]))
        encoder.load(folder)
        index = cls(passages, candidates, vectors, encoder)
        index.made_of = manifest
        return index

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query, best first; fewer where the corpus is smaller.

        A query in which the encoder finds nothing to compare ("?!") has no hits. The result for a query does not
        depend on the other queries in the list.
        """
        found: list[list[Hit]] = []
        for start in range(0, len(queries), CHUNK):
            vectors = self.encoder.encode_queries(queries[start : start + CHUNK])
            best, scores = self.nearest(vectors, top_k)
            for vector, row, row_scores in zip(vectors, best.tolist(), scores.tolist(), strict=True):
                found.append(self._hits(row, row_scores) if vector.any() else [])
        return found

    def nearest(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions (int64) and scores (float32) of the best passages: both [len(queries), min(top_k, count)].

        FAISS hands a batch to BLAS, whose last digits depend on the size of the batch. Two passages with nearly equal
        scores could then change places, depending on the other queries, and the same seed would give another run. So
        FAISS proposes a few more than needed, and they are put in order here: by the score to five digits, then by the
        place in the corpus. With an approximate index this repairs most of its error.
        """
        import faiss

        if self.vectors.size <= SMALL:
            faiss.omp_set_num_threads(1)  # FAISS's own OpenMP library; PyTorch's threads stay as they are
        _, candidates = self._candidates.search(queries, min(top_k + self._spare, len(self.passages)))
        scores = np.einsum("qd,qcd->qc", queries, self.vectors[candidates])
        scores[candidates < 0] = -np.inf  # IVF says -1 where its lists hold no more
        order = np.lexsort((candidates, -np.round(scores, 5)))[:, :top_k]
        return np.take_along_axis(candidates, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def _hits(self, positions: list[int], scores: list[float]) -> list[Hit]:
        found = ((self.passages[p], score) for p, score in zip(positions, scores, strict=True) if p >= 0)
        return [Hit(passage.id, passage.title, passage.text, score) for passage, score in found]


def _read_corpus(path: Path) -> tuple[list[Passage], str]:
    """All passages and the SHA-256 of the file. Raises AgentR1Error where it is missing, damaged or empty."""
    from agent_r1.data.storage import read_corpus  # here, because pyarrow comes with it, and `--help` need not wait

    passages = list(read_corpus(path))
    if not passages:
        raise AgentR1Error(f"{path} is empty; make a corpus with `agent-r1 data`", code="no_records")
    (most_common, count), *_ = Counter(passage.id for passage in passages).most_common(1)
    if count > 1:
        raise AgentR1Error(
            f"{path}: {count} passages have the id {most_common!r}; give each its own", code="duplicate_ids"
        )
    return passages, sha256(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        state = "is not an index" if folder.exists() else "does not exist"
        raise AgentR1Error(f"the index {folder} {state}; build it with `agent-r1 index`", code="missing_index")
    try:
        manifest = json.loads(path.read_text())
        known = (manifest["format"], manifest["metric"]) == (FORMAT, METRIC)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise AgentR1Error(f"{path} is damaged or of another version; {REBUILD}", code="damaged_index")
    return manifest


def _read_vectors(folder: Path, shape: tuple[int, int]) -> tuple[faiss.Index, np.ndarray]:
    """What FAISS searches, and the exact vectors, float32 of that shape. Raises AgentR1Error."""
    import faiss

    try:
        # The inverted lists stay on the disk and come in as they are searched; other kinds have nothing to map.
        candidates = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP)
        if isinstance(candidates, faiss.IndexFlat):  # the same memory, not a copy
            vectors = faiss.rev_swig_ptr(candidates.get_xb(), candidates.ntotal * candidates.d)
            vectors = vectors.reshape(-1, candidates.d)
        else:
            vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        sound = vectors.shape == (candidates.ntotal, candidates.d) == shape
    except (RuntimeError, OSError, ValueError, EOFError):  # RuntimeError is FAISS's one exception
        sound = False
    if not sound:
        raise AgentR1Error(
            f"the vectors of the index {folder} are missing, damaged or not those of its manifest; {REBUILD}",
            code="damaged_index",
        )
    return candidates, vectors


# -------------------------------------------------------------------------------------------------- how good an index is


def recall_against_flat(index: PassageIndex, k: int = 10, sample: int = 200) -> float:
    """Share of the exact `k` nearest passages that `index` finds, over queries that are titles of the corpus."""
    import faiss

    chosen = np.random.default_rng(0).choice(len(index.passages), min(sample, len(index.passages)), replace=False)
    queries = index.encoder.encode_queries([index.passages[position].title for position in chosen])
    k = min(k, len(index.passages))
    _, best = faiss.knn(queries, index.vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    found, _ = index.nearest(queries, k)
    return sum(len(set(f) & set(b)) for f, b in zip(found.tolist(), best.tolist(), strict=True)) / best.size


def recall_at_k(index: PassageIndex, rows: Iterable[dict[str, Any]], k: int) -> float:
    """Share of correct queries whose passage is among the first `k`: the ceiling that retrieval puts on the agent.

    Each row of TinyHop lists in extra_info.lookups the facts that its answer needs, as {entity, relation, value,
    passage_id}. The correct query for a fact is "entity relation".
    """
    lookups = [lookup for row in rows for lookup in row["extra_info"]["lookups"]]
    results = index.search([f"{lookup['entity']} {lookup['relation']}" for lookup in lookups], k)
    found = [lookup["passage_id"] in {hit.id for hit in hits} for lookup, hits in zip(lookups, results, strict=True)]
    return sum(found) / len(found)


def title_recall(index: PassageIndex, rows: list[dict[str, Any]], k: int, sample: int = 500) -> float:
    """Share of the titles in extra_info.supporting among the first `k` hits, when the question itself is the query.

    A floor: an agent that searches a second time, with what it has read, finds more. Over the first `sample` rows.
    """
    rows = rows[:sample]
    results = index.search([row["prompt"][-1]["content"] for row in rows], k)
    wanted = [{title_key(title) for title in row["extra_info"]["supporting"]} for row in rows]
    found = [len(titles & {title_key(hit.title) for hit in hits}) for titles, hits in zip(wanted, results, strict=True)]
    return sum(found) / sum(map(len, wanted))
