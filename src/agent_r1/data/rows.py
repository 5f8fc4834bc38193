"""Rows and passages on disk: the two formats that every data set of this project is written in.

In: `Row`s (types.py) and `Passage`s of a data set such as TinyHop. Out: `*.parquet` with verl's keys, so that
the local loop and verl read the same file, and `corpus.jsonl`. Next: `search/` indexes the passages, `env/` opens an
episode on each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agent_r1.errors import AgentR1Error, first_line
from agent_r1.types import Row

ROW_KEYS = ("data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name", "env_kwargs")
"""verl's columns. `prompt`, `reward_model`, `extra_info` and `env_kwargs` are nested and stay nested in parquet."""

REMEDY = "delete the data folder and make the data again (`agent-r1 data`)"


@dataclass(frozen=True)
class Passage:
    """What one search hit shows: a short text and the name of what it is about."""

    id: str
    """Unique in its corpus."""
    title: str
    text: str


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write `rows` (at least one: the column types are read off them) as parquet, the same bytes for the same rows."""
    pq.write_table(pa.Table.from_pylist(rows), path)


def read_rows(path: Path) -> list[Row]:
    """All rows of a parquet file, in order. Raises AgentR1Error when it is missing, damaged or not made of rows."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise AgentR1Error(f"{path} does not exist; make the data first (`agent-r1 data`)") from None
    except (pa.ArrowException, OSError) as error:
        raise AgentR1Error(f"{path} cannot be read as parquet ({first_line(error)}); {REMEDY}") from None
    missing = [key for key in ROW_KEYS if key not in table.column_names]
    if missing:
        raise AgentR1Error(f"{path} lacks the columns {', '.join(missing)} of a row; {REMEDY}")
    return table.to_pylist()


def write_corpus(path: Path, passages: Iterable[Passage]) -> None:
    """Write one JSON object a line: {"id", "title", "text"}."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(passage)) + "\n" for passage in passages)


def read_corpus(path: Path) -> Iterator[Passage]:
    """Passages in the file's order, one at a time, because a real corpus does not fit into memory twice.

    Raises AgentR1Error for a missing file, and for a damaged line with its number.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _parse_passage(line, f"{path}, line {number}")
    except OSError as error:
        raise AgentR1Error(f"{path} cannot be read ({error.strerror}); make the data first (`agent-r1 data`)") from None


def _parse_passage(line: bytes, where: str) -> Passage:
    try:
        record = json.loads(line)
    except ValueError as error:  # both broken JSON and broken UTF-8
        raise AgentR1Error(f"{where}: not a JSON object ({first_line(error)}); {REMEDY}") from None
    fields = [record.get(key) for key in ("id", "title", "text")] if isinstance(record, dict) else [None]
    if not all(isinstance(field, str) for field in fields):
        raise AgentR1Error(f"{where}: a passage needs the strings id, title and text; {REMEDY}")
    return Passage(*fields)
