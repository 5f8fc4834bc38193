"""Published question sets: their forms, read from local files or from the Hugging Face hub, and checked.

In: a local file in a published form, or a data set on the hub. Out: `Record`s, the same whichever it was. Next: `build.py`
makes rows of them.

A downloaded file is taken at nobody's word: every record is checked, and one that does not fit is counted and named. It
is left out only where the user asked for that. This is why local files are read here and not by `datasets`: one corrupt
line, and datasets 5.2.0 refuses the whole file; here the line is named, and the others can be used.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from agent_r1.errors import AgentR1Error, first_line


@dataclass(frozen=True)
class Record:
    """One question, whatever data set it is from."""

    id: str
    question: str
    answers: list[str]
    """The answer, then its aliases."""
    kind: str
    """What the data set calls this kind of question; the evaluation reports each."""
    hops: int
    paragraphs: list[tuple[str, str]]
    """(title, text): those that hold the answer, and distractors."""
    supporting: list[str]
    """Titles of the paragraphs that an answer takes."""


@dataclass(frozen=True)
class Dataset:
    """A published question set: where it is, how large it must be, and how to read one record."""

    hub: str
    """owner/name on the Hugging Face hub."""
    config: str | None
    revision: str | None
    """Commit on the hub; None takes the newest."""
    files: dict[str, str]
    """Split (train, validation) -> name of the published file."""
    counts: dict[str, int]
    """Split -> published number of records. Fewer are half a download."""
    parse: Callable[[Any], Record]
    """Raises BadRecord."""
    keys: tuple[str, ...] = ()
    """What a record must have: all that is missing is said at once."""


class BadRecord(ValueError):
    """Not a record; the message says what is wrong with it."""


@dataclass
class Corrupt:
    """Collects what does not fit, and refuses it in the end."""

    where: str
    skip: bool
    seen: int = 0
    found: list[str] = field(default_factory=list)

    def note(self, place: str, reason: str) -> None:
        self.found.append(f"{place} ({reason})")

    def settle(self) -> None:
        """Raises AgentR1Error if anything was found and may not be skipped, or if nothing else was there."""
        if self.found and not self.skip:
            few = ", ".join(self.found[:5]) + (", ..." if len(self.found) > 5 else "")
            raise AgentR1Error(
                f"{self.where}: {len(self.found)} of {self.seen} records are corrupt: {few}; get the file again, mend it "
                "(docs/data.md shows the form), or leave them out with data.skip_bad=true"
            )
        if self.seen == len(self.found):
            raise AgentR1Error(f"{self.where} holds no usable record; is it the right file?")


def read_records(dataset: Dataset, raw: Iterator[tuple[str, Any]], corrupt: Corrupt) -> list[Record]:
    """All good records of `raw`, in order; `corrupt` knows the others."""
    records: dict[str, Record] = {}
    for place, value in raw:
        corrupt.seen += 1
        try:
            if isinstance(value, BadRecord):
                raise value
            missing = [f"no {key}" for key in dataset.keys if isinstance(value, dict) and key not in value]
            if len(missing) > 1:  # another form altogether: `parse` would name the first
                raise BadRecord(", ".join(missing))
            record = dataset.parse(value)
            if record.id in records:  # the same question in two splits would train on the test
                raise BadRecord(f"the id {record.id} a second time")
        except BadRecord as error:
            corrupt.note(place, str(error))
        else:
            records[record.id] = record
    corrupt.settle()
    return list(records.values())


# ------------------------------------------------------------------------------------------------------- where from


def from_file(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of each record of a JSON list, or of each line of a JSONL file; either may be gzipped."""
    with open_lines(path) as file:
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        if first != b"[":
            file.seek(0)
            yield from json_lines(file)
            return
        try:
            values = json.loads(first + file.read())
        except (ValueError, RecursionError) as error:
            raise AgentR1Error(f"{path} is cut off or no JSON ({error}); get the file again") from None
    for number, value in enumerate(values, start=1):
        yield f"record {number}", value


