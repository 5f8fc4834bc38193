"""Read a corpus: from the questions' own paragraphs, or from an encyclopedia.

In: `data.corpus` and the records. Out: `Passage`s, one at a time, because five million do not fit
into memory twice.
Next: `build.py` writes corpus.jsonl, `search/` indexes it.

    contexts        the paragraphs of all questions in the splits, each once: a small world with
                    built-in distractors
    a name          of a recipe's corpus ([corpus] of its recipe.toml), such as beir-hotpotqa
    a file          JSONL, plain or gzipped, in one of the published forms below
    a folder        of passages in a publisher's form on the hub, downloaded by other means
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field

from agent_r1.config import tables
from agent_r1.data.json_files import Text, json_records, parse_records
from agent_r1.data.storage import Passage
from agent_r1.ground import hub
from agent_r1.ground.bounds import open_file
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line, nearest
from agent_r1.ground.ui import say

CORPUS_FILES = ("corpus/corpus/*.parquet", "corpus.jsonl")
"""Files of a folder: BEIR's form as tables of the hub, or as JSON lines."""
PASSAGE_WORDS = 100
"""Words of a KILT passage, as in dense passage retrieval (Karpukhin et al. 2020) and wiki-18."""


class Beir(BaseModel):
    """{"_id": "12", "title": "Anarchism", "text": "Anarchism is ..."}; `id` works too.

    Title or text may be empty.
    """

    id: Annotated[Text, Field(validation_alias=AliasChoices("_id", "id"))]
    title: str
    text: str

    def passages(self) -> list[Passage]:
        if not self.title and not self.text:
            raise ValueError("neither title nor text")
        return [Passage(self.id, self.title, self.text)]


class Wiki18(BaseModel):
    """{"id": "0", "contents": "\\"Aaron\\"\\nAaron is ..."}"""

    id: Text
    contents: Annotated[Text, Field(pattern=r"\n")]

    def passages(self) -> list[Passage]:
        return [Passage.of_contents(self.id, self.contents)]


class Kilt(BaseModel):
    """A page: {"wikipedia_id": "12", "wikipedia_title": "Anarchism", "text": ["Anarchism\\n"]}.

    Its first paragraph is the title; others may be headings or items of lists.
    """

    wikipedia_id: str | int
    wikipedia_title: Text
    text: Annotated[list[str], Field(min_length=1)]

    def passages(self) -> list[Passage]:
        body = [text for text in self.text[1:] if not text.startswith("Section::::")]
        words = re.sub("BULLET::::-?", "", " ".join(body)).split()
        pieces = [
            words[start : start + PASSAGE_WORDS] for start in range(0, len(words), PASSAGE_WORDS)
        ]
        return [
            Passage(f"{self.wikipedia_id}-{number}", self.wikipedia_title, " ".join(piece))
            for number, piece in enumerate(pieces)
        ]


def parse_passages(value: Any) -> list[Passage]:
    """Return the passages of one line, in any of the forms. Raise ValueError."""
    form: type[Beir | Wiki18 | Kilt] = Beir
    if isinstance(value, dict):
        if "wikipedia_id" in value:
            form = Kilt
        elif "contents" in value:
            form = Wiki18
    return form.model_validate(value).passages()


def check_corpus(corpus: str) -> None:
    """Raise ConfigError for an unknown corpus, before an hour is spent on the questions."""
    names = tables.names("corpus")
    if corpus not in names and not Path(corpus).exists():
        raise ConfigError(
            f"data.corpus={corpus!r} is neither a file nor one of "
            f"{', '.join(names)}{nearest(corpus, names)}; check the path",
            code="unknown_corpus",
        )


def corpus_passages(
    corpus: str, records: Iterable[Any], skip_bad: bool, omissions: list[str]
) -> Iterator[Passage]:
    """Yield the passages of `data.corpus`, and name omitted ones in `omissions`.

    Raise AgentR1Error for corrupt data.
    """
    if corpus in tables.names("corpus"):
        facts = tables.entry_of("corpus", corpus, "data.corpus")
        if "publishers" in facts:
            yield from passages_of_publisher(corpus, facts["publishers"], facts["passages"])
        else:
            yield from tables.resolve("corpus", corpus, "data.corpus")(records)
    elif Path(corpus).is_dir():
        yield from read_folder(Path(corpus))
    else:
        for passages in parse_records(
            json_records(Path(corpus)), parse_passages, corpus, skip_bad, omissions
        ):
            yield from passages


def contexts(records: Iterable[Any]) -> Iterator[Passage]:
    """Yield the questions' own paragraphs, each once."""
    paragraphs: dict[tuple[str, str], None] = {}  # a set that keeps the order
    for record in records:
        paragraphs.update(dict.fromkeys(record.paragraphs))
    for number, (title, text) in enumerate(paragraphs):
        yield Passage(str(number), title, text)


def passages_of_publisher(corpus: str, publishers: dict[str, str], count: int) -> Iterator[Passage]:
    """Yield the `count` passages of a published corpus from the first reachable of `publishers`.

    `publishers`: OWNER/NAME@REVISION on the hub -> its files. An interrupted download continues.
    Raises AgentR1Error if all fail.
    """
    otherwise = (
        f"download {corpus} yourself and name its corpus.jsonl, or the folder, with "
        "data.corpus=PATH"
    )
    *first, last = publishers
    for name in first:
        try:
            folder = hub.download(name, [publishers[name]], "dataset", otherwise)
            break
        except AgentR1Error as error:
            say(f"  {error}; trying the next publisher")
    else:
        folder = hub.download(last, [publishers[last]], "dataset", otherwise)
    passages = 0
    for passage in read_folder(folder):
        passages += 1
        yield passage
    if passages != count:
        raise AgentR1Error(
            f"{folder} has {passages} of {count} published passages; delete it and run the command "
            "again",
            code="incomplete_download",
        )


def read_folder(folder: Path) -> Iterator[Passage]:
    """Yield the passages of a publisher's folder: parquet, or corpus.jsonl.

    Parquet has the columns _id, title and text.
    """
    import pyarrow as pa

    paths: list[Path] = []
    for pattern in CORPUS_FILES:
        paths += sorted(folder.glob(pattern))
    if not paths:
        raise ConfigError(
            f"{folder} has neither {' nor '.join(CORPUS_FILES)}; name a file or another folder",
            code="missing_source",
        )
    try:
        for path in paths:
            values = _parquet_records(path) if path.suffix == ".parquet" else json_records(path)
            for passages in parse_records(values, parse_passages, str(path), False, []):
                yield from passages
    except (pa.ArrowException, OSError, ValueError) as error:
        raise AgentR1Error(
            f"{folder} cannot be read ({first_line(error)}); delete it and run this again",
            code="damaged_source",
        ) from None


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as pq

    number = 0
    with open_file(path, most_bytes=None) as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=["_id", "title", "text"]):
            for value in batch.to_pylist():
                number += 1
                yield f"record {number}", value
