"""The index: in come `corpus.jsonl` and an encoder, out go the passages nearest to a query. Next: `searcher.py`.

An index is a folder that is built once and then only read:

    index/manifest.json   what it was made of: encoder and its settings, hash of the corpus, count
    index/vectors.faiss   FAISS IndexFlatIP: every passage vector, compared exactly (no approximation)
    index/encoder.npz     what the encoder learned from the corpus (the n-gram encoder only)

It is written beside its place and renamed into it, so a folder of that name is always a whole index. And it refuses to
be used with a corpus or an encoder other than its own: a mixture would still return passages, only wrong ones, and the
agent would quietly learn that searching does not help.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_r1.errors import AgentR1Error
from agent_r1.search.encoders import Encoder, make_encoder

if TYPE_CHECKING:
    import faiss

    from agent_r1.data.rows import Passage

FORMAT = 1
FILES = {"manifest.json", "vectors.faiss", "encoder.npz"}
REBUILD = "build it again with `agent-r1 index`"
CHUNK = 256
"""Queries, or passages, that are encoded and compared at a time; it bounds memory."""
SPARE = 5
"""Candidates taken from FAISS beyond those asked for; see `PassageIndex._nearest`."""
SMALL = 1 << 26
"""Up to this many numbers in the index, one thread is best: starting more, while PyTorch's spin, costs more."""


@dataclass(frozen=True)
class Hit:
    """A passage found, with the cosine of its angle to the query (-1 to 1)."""

    id: str
    title: str
    text: str
    score: float


