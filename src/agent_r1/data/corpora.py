"""What an agent of a real data set can find: passages from the questions' own paragraphs, or from an encyclopedia.

In: `data.corpus` and the records. Out: `Passage`s, one after the other, because five million do not belong in memory
twice. Next: `qa_build.py` writes corpus.jsonl, `search/` indexes it.

    contexts        the paragraphs of all questions in the splits, each once: a small world with built-in distractors
    beir-hotpotqa   the abstracts of the English Wikipedia of October 2017, as BEIR publishes them (an archive, and a copy
                    on the hub): what HotpotQA is about
    kilt            the whole English Wikipedia of August 2019, as KILT publishes it, cut into passages of 100 words
    a file          JSONL, plain or gzipped, in one of the published forms:
                      BeIR      {"_id": "12", "title": "Anarchism", "text": "Anarchism is ..."}
                      wiki-18   {"id": "0", "contents": "\"Aaron\"\nAaron is ..."}
                      KILT      {"wikipedia_id": "12", "wikipedia_title": "Anarchism", "text": ["Anarchism\n", "It is ..."]}
                      ours      {"id": "12", "title": "Anarchism", "text": "Anarchism is ..."}
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent_r1 import hub
from agent_r1.data.downloads import download
from agent_r1.data.records import BadRecord, Corrupt, Record, json_lines, list_of, open_lines, text_of
from agent_r1.data.rows import Passage
from agent_r1.errors import AgentR1Error, ConfigError, first_line, nearest
from agent_r1.ui import say

NAMES = ("contexts", "beir-hotpotqa", "kilt")
BEIR_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/hotpotqa.zip"
BEIR_CHECKSUM = "md5:f412724f78b0d91183a0e86805e16114"
"""As BEIR publishes it."""
BEIR_HUB, BEIR_FILES = "BeIR/hotpotqa@refs/convert/parquet", "corpus/corpus/*.parquet"
"""The same on the Hugging Face hub, in four files: what is taken when BEIR's one server does not answer."""
BEIR_PASSAGES = 5_233_329
KILT_URL = "https://dl.fbaipublicfiles.com/KILT/kilt_knowledgesource.json"
KILT_PAGES = 5_903_530
"""As its README counts them. No checksum is published."""
WORDS = 100
"""In a passage of KILT: the cut of dense passage retrieval (Karpukhin et al. 2020), and of wiki-18."""


def check(corpus: str) -> None:
    """Raises ConfigError when there is no such corpus, before an hour is spent on the questions."""
    if corpus not in NAMES and not Path(corpus).is_file():
        raise ConfigError(
            f"data.corpus={corpus!r} is neither a file nor one of {', '.join(NAMES)}{nearest(corpus, NAMES)}; check the path"
        )


def passages(
    corpus: str, records: Iterable[Record], downloads: Path, skip_bad: bool, skipped: list[str]
) -> Iterator[Passage]:
    """The passages of `data.corpus`. Large files go to `downloads`, and what was left out is named in `skipped`.

    Raises AgentR1Error for what is corrupt or missing.
    """
    if corpus == "contexts":
        yield from contexts(records)
    elif corpus == "beir-hotpotqa":
        yield from beir_hotpotqa(downloads)
    else:
        kilt = corpus == "kilt"
        path = download(KILT_URL, downloads / Path(KILT_URL).name) if kilt else Path(corpus)
        yield from from_lines(path, KILT_PAGES if kilt else None, skip_bad, skipped)


def from_lines(path: Path, count: int | None, skip_bad: bool, skipped: list[str]) -> Iterator[Passage]:
    """The passages of a file. `count` is the number of lines that it is published with."""
    corrupt = Corrupt(str(path), skip_bad)
    with open_lines(path) as lines:
        yield from _parsed(json_lines(lines), corrupt)
    if count and corrupt.seen != count:
        raise AgentR1Error(f"{path} has {corrupt.seen} lines and {count} are published; delete it and run this again")
    skipped += [f"{path}: {found}" for found in corrupt.found]


def contexts(records: Iterable[Record]) -> Iterator[Passage]:
    """Every different paragraph once, in the order in which it is first met."""
    seen: dict[tuple[str, str], None] = dict.fromkeys(p for record in records for p in record.paragraphs)
    for number, (title, text) in enumerate(seen):
        yield Passage(str(number), title, text)


def beir_hotpotqa(downloads: Path, url: str = BEIR_URL, checksum: str = BEIR_CHECKSUM, count: int = BEIR_PASSAGES):
    """BEIR's archive, downloaded once, checked and counted; or the hub's copy where the archive cannot be had."""
    path = downloads / "beir-hotpotqa.zip"
    try:
        download(url, path, checksum)
    except AgentR1Error as error:
        say(f"{error}\ntaking the copy on the hub instead: {BEIR_HUB}")
        yield from beir_on_the_hub(path, count)
        return
    found = 0
    try:
        with zipfile.ZipFile(path) as archive, archive.open("hotpotqa/corpus.jsonl") as lines:
            for passage in _parsed(json_lines(lines), Corrupt(str(path), skip=False)):
                found += 1
                yield passage
    except (zipfile.BadZipFile, KeyError) as error:
        raise AgentR1Error(f"{path} is no archive of BEIR ({error}); delete it and run this again") from None
    if found != count:
        raise AgentR1Error(f"{path} has {found} passages and {count} are published; delete it and run this again")


def beir_on_the_hub(archive: Path, count: int) -> Iterator[Passage]:
    """BEIR's corpus as the hub has it: parquet with the columns _id, title and text."""
    folder = hub.fetch(BEIR_HUB, [BEIR_FILES], kind="dataset", otherwise=f"put BEIR's archive at {archive}")

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
