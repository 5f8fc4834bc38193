"""Read and write a data set on disk: rows, passages, and their folder.

In: `Row`s (core.py) and `Passage`s of a data set such as TinyHop. Out: a folder, written
atomically. It has `*.parquet` in verl's keys (for the local loop and verl), `corpus.jsonl`, and a
manifest with the hash of every file. Next: `search/` indexes the passages, `env/` plays an episode
per row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.core import Row
from agent_r1.data.json_files import MAX_RECORD
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, first_line
from agent_r1.ground.files import sha256, whole

ROW_KEYS = (
    "data_source",
    "prompt",
    "ability",
    "reward_model",
    "extra_info",
    "agent_name",
    "env_kwargs",
)
"""verl's columns.

`prompt`, `reward_model`, `extra_info` and `env_kwargs` are nested, also in parquet.
"""

REMEDY = "delete the data folder and make the data again (`agent-r1 data`)"


@dataclass(frozen=True)
class Passage:
    """One search result: a short text and its title."""

    id: str  # unique in its corpus
    title: str
    text: str

    @classmethod
    def of_contents(cls, id: str, contents: str) -> Passage:
        """Parse the form of wiki-18 and Search-R1.

        The first line is the title, usually in quotes.
        """
        title, newline, text = contents.partition("\n")
        if not newline:
            return cls(id, "", contents)
        return cls(id, title.strip().removeprefix('"').removesuffix('"'), text)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write `rows` as parquet, the same bytes for the same rows.

    At least one is needed to infer column types.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def read_rows(path: Path) -> list[Row]:
    """Read all rows of a parquet file.

    Raise AgentR1Error if it is missing, damaged or lacks columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()  # `pq.read_table` would import pandas
    except FileNotFoundError:
        raise AgentR1Error(
            f"{path} does not exist; make the data first (`agent-r1 data`)", code="missing_data"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise AgentR1Error(
            f"{path} cannot be read as parquet ({first_line(error)}); {REMEDY}", code="damaged_file"
        ) from None
    missing = [key for key in ROW_KEYS if key not in table.column_names]
    if missing:
        raise AgentR1Error(
            f"{path} lacks the columns {', '.join(missing)} of a row; {REMEDY}",
            code="missing_column",
        )
    return table.to_pylist()


def write_corpus(path: Path, passages: Iterable[Passage]) -> None:
    """Write one JSON object per line: {"id", "title", "text"}."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(passage)) + "\n" for passage in passages)


def read_corpus(path: Path) -> Iterator[Passage]:
    """Yield passages in the file's order.

    One at a time: a real corpus does not fit into memory twice.

    Raises AgentR1Error for a missing file or a damaged line, with its number.
    """
    try:
        with path.open("rb") as file:
            number = 0
            # A line without an end would be read into memory whole: a file may be a stranger's.
            while line := file.readline(MAX_RECORD + 1):
                number += 1
                try:
                    if len(line) > MAX_RECORD:
                        raise ValueError(f"the line has more than {MAX_RECORD >> 20} MB")
                    passage = Passage(**json.loads(line))
                except (ValueError, TypeError, RecursionError) as error:
                    raise AgentR1Error(
                        f"{path}, line {number}: not a passage ({first_line(error)}); {REMEDY}",
                        code="bad_passage",
                    ) from None
                yield passage
    except OSError as error:
        raise AgentR1Error(
            f"{path} cannot be read ({error.strerror}); make the data first (`agent-r1 data`)",
            code="missing_data",
        ) from None


# --------------------------------------------------------------------------------------- the folder

DATA_FORMAT = 2
"""Version of the folder's layout; increased when old data must be made again."""
MANIFEST = "manifest.json"


def make_folder(
    out: Path, write: Callable[[Path], dict[str, Any]], files: Iterable[str]
) -> dict[str, Any]:
    """Make the folder `out` with `write`.

    Return its manifest: format, `write`'s result, and hashes of `files`.

    Everything is written next to `out` and renamed at the end, so an existing folder is complete.
    Raises AgentR1Error if `out` exists or cannot be written.
    """
    if out.exists():
        raise AgentR1Error(
            f"{out} already exists; use it as it is, or delete it to make the data again",
            code="already_exists",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole(out) as part:
            part.mkdir()
            manifest = (
                {"format": DATA_FORMAT}
                | write(part)
                | {"files": {name: sha256(part / name) for name in files}}
            )
            (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise AgentR1Error(
            f"cannot write {out} ({error.strerror or error}); free some space or choose a writable "
            "folder",
            code="cannot_write",
        ) from None
    return manifest


def copy_data(folder: Path, target: Path) -> dict[str, Any]:
    """Copy a data set's files into the new folder `target`, and return the verified manifest."""
    target.mkdir()
    for name in (*read_manifest(folder)["files"], MANIFEST):
        shutil.copyfile(folder / name, target / name)
    return verify(target)


def verify(out: Path) -> dict[str, Any]:
    """Verify the hash of every file of a data set, and return its manifest.

    Raise AgentR1Error naming a wrong file.

    A local source that still exists must be unchanged too.
    """
    manifest = read_manifest(out)
    for name, digest in manifest["files"].items():
        if not (out / name).is_file():
            raise AgentR1Error(f"{out / name} is missing; {REMEDY}", code="damaged_data")
        if sha256(out / name) != digest:
            raise AgentR1Error(
                f"{out / name} has changed since it was made (its hash differs); {REMEDY}",
                code="damaged_data",
            )
    for name, digest in dict(manifest.get("sources", {})).items():
        if Path(name).is_file() and sha256(Path(name)) != digest:
            raise AgentR1Error(
                f"{name} has changed since {out} was made from it; delete that folder to make it "
                "again",
                code="outdated_data",
            )
    return manifest


def read_manifest(out: Path) -> dict[str, Any]:
    """Read a data set's manifest.

    Raise AgentR1Error if it is missing, damaged or of another version.
    """
    try:
        manifest = bounds.read_json(out / MANIFEST)
        version = manifest["format"]
        # These raise if one is no table.
        dict(manifest["files"])
        dict(manifest.get("sources", {}))
    except OSError as error:
        raise AgentR1Error(
            f"{out / MANIFEST} cannot be read ({error.strerror}); {REMEDY}", code="damaged_data"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AgentR1Error(
            f"{out / MANIFEST} is damaged ({type(error).__name__}); {REMEDY}", code="damaged_data"
        ) from None
    if version != DATA_FORMAT:
        raise AgentR1Error(
            f"{out} has data of format {version}, and this version reads {DATA_FORMAT}; {REMEDY}",
            code="other_format",
        )
    return manifest