def build_index(corpus: Path, out: Path, encoder: Encoder) -> dict[str, Any]:
    """Encode every passage of `corpus` and put the index into the folder `out`, replacing an index that is there.

    Returns the manifest. Raises AgentR1Error where the corpus is wrong, or `out` is no index or cannot be written.
    """
    import faiss

    corpus, out = Path(corpus), Path(out)
    if out.exists() and not (out.is_dir() and set(os.listdir(out)) <= FILES):
        raise AgentR1Error(f"{out} holds more than an index, and building would delete it; choose another folder")
    passages, digest = _read_corpus(corpus)
    pairs = [(passage.title, passage.text) for passage in passages]
    encoder.fit(pairs)
    vectors = faiss.IndexFlatIP(encoder.dim)
    for start in range(0, len(pairs), CHUNK):
        vectors.add(encoder.encode_passages(pairs[start : start + CHUNK]))
    manifest = {
        "format": FORMAT,
        "encoder": encoder.settings,
        "dim": encoder.dim,
        "metric": "inner product of unit vectors",
        "count": len(passages),
        "corpus": os.path.relpath(corpus.resolve(), out.resolve()),  # relative: a run folder may be moved as a whole
        "corpus_sha256": digest,
    }
    try:
        beside = _fresh_folder(out.parent / f".{out.name}.partial")
        encoder.save(beside)
        faiss.write_index(vectors, str(beside / "vectors.faiss"))
        (beside / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
    except (OSError, RuntimeError) as error:  # FAISS reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise AgentR1Error(f"cannot write the index {out} ({reason}); free space or choose another folder") from None
    return manifest


class PassageIndex:
    """A loaded index: passages in memory, vectors in FAISS. Make it with `load`."""

    def __init__(self, passages: list[Passage], vectors: faiss.IndexFlatIP, encoder: Encoder):
        import faiss

        self.passages = passages
        self.encoder = encoder
        self._faiss_vectors = vectors
        # The same memory as a float32 array [count, dim], not a copy.
        self._vectors = faiss.rev_swig_ptr(vectors.get_xb(), vectors.ntotal * vectors.d).reshape(-1, vectors.d)

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
            raise AgentR1Error(
                f"the index {folder} was built with the encoder {_brief(manifest['encoder'])}, "
                f"not with {_brief(encoder.settings)}; {REBUILD}"
            )
        passages, digest = _read_corpus(Path(corpus) if corpus else folder / manifest["corpus"])
        if digest != manifest["corpus_sha256"]:
            raise AgentR1Error(f"the index {folder} belongs to another corpus (the SHA-256 differs); {REBUILD}")
        vectors = _read_vectors(folder)
        if (vectors.ntotal, vectors.d) != (len(passages), manifest["dim"]):
            raise AgentR1Error(
                f"the index {folder} holds {vectors.ntotal} vectors of width {vectors.d} for {len(passages)} passages "
                f"of width {manifest['dim']}; {REBUILD}"
            )
        encoder.load(folder)
        return cls(passages, vectors, encoder)

    def search(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` best passages for each query, best first; fewer where the corpus is smaller.

        A query in which the encoder finds nothing to compare ("?!") has no hits. The result for a query does not
        depend on the other queries in the list.
        """
        found: list[list[Hit]] = []
        for start in range(0, len(queries), CHUNK):
            vectors = self.encoder.encode_queries(queries[start : start + CHUNK])
            best, scores = self._nearest(vectors, top_k)
            for vector, row, row_scores in zip(vectors, best.tolist(), scores.tolist(), strict=True):
                found.append(self._hits(row, row_scores) if vector.any() else [])
        return found

    def _nearest(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions (int64) and scores (float32) of the best passages: both [len(queries), min(top_k, count)].

        FAISS hands a batch to BLAS, whose last digits depend on the size of the batch. Two passages with all but equal
        scores could then change places with the company that a query happens to keep, and one seed would no longer
        mean one run. So FAISS proposes a few more than needed, and their order is settled here, one by one: by the
        score to five digits, then by the place in the corpus.
        """
        import faiss

        if self._vectors.size <= SMALL:
            faiss.omp_set_num_threads(1)  # FAISS's own OpenMP library; PyTorch's threads stay as they are
        _, candidates = self._faiss_vectors.search(queries, min(top_k + SPARE, len(self.passages)))
        scores = np.einsum("qd,qcd->qc", queries, self._vectors[candidates])
        order = np.lexsort((candidates, -np.round(scores, 5)))[:, :top_k]
        return np.take_along_axis(candidates, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def _hits(self, positions: list[int], scores: list[float]) -> list[Hit]:
        pairs = zip((self.passages[position] for position in positions), scores, strict=True)
        return [Hit(passage.id, passage.title, passage.text, score) for passage, score in pairs]


def recall_at_k(index: PassageIndex, rows: Iterable[dict[str, Any]], k: int) -> float:
    """Share of correct queries whose passage is among the first `k`: the ceiling that retrieval puts on the agent.

    Each row lists in extra_info.lookups the facts that its answer needs, as {entity, relation, value, passage_id}. The
    correct query for a fact is "entity relation". Raises AgentR1Error where no row lists any.
    """
    lookups = [lookup for row in rows for lookup in row["extra_info"]["lookups"]]
    if not lookups:
        raise AgentR1Error("no row has extra_info.lookups, so recall cannot be measured; use TinyHop's rows")
    results = index.search([f"{lookup['entity']} {lookup['relation']}" for lookup in lookups], k)
    found = [lookup["passage_id"] in {hit.id for hit in hits} for lookup, hits in zip(lookups, results, strict=True)]
    return sum(found) / len(found)


def _read_corpus(path: Path) -> tuple[list[Passage], str]:
    """All passages and the SHA-256 of the file. Raises AgentR1Error where it is missing, damaged or empty."""
    from agent_r1.data.rows import read_corpus  # here, because pyarrow comes with it, and `--help` need not wait

    passages = list(read_corpus(path))
    if not passages:
        raise AgentR1Error(f"{path} is empty; make a corpus with `agent-r1 data`")
    (most_common, count), *_ = Counter(passage.id for passage in passages).most_common(1)
    if count > 1:
        raise AgentR1Error(f"{path}: {count} passages have the id {most_common!r}; give each its own")
    with path.open("rb") as file:
        return passages, hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.exists():
        state = "is not an index" if folder.exists() else "does not exist"
        raise AgentR1Error(f"the index {folder} {state}; build it with `agent-r1 index`")
    try:
        manifest = json.loads(path.read_text())
        known = manifest["format"] == FORMAT and {"encoder", "dim", "corpus", "corpus_sha256"} <= manifest.keys()
        known = known and isinstance(manifest["encoder"]["name"], str) and isinstance(manifest["dim"], int)
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise AgentR1Error(f"{path} is damaged or of another version; {REBUILD}")
    return manifest


def _read_vectors(folder: Path) -> faiss.IndexFlatIP:
    import faiss

    path = folder / "vectors.faiss"
    try:
        vectors = faiss.read_index(str(path))
    except RuntimeError:  # FAISS's one exception, for a missing file as for a cut-off one
        raise AgentR1Error(f"{path} is missing or damaged; {REBUILD}") from None
    if not isinstance(vectors, faiss.IndexFlatIP):
        raise AgentR1Error(f"{path} is not a flat inner-product index; {REBUILD}")
    return vectors


def _fresh_folder(path: Path) -> Path:
    if path.exists():  # left by a build that was interrupted
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def _brief(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items() if value != "")
