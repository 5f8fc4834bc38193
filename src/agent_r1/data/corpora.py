"""What an agent of a published data set can find: passages from the questions' own paragraphs, or from an encyclopedia.

In: `data.corpus` and the records. Out: `Passage`s, one after the other, because five million do not belong in memory
twice. Next: `build.py` writes corpus.jsonl, `search/` indexes it.

    contexts        the paragraphs of all questions in the splits, each once: a small world with built-in distractors
    beir-hotpotqa   the abstracts of the English Wikipedia of October 2017, as BEIR publishes them on the hub: what HotpotQA
                    is about
    a file          JSONL, plain or gzipped, in one of the published forms:
                      BeIR      {"_id": "12", "title": "Anarchism", "text": "Anarchism is ..."}
                      wiki-18   {"id": "0", "contents": "\"Aaron\"\nAaron is ..."}
                      KILT      {"wikipedia_id": "12", "wikipedia_title": "Anarchism", "text": ["Anarchism\n", "It is ..."]}
                      ours      {"id": "12", "title": "Anarchism", "text": "Anarchism is ..."}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent_r1 import hub
from agent_r1.data.published import BadRecord, Corrupt, Record, json_lines, list_of, open_lines, text_of
from agent_r1.data.rows import Passage
from agent_r1.errors import AgentR1Error, ConfigError, first_line, nearest

NAMES = ("contexts", "beir-hotpotqa")
BEIR_HUB, BEIR_FILES = "BeIR/hotpotqa@refs/convert/parquet", "corpus/corpus/*.parquet"
BEIR_PASSAGES = 5_233_329
WORDS = 100
"""In a passage of KILT: the cut of dense passage retrieval (Karpukhin et al. 2020), and of wiki-18."""


def check(corpus: str) -> None:
    """Raises ConfigError when there is no such corpus, before an hour is spent on the questions."""
    if corpus not in NAMES and not Path(corpus).is_file():
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
    else:
        corrupt = Corrupt(corpus, skip_bad)
        with open_lines(Path(corpus)) as lines:
            yield from _parsed(json_lines(lines), corrupt)
        skipped += [f"{corpus}: {found}" for found in corrupt.found]


def beir_hotpotqa(count: int = BEIR_PASSAGES) -> Iterator[Passage]:
    """BEIR's corpus as the hub has it: parquet with the columns _id, title and text; a download that broke off goes on."""
    otherwise = "download BEIR's hotpotqa yourself and name its corpus.jsonl with data.corpus=FILE"
    folder = hub.fetch(BEIR_HUB, [BEIR_FILES], kind="dataset", otherwise=otherwise)

    def records() -> Iterator[tuple[str, Any]]:
        for path in sorted(folder.glob(BEIR_FILES)):
            for number, batch in enumerate(pq.ParquetFile(path).iter_batches(columns=["_id", "title", "text"])):
                yield from ((f"{path.name}, batch {number}", value) for value in batch.to_pylist())

    corrupt = Corrupt(str(folder), skip=False)
    try:
        yield from _parsed(records(), corrupt)
    except (pa.ArrowException, OSError) as error:
        raise AgentR1Error(f"{folder} cannot be read ({first_line(error)}); delete it and run this again") from None
    if corrupt.seen != count:
        raise AgentR1Error(
            f"{folder} has {corrupt.seen} passages and {count} are published; delete it and run this again"
        )


def _parsed(raw: Iterator[tuple[str, Any]], corrupt: Corrupt) -> Iterator[Passage]:
    for place, value in raw:
        corrupt.seen += 1
        try:
            found = parse(value)
        except BadRecord as error:
            corrupt.note(place, str(error))
        else:
            yield from found
    corrupt.settle()


def parse(value: Any) -> list[Passage]:
    """The passages of one line, in any of the forms at the top of this file. Raises BadRecord."""
    if isinstance(value, BadRecord):
        raise value
    if isinstance(value, dict) and "wikipedia_id" in value:
        return _page(value)
    if isinstance(value, dict) and "contents" in value:
        title, newline, text = text_of(value, "contents").partition("\n")
        if not newline:
            raise BadRecord("contents without a first line for the title")
        return [Passage(text_of(value, "id"), title.strip().removeprefix('"').removesuffix('"'), text)]
    name = text_of(value, "_id" if isinstance(value, dict) and "_id" in value else "id")
    title, text = value.get("title"), value.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not (title or text):
        raise BadRecord("no title and text")  # one of them may be empty: BEIR has passages without a text
    return [Passage(name, title, text)]


def _page(value: dict[str, Any]) -> list[Passage]:
    """A page of KILT: its paragraphs, of which the first is the title and some are headings or items of lists."""
    name, title = str(value["wikipedia_id"]), text_of(value, "wikipedia_title")
    paragraphs = list_of(value, "text", str)
    body = [text for text in paragraphs[1:] if not text.startswith("Section::::")]
    words = re.sub("BULLET::::-?", "", " ".join(body)).split()
    pieces = [words[start : start + WORDS] for start in range(0, len(words), WORDS)]
    return [Passage(f"{name}-{number}", title, " ".join(piece)) for number, piece in enumerate(pieces)]
