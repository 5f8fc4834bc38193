"""Read records of a JSON list or JSONL file, possibly gzipped.

In: a local file, downloaded or written by hand. Out: (place, value) of each record. Next: recipes,
`own_rows.py` and `corpora.py` check the values. Memory has one line of JSONL at a time. A list is
read whole.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import StringConstraints, ValidationError

from agent_r1.ground import bounds
from agent_r1.ground.bounds import open_file
from agent_r1.ground.errors import AgentR1Error

T = TypeVar("T")
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
"""A field that must not be empty."""
MAX_CORRUPT = 100_000
"""Corrupt records after which a file is refused."""
MAX_RECORD = 16 << 20
"""Bytes of one line: a thousand times one of HotpotQA's, with its ten paragraphs."""
MAX_RATIO = 100
OTHER_FORMS = {
    b"PAR1": "a parquet file; let its name end in .parquet",
    b"PK\x03\x04": "a zip or Excel file; write its rows as JSONL",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it",
    codecs.BOM_UTF16_LE: "UTF-16 text; write it as UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text; write it as UTF-8",
}
"""First bytes of what users bring instead of JSON -> what it is, with a remedy."""
TABLES = (".csv", ".tsv")
ALWAYS = 64 << 20
"""Largest expansion of a gzip (text: ten times), and the bytes that are always allowed."""


def _parse_line(line: bytes) -> Any:
    """Parse one line. The value of a broken line is the error."""
    try:
        return json.loads(line, object_pairs_hook=bounds.unique_keys)
    except UnicodeDecodeError:
        return ValueError("no UTF-8 text")
    except (json.JSONDecodeError, RecursionError):  # broken, or thousands of brackets
        return ValueError("no JSON")
    except ValueError as error:
        return error


def _list_records(text: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSON list. The value of one with a repeated key is the error."""
    errors: dict[int, ValueError] = {}  # of objects, by their identity

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        try:
            bounds.unique_keys(pairs)
        except ValueError as error:
            errors[id(value)] = error
        return value

    def error_in(value: Any) -> ValueError | None:
        if id(value) in errors:
            return errors[id(value)]
        inner = value.values() if isinstance(value, dict) else value
        found = map(error_in, inner) if isinstance(value, dict | list) else ()
        return next(filter(None, found), None)

    records = json.loads(text, object_pairs_hook=unique_keys)
    for number, value in enumerate(records, 1):
        yield f"record {number}", (error_in(value) if errors else None) or value


def _refuse_other_forms(path: Path, beginning: bytes) -> None:
    """Raise AgentR1Error for a table, or a packed file, where JSON is expected."""
    for first_bytes, form in OTHER_FORMS.items():
        if beginning.startswith(first_bytes):
            raise AgentR1Error(f"{path} is {form}", code="other_form")
    if path.suffix.lower() in TABLES:
        raise AgentR1Error(
            f"{path} is a table in text; write it as JSONL, in Python with pandas: "
            "`pandas.read_csv(FILE).to_json('rows.jsonl', orient='records', lines=True)`",
            code="other_form",
        )


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of each record of a JSON list, or each line of JSONL.

    The file may be gzipped. The value of a broken line is the error. Raises AgentR1Error if the
    file cannot be opened, is cut off, expands too far, or has too long a line.
    """
    try:
        with open_file(path, most_bytes=None) as raw:
            beginning = raw.read(4)
            is_gzip = beginning.startswith(b"\x1f\x8b")
            _refuse_other_forms(path, beginning)
            most = max(ALWAYS, MAX_RATIO * os.fstat(raw.fileno()).st_size)
            if not is_gzip:
                most = -1  # no limit
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            number = 0
            has_record = False
            while True:
                line = file.readline(MAX_RECORD + 1)
                if not line:
                    break
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                is_list = not has_record and line.lstrip().startswith(b"[")
                if is_list:
                    line += file.read(most)
                if 0 <= most < file.tell():
                    raise ValueError(f"its gzip unfolds to more than {most} bytes")
                if is_list:
                    yield from _list_records(line)
                    return
                if len(line) > MAX_RECORD:
                    raise ValueError(f"line {number} has more than {MAX_RECORD} bytes")
                if line.isspace():
                    continue
                has_record = True
                yield f"line {number}", _parse_line(line)
    except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise AgentR1Error(
            f"{path} is truncated, damaged or not JSON ({error}); get the file again",
            code="damaged_file",
        ) from None
    except OSError as error:
        raise AgentR1Error(
            f"{path} cannot be read ({error.strerror or error}); check the path",
            code="unreadable_file",
        ) from None


def parse_records(
    values: Iterable[tuple[str, Any]],
    parse: Callable[[Any], T | None],
    where: str,
    skip_bad: bool,
    omissions: list[str],
    remedy: str = "get the file again or fix it (docs/data.md shows the form)",
) -> Iterator[T]:
    """Yield `parse(value)` of each record, without None.

    `parse` raises ValueError for a corrupt record, which is named in `omissions`. Raises
    AgentR1Error at the end for corrupt records unless `skip_bad`, or if there are no others.
    """
    records = 0
    corrupt = []
    for place, value in values:
        records += 1
        try:
            if isinstance(value, ValueError):
                raise value
            record = parse(value)
        except ValueError as error:
            corrupt.append(f"{place} ({_reason(error)})")
            if len(corrupt) > MAX_CORRUPT:
                raise AgentR1Error(
                    f"{where}: more than {MAX_CORRUPT} records are corrupt, the first: "
                    f"{corrupt[0]}; is it the right file?",
                    code="bad_records",
                ) from None
        else:
            if record is not None:
                yield record
    if corrupt and not skip_bad:
        few = ", ".join(corrupt[:5])
        if len(corrupt) > 5:
            few += ", ..."
        raise AgentR1Error(
            f"{where}: {len(corrupt)} of {records} records are corrupt: {few}; {remedy}, or leave "
            f"them out with data.skip_bad=true ({records - len(corrupt)} are left)",
            code="bad_records",
        )
    if records == len(corrupt):
        raise AgentR1Error(
            f"{where} has no usable record; is it the right file?", code="no_records"
        )
    omissions.extend(f"{where}: {one}" for one in corrupt)


def _reason(error: ValueError) -> str:
    """Describe an error in one line; a form's errors without the values."""
    if not isinstance(error, ValidationError):
        return str(error)
    missing = []
    wrong = []
    for detail in error.errors(include_url=False):
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].lower()
        if message == "field required":
            missing.append(f"no {where}")
        else:
            wrong.append(f"{where}: {message}".removeprefix(": "))
    return ", ".join(missing + wrong)