def json_lines(lines: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line that is not blank; the value of a broken one is a BadRecord."""
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError):  # broken JSON, broken UTF-8, or ten thousand brackets
            yield f"line {number}", BadRecord("no JSON")


@contextmanager
def open_lines(path: Path) -> Iterator[BinaryIO]:
    """A plain or gzipped file. Raises AgentR1Error where it cannot be opened, or turns out to be cut off."""
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if gzipped else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise AgentR1Error(f"{path} is cut off or damaged ({error}); get the file again") from None
    except OSError as error:
        raise AgentR1Error(f"{path} cannot be read ({error.strerror or error}); check the path") from None


def from_hub(dataset: Dataset, split: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of each record of a split on the hub. Raises AgentR1Error without network, or if some are missing."""
    remedy = f"or download {dataset.files[split]} yourself and name its folder with data.source=DIR"
    try:
        from datasets import load_dataset
    except ImportError:
        raise AgentR1Error(
            f"fetching {dataset.hub} needs the package datasets; run `pip install 'agent-r1[qa]'`, {remedy}"
        ) from None
    try:
        table = load_dataset(dataset.hub, dataset.config, split=split, revision=dataset.revision)
    except Exception as error:  # no network, no such revision, no space: it has a dozen classes for them
        raise AgentR1Error(
            f"cannot fetch {dataset.hub} ({type(error).__name__}: {first_line(error)}); mend the network, {remedy}"
        ) from None
    if len(table) != dataset.counts[split]:
        raise AgentR1Error(
            f"{dataset.hub} has {len(table)} records in {split} and {dataset.counts[split]} are published; delete its copy "
            f"in the cache of `datasets` and fetch it again, {remedy}"
        )
    for number, value in enumerate(table, start=1):
        yield f"{split} record {number}", value


# ---------------------------------------------------------------------------------------------- what a record must have


def text_of(record: Any, key: str) -> str:
    """The string under `key`, stripped and not empty."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"no {key}" if isinstance(record, dict) else "no JSON object")
    return value.strip()


def list_of(record: dict[str, Any], key: str, kind: type) -> list[Any]:
    """The list of `kind`s under `key`, not empty."""
    value = record.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
        raise BadRecord(f"no {key}")
    return value


def paired(record: dict[str, Any], key: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs that the published JSON writes as [[title, x], ...] and the hub as {"title": [...], second: [...]}."""
    value = record.get(key)
    if isinstance(value, dict):
        titles, others = list_of(value, "title", str), list_of(value, second, object)
        if len(titles) != len(others):
            raise BadRecord(f"{key}: {len(titles)} titles and {len(others)} {second}")
        return list(zip(titles, others, strict=True))
    pairs = list_of(record, key, list)
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise BadRecord(f"{key}: not [title, {second}]")
    return [(title, other) for title, other in pairs]


def paragraphs_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """HotpotQA's and 2WikiMultihopQA's `context`: titles, each with its sentences."""
    found = []
    for title, sentences in paired(record, "context", "sentences"):
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise BadRecord("context: sentences are no strings")
        found.append((title.strip(), " ".join(sentence.strip() for sentence in sentences).strip()))
    return found


def supporting_of(record: dict[str, Any]) -> list[str]:
    """Different titles of `supporting_facts`, in order."""
    return list(dict.fromkeys(title.strip() for title, _ in paired(record, "supporting_facts", "sent_id")))


# ------------------------------------------------------------------------------------------------- the question sets


def hotpotqa_record(record: Any) -> Record:
    """HotpotQA (Yang et al. 2018): questions over two Wikipedia paragraphs, ten paragraphs with each.

        {"_id": "5a7a...", "question": "...", "answer": "...", "type": "bridge", "level": "hard",
         "supporting_facts": [["Title", 0], ...], "context": [["Title", ["First sentence.", " Second."]], ...]}

    In the distractor setting the ten paragraphs hold the answer; in fullwiki they are what a retriever found, so a corpus
    of contexts lacks some answers: take beir-hotpotqa with it. 2WikiMultihopQA (Ho et al. 2020), made from Wikidata, has the
    same form and other kinds: compositional, inference, comparison (two paragraphs each), bridge_comparison (four).
    Raises BadRecord.
    """
    return Record(
        id=text_of(record, "_id" if isinstance(record, dict) and "_id" in record else "id"),
        question=text_of(record, "question"),
        answers=[text_of(record, "answer")],
        kind=text_of(record, "type"),
        hops=len(supporting := supporting_of(record)),
        paragraphs=paragraphs_of(record),
        supporting=supporting,
    )


def musique_record(record: Any) -> Record:
    """MuSiQue-Ans (Trivedi et al. 2022): questions composed of two to four single-hop ones, twenty paragraphs each.

        {"id": "3hop1__...", "question": "...", "answer": "...", "answer_aliases": ["..."], "answerable": true,
         "paragraphs": [{"idx": 0, "title": "...", "paragraph_text": "...", "is_supporting": false}, ...], ...}

    MuSiQue-Full also has questions without an answer, which this project has no reward for. Raises BadRecord.
    """
    name = text_of(record, "id")
    hops = re.match(r"([2-4])hop", name)
    if not hops:
        raise BadRecord(f"the id {name} does not begin with its number of hops")
    if record.get("answerable") is False:
        raise BadRecord("without an answer; take MuSiQue-Ans")
    aliases = record.get("answer_aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise BadRecord("answer_aliases are no strings")
    paragraphs = list_of(record, "paragraphs", dict)
    supporting = [text_of(p, "title") for p in paragraphs if p.get("is_supporting") is True]
    if not supporting:
        raise BadRecord("no supporting paragraph")
    return Record(
        id=name,
        question=text_of(record, "question"),
        answers=list(
            dict.fromkeys([text_of(record, "answer"), *(alias.strip() for alias in aliases if alias.strip())])
        ),
        kind=f"{hops[1]}hop",
        hops=int(hops[1]),
        paragraphs=[(text_of(p, "title"), text_of(p, "paragraph_text")) for p in paragraphs],
        supporting=list(dict.fromkeys(supporting)),
    )


_HOTPOTQA = Dataset(
    hub="hotpotqa/hotpot_qa",
    config="distractor",
    revision="1908d6afbbead072334abe2965f91bd2709910ab",
    files={"train": "hotpot_train_v1.1.json", "validation": "hotpot_dev_distractor_v1.json"},
    counts={"train": 90447, "validation": 7405},
    parse=hotpotqa_record,
    keys=("question", "answer", "type", "supporting_facts", "context"),
)
DATASETS: dict[str, Dataset] = {
    "hotpotqa": _HOTPOTQA,
    "hotpotqa-fullwiki": dataclasses.replace(
        _HOTPOTQA,
        config="fullwiki",
        files=_HOTPOTQA.files | {"validation": "hotpot_dev_fullwiki_v1.json"},
    ),
    "twowiki": dataclasses.replace(
        _HOTPOTQA,
        hub="framolfese/2WikiMultihopQA",
        config=None,
        revision="fe713bfbd1afbca1a65246741a75890405d56a3a",
        files={"train": "train.json", "validation": "dev.json"},
        counts={"train": 167454, "validation": 12576},
    ),
    "musique": Dataset(
        hub="dgslibisey/MuSiQue",
        config=None,
        revision=None,
        files={"train": "musique_ans_v1.0_train.jsonl", "validation": "musique_ans_v1.0_dev.jsonl"},
        counts={"train": 19938, "validation": 2417},
        parse=musique_record,
        keys=("id", "question", "answer", "paragraphs"),
    ),
}
