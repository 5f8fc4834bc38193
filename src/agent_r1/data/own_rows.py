"""Read user-defined questions from a file, a folder of splits, or a function.

In: `data.source`, or the function that `data.name` names. Out: `OwnQuestion`s by split. Next:
`build.py` makes rows of them.

    {"question": "What is 6 * 7?", "answer": "42"}                                          a line of a JSONL file
    {"question": "...", "answer": ["42", "forty-two"], "metadata": {"level": 1},
     "kind": "easy", "system": "You are ...", "tools": ["calculator"],
     "passages": [{"title": "Six", "text": "Six is a number."}]}                            all possible keys

A parquet file has the same names as columns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from agent_r1.config import plugins
from agent_r1.config.settings import DataConfig
from agent_r1.data.json_files import Text, json_records, parse_records
from agent_r1.data.source import SPLITS, Asked
from agent_r1.data.spellings import question_key
from agent_r1.data.splits import RecordSource
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line

QUESTION_EXAMPLE = '{"question": "What is 6 * 7?", "answer": "42"}'


class Titled(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: str
    text: str


class OwnQuestion(BaseModel):
    """One question. Other keys are refused; data for the environment go into `metadata`."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    question: Text
    answer: Annotated[
        list[Text], BeforeValidator(lambda value: value if isinstance(value, list) else [value])
    ] = []
    """Any of these is right. May be left out if a user-defined environment or reward scores."""
    metadata: dict[str, Any] = {}  # for environment and reward, not for the agent
    kind: Text | None = None  # evaluations report each kind separately
    system: Text | None = None
    tools: list[Text] | None = None
    supporting: list[Text] = []
    """Titles of the passages that the answer needs, to measure the share that searches find."""
    passages: list[Titled] = []
    """Together with those of other questions the corpus, unless `data.corpus` is a file."""

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, value: Any) -> Any:
        """Refuse values that a row cannot store: NaN, Infinity, and too deeply nested lists."""
        bounds.check_depth(value)
        if not _finite(value):
            raise ValueError("NaN or Infinity, which is not a number")
        return value

    @property
    def paragraphs(self) -> list[tuple[str, str]]:
        """Return title and text of each passage, as in a published record."""
        return [(passage.title, passage.text) for passage in self.passages]

    def extra(self) -> dict[str, Any]:
        """Return the row's further data. Parquet cannot store an empty object."""
        known = {"kind": self.kind, "metadata": self.metadata, "supporting": self.supporting}
        return {key: value for key, value in known.items() if value}


def _finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def source_files(config: DataConfig) -> dict[str, Path]:
    """Find the files of `data.source`: one for all splits, or one per split.

    A function has none. Raises AgentR1Error for a missing one.
    """
    if plugins.is_user_code(config.name):
        return {}
    source = Path(config.source)
    if not source.exists():
        raise AgentR1Error(
            f"data.source={source.absolute()} does not exist, nor is it next to the preset; give a "
            "JSONL or parquet file, one "
            f"question a line: {QUESTION_EXAMPLE}",
            code="missing_source",
        )
    return {split: _file(source, split) for split in SPLITS} if source.is_dir() else {"own": source}


def _file(folder: Path, split: str) -> Path:
    for ending in ("jsonl", "parquet"):
        if (path := folder / f"{split}.{ending}").is_file():
            return path
    raise AgentR1Error(
        f"{folder} has no {split}.jsonl or {split}.parquet; a single file is divided into the "
        "splits",
        code="missing_source",
    )


def splits_of(
    config: DataConfig, files: dict[str, Path], seed: int, skipped: list[str]
) -> dict[str, list[OwnQuestion]]:
    """Read or make the questions of each split, or of all. Omitted ones are named in `skipped`.

    Raises AgentR1Error naming a bad line; ConfigError for too few questions.
    """
    wanted = {split: getattr(config, split) for split in SPLITS}
    if plugins.is_user_code(config.name):
        return _apart(
            {split: _made(config.name, seed, split, count) for split, count in wanted.items()},
            skipped,
        )
    asked: dict[str, str] = {}
    found = {
        name: read_questions(path, config.skip_bad, skipped, asked) for name, path in files.items()
    }
    if "own" in found:
        return found
    for split, count in wanted.items():
        if count > len(found[split]):
            raise ConfigError(
                f"{config.source} has {len(found[split])} questions in {split}, and "
                f"data.{split}={count}",
                code="too_few_questions",
            )
    return {split: found[split][: count or None] for split, count in wanted.items()}


