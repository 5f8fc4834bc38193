"""What an agent of a published data set can find: passages from the questions' own paragraphs, or from an encyclopedia.

In: `data.corpus` and the records. Out: `Passage`s, one after the other, because five million do not belong in memory
twice. Next: `build.py` writes corpus.jsonl, `search/` indexes it.

    contexts        the paragraphs of all questions in the splits, each once: a small world with built-in distractors
    beir-hotpotqa   the abstracts of the English Wikipedia of October 2017, as BEIR publishes them on the hub: what HotpotQA
                    is about
    a file          JSONL, plain or gzipped, in one of the published forms below
    a folder        of BEIR's HotpotQA, downloaded by other means
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from agent_r1.data.forms import Id, Record, Text
from agent_r1.data.json_files import checked, from_file
from agent_r1.data.rows import Passage
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line, nearest
from agent_r1.ground.ui import say

NAMES = ("contexts", "beir-hotpotqa")
BEIR_SOURCES = {
    "BeIR/hotpotqa@refs/convert/parquet": "corpus/corpus/*.parquet",
    "mteb/hotpotqa@ab518f4d6fcca38d87c25209f94beba119d02014": "corpus.jsonl",
}
"""The same passages, by two publishers of the hub: repository, and its files."""
BEIR_PASSAGES = 5_233_329
WORDS = 100
"""In a passage of KILT: the cut of dense passage retrieval (Karpukhin et al. 2020), and of wiki-18."""


class Beir(BaseModel):
    """{"_id": "12", "title": "Anarchism", "text": "Anarchism is ..."}; our own has `id`. One of the two may be empty."""

    id: Id
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
    """{"wikipedia_id": "12", "wikipedia_title": "Anarchism", "text": ["Anarchism\\n", "It is ..."]}: a page. The first of
    its paragraphs is the title, and some are headings or items of lists."""

    wikipedia_id: str | int
    wikipedia_title: Text
    text: Annotated[list[str], Field(min_length=1)]

    def passages(self) -> list[Passage]:
        body = [text for text in self.text[1:] if not text.startswith("Section::::")]
        words = re.sub("BULLET::::-?", "", " ".join(body)).split()
        pieces = [words[start : start + WORDS] for start in range(0, len(words), WORDS)]
        return [
            Passage(f"{self.wikipedia_id}-{number}", self.wikipedia_title, " ".join(piece))
            for number, piece in enumerate(pieces)
        ]


def parse(value: Any) -> list[Passage]:
    """The passages of one line, in any of the forms. Raises ValueError."""
    keys = value if isinstance(value, dict) else ()
    form = Kilt if "wikipedia_id" in keys else Wiki18 if "contents" in keys else Beir
    return form.model_validate(value).passages()


def check(corpus: str) -> None:
    """Raises ConfigError when there is no such corpus, before an hour is spent on the questions."""
    if corpus not in NAMES and not Path(corpus).exists():
        raise ConfigError(
            f"data.corpus={corpus!r} is neither a file nor one of {', '.join(NAMES)}{nearest(corpus, NAMES)}; check the "
            "path"
        )


def passages(corpus: str, records: Iterable[Record], skip_bad: bool, skipped: list[str]) -> Iterator[Passage]:
    """The passages of `data.corpus`; what was left out is named in `skipped`. Raises AgentR1Error for what is corrupt."""
    if corpus == "contexts":
        seen = dict.fromkeys(paragraph for record in records for paragraph in record.paragraphs)
        for number, (title, text) in enumerate(seen):
            yield Passage(str(number), title, text)
    elif corpus == "beir-hotpotqa":
        yield from beir_hotpotqa()
    elif Path(corpus).is_dir():
        yield from read_folder(Path(corpus))
    else:
        for found in checked(from_file(Path(corpus)), parse, corpus, skip_bad, skipped):
            yield from found


def beir_hotpotqa(count: int = BEIR_PASSAGES) -> Iterator[Passage]:
    """Yield BEIR's corpus, from the first publisher that can be reached; a download that broke off goes on."""
    otherwise = "download BEIR's hotpotqa yourself and name its corpus.jsonl, or the folder, with data.corpus=PATH"
    (first, files), (second, others) = BEIR_SOURCES.items()
    try:
        folder = hub.fetch(first, [files], "dataset", otherwise)
    except AgentR1Error as error:
        say(f"  {error}; {second} has the same and is tried next")
        folder = hub.fetch(second, [others], "dataset", otherwise)
    seen = 0
    for seen, passage in enumerate(read_folder(folder), 1):  # noqa: B007
        yield passage
    if seen != count:
        raise AgentR1Error(f"{folder} has {seen} passages and {count} are published; delete it and run this again")


def read_folder(folder: Path) -> Iterator[Passage]:
    """Yield the passages of a folder with files as a publisher has them: parquet with _id, title and text, or corpus.jsonl."""
    found = [path for files in BEIR_SOURCES.values() for path in sorted(folder.glob(files))]
    if not found:
        raise ConfigError(f"{folder} has neither {' nor '.join(BEIR_SOURCES.values())}; name a file or another folder")
    try:
        for path in found:
            values = _parquet_records(path) if path.suffix == ".parquet" else from_file(path)
            for some in checked(values, parse, str(path), False, []):
                yield from some
    except (pa.ArrowException, OSError) as error:
        raise AgentR1Error(f"{folder} cannot be read ({first_line(error)}); delete it and run this again") from None


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    seen = 0
    for batch in pq.ParquetFile(path).iter_batches(columns=["_id", "title", "text"]):
        yield from ((f"record {seen + n}", value) for n, value in enumerate(batch.to_pylist(), 1))
        seen += len(batch)