def read_questions(
    path: Path, skip_bad: bool, skipped: list[str], asked: dict[str, str]
) -> list[OwnQuestion]:
    """Read the questions of a file. `asked` has all earlier questions, which must not be
    repeated."""

    def parse(value: tuple[str, Any]) -> OwnQuestion:
        place, record = value
        if isinstance(record, ValueError):
            raise record
        question = OwnQuestion.model_validate(record)
        if (key := question_key(question.question)) in asked:
            raise ValueError(f"the same question as {asked[key]}")
        asked[key] = f"{path.name}, {place}"
        return question

    values = _parquet(path) if path.suffix == ".parquet" else json_records(path)
    remedy = f"fix the file (a question is a line such as {QUESTION_EXAMPLE})"
    return list(
        parse_records(
            ((place, (place, v)) for place, v in values),
            parse,
            str(path),
            skip_bad,
            skipped,
            remedy,
        )
    )


def _apart(made: dict[str, list[OwnQuestion]], skipped: list[str]) -> dict[str, list[OwnQuestion]]:
    """Remove val and test questions from train, and test questions from val. Raise ConfigError if
    none remains."""
    asked: set[tuple[str, str]] = set()
    kept = {}
    for split in reversed(SPLITS):
        keys = [
            (question_key(q.question), q.model_dump_json(exclude={"question", "answer"}))
            for q in made[split]
        ]
        kept[split] = [
            question for question, key in zip(made[split], keys, strict=True) if key not in asked
        ]
        skipped += [f"{split}: {key[0][:80]!r} is held out" for key in keys if key in asked]
        if not kept[split]:
            raise ConfigError(
                f"every question that was made for {split} is also in val or test; make different "
                "questions for each split, or, if "
                "the same text is intended, put the split into their metadata",
                code="questions_held_out",
            )
        asked.update(keys)
    return {split: kept[split] for split in SPLITS}


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        values = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise AgentR1Error(
            f"{path} cannot be read as parquet ({first_line(error)}); write it again",
            code="damaged_file",
        ) from None
    for number, value in enumerate(values, 1):
        yield f"row {number}", {key: item for key, item in value.items() if item is not None}


def _made(name: str, seed: int, split: str, count: int) -> list[OwnQuestion]:
    """Call a user-defined `questions(split, count, rng)` for one split."""
    make = plugins.load_trusted(name, "data.name")
    if not callable(make):
        raise ConfigError(
            f"data.name={name} is not a function; write `def questions(split, count, rng)`, which "
            f"yields {QUESTION_EXAMPLE}",
            code="wrong_code",
        )
    try:
        found = [
            OwnQuestion.model_validate(value)
            for value in make(split, count, random.Random(f"{seed}/{split}"))
        ]
    except Exception as error:
        raise ConfigError(
            f"data.name={name}, {split}: {plugins.error_location(error)}{type(error).__name__}: "
            f"{' '.join(str(error).split())}; "
            f"a question is {QUESTION_EXAMPLE}",
            code="broken_code",
        ) from error
    if len(found) < max(count, 1):
        raise ConfigError(
            f"data.name={name} made {len(found)} questions for {split}, but data.{split}={count}",
            code="too_few_questions",
        )
    return found


class OwnRows(RecordSource):
    """User-defined questions."""

    def title(self, config: DataConfig) -> str:
        return "your own"

    def local_files(self, config: DataConfig) -> dict[str, list[Path]]:
        return {part: [path] for part, path in source_files(config).items()}

    def parts(
        self, config: DataConfig, files: dict[str, list[Path]], seed: int, skipped: list[str]
    ) -> dict[str, list[OwnQuestion]]:
        return splits_of(config, {part: path for part, (path,) in files.items()}, seed, skipped)

    def asked(self, config: DataConfig, record: OwnQuestion) -> Asked:
        return Asked(
            record.question,
            record.answer,
            record.extra(),
            record.system or config.system,
            record.tools,
        )


ROWS = OwnRows()
