"""Read user-defined questions from a file, a folder of splits, or a function.

In: `data.source`, or the function that `data.name` names. Out: `OwnQuestion`s by split. Next:
`build.py` makes rows of them.

    {"question": "What is 6 * 7?", "answer": "42"}                          a line of a JSONL file
    {"question": "...", "answer": ["42", "forty-two"], "metadata": {"level": 1},
     "kind": "easy", "system": "You are ...", "tools": ["calculator"],
     "context": "A text about this question only.",
     "passages": [{"title": "Six", "text": "Six is a number."}]}            all possible keys

A parquet file has the same names as columns. `null` is a missing value, and 3.0 is the number 3.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, model_validator

from agent_r1.config import plugins
from agent_r1.config.settings import DataConfig
from agent_r1.data.json_files import Text, json_records, parse_records
from agent_r1.data.source import SPLITS, Asked
from agent_r1.data.spellings import question_key
from agent_r1.data.splits import RecordSource, split_one
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError, first_line
from agent_r1.ground.fields import describe_counts
from agent_r1.ground.ui import say

MAX_WHOLE_DIGITS = 400
"""Digits of a whole number that was written as a float: the largest float has 309."""
MAX_EXACT = 2.0**53
"""Below it, every whole number has a float of its own."""
CONTEXT = "[context]\n{context}\n[end of context]\n\n{question}"
"""What the agent reads: the marks keep a question inside the context apart from the question."""
HARMLESS = {
    "__index_level_0__": "pandas' row number",
    "Unnamed: 0": "pandas' row number",
    "index": "a row number",
}
"""Columns of question files whose values are not read -> what they are."""
QUESTION_EXAMPLE = '{"question": "What is 6 * 7?", "answer": "42"}'


class Titled(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: str
    text: str


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class OwnQuestion(BaseModel):
    """One question. Other keys are refused; data for the environment go into `metadata`."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    question: Text
    answer: Annotated[list[Text], BeforeValidator(_as_list)] = []
    """Any of these is right. May be left out if a user-defined environment or reward scores."""
    context: Text | None = None
    """A text that belongs to this question: the agent reads it before the question."""
    metadata: dict[str, Any] = {}  # for environment and reward, not for the agent
    kind: Text | None = None  # evaluations report each kind separately
    system: Text | None = None
    tools: list[Text] | None = None
    supporting: list[Text] = []
    """Titles of the passages that the answer needs, to measure the share that searches find."""
    passages: list[Titled] = []
    """Together with those of other questions the corpus, unless `data.corpus` is a file."""

    _place: str = PrivateAttr("")

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, value: Any) -> Any:
        """Refuse values that a row cannot store: NaN, Infinity, and too deeply nested lists.

        pandas and datasets write a missing value as null, and integers with a gap as floats.
        """
        bounds.check_depth(value)
        if not _is_finite(value):
            raise ValueError("NaN or Infinity, which is not a number")
        if not isinstance(value, dict):
            return value
        return {
            key: _storable(field_value) if key == "metadata" else _whole_numbers(field_value)
            for key, field_value in value.items()
            if field_value is not None
        }

    @property
    def key(self) -> str:
        """What is equal for equal questions; the same question about another text is another."""
        key = question_key(self.question)
        return f"{question_key(self.context)}\0{key}" if self.context else key

    @property
    def prompt(self) -> str:
        """The text of the agent's first message."""
        if self.context is None:
            return self.question
        # A context that contains the closing mark cannot end itself.
        context = self.context.replace("[end of context]", "[end of context ]")
        return CONTEXT.format(context=context, question=self.question)

    @property
    def place(self) -> str:
        """Where the question stands, such as `q.jsonl, line 3`; "" without a file."""
        return self._place

    def set_place(self, place: str) -> None:
        """Note where the question stands."""
        self._place = place

    @property
    def paragraphs(self) -> list[tuple[str, str]]:
        """Return title and text of each passage, as in a published record."""
        return [(passage.title, passage.text) for passage in self.passages]

    def extra(self) -> dict[str, Any]:
        """Return the row's further data. Parquet cannot store an empty object."""
        facts = {"kind": self.kind, "metadata": self.metadata, "supporting": self.supporting}
        if self.context is not None:
            facts["source_line"] = self._place  # for the message about a context that is too long
        return {key: value for key, value in facts.items() if value}


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_finite(element) for element in value.values())
    if isinstance(value, list):
        return all(_is_finite(element) for element in value)
    return not isinstance(value, float) or math.isfinite(value)


def _storable(value: Any, is_inside: bool = False) -> Any:
    """Return metadata as parquet stores them. An empty object inside them is a missing value.

    Raises ValueError for a whole number of more than 64 bits, and for types that JSON lacks.
    """
    if isinstance(value, dict):
        if is_inside and not value:
            return None
        return {key: _storable(element, is_inside=True) for key, element in value.items()}
    if isinstance(value, list):
        return [_storable(element, is_inside=True) for element in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits in the metadata; write it as a text")
    if isinstance(value, Decimal):  # a column of amounts, such as 3.00 or 2.50
        return float(value)
    if not isinstance(value, str | int | float | None):
        raise ValueError(
            f"{value!r:.40} in the metadata, of type {type(value).__name__}; write it as a text or "
            "a number"
        )
    return value


def _whole_numbers(value: Any) -> Any:
    """Write whole numbers as integers, and drop missing elements: [3.0, null] is [3]."""
    if isinstance(value, list):
        return [_whole_numbers(element) for element in value if element is not None]
    if isinstance(value, dict):
        return {
            key: _whole_numbers(element) for key, element in value.items() if element is not None
        }
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value) if value.adjusted() < MAX_WHOLE_DIGITS else value
    return value


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
            f"JSONL or parquet file, one question a line: {QUESTION_EXAMPLE}",
            code="missing_source",
        )
    if source.is_dir():
        return {split: _file(source, split) for split in SPLITS}
    return {"own": source}


def _file(folder: Path, split: str) -> Path:
    for ending in ("jsonl", "parquet"):
        path = folder / f"{split}.{ending}"
        if path.is_file():
            return path
    raise AgentR1Error(
        f"{folder} has no {split}.jsonl or {split}.parquet; a single file is divided into the "
        "splits",
        code="missing_source",
    )


def splits_of(
    config: DataConfig, files: dict[str, Path], seed: int, omissions: list[str]
) -> dict[str, list[OwnQuestion]]:
    """Read or make the questions of each split, or of all. Omitted ones are named in `omissions`.

    Raises AgentR1Error naming a bad line; ConfigError for too few questions.
    """
    counts = {split: getattr(config, split) for split in SPLITS}
    if plugins.is_user_code(config.name):
        questions = {
            split: _questions_from_function(config.name, seed, split, count)
            for split, count in counts.items()
        }
        give_metadata_one_type(questions)
        return _without_held_out(questions, omissions)
    places: dict[str, str] = {}
    questions = {
        name: read_questions(path, config.skip_bad, omissions, places)
        for name, path in files.items()
    }
    for entries in questions.values():
        for question in entries:
            question.metadata = _whole_floats_as_integers(question.metadata)
    give_metadata_one_type(questions)
    if "own" in questions:
        return questions
    for split, count in counts.items():
        if count > len(questions[split]):
            raise ConfigError(
                f"{config.source} has {len(questions[split])} questions in {split}, and "
                f"data.{split}={count}",
                code="too_few_questions",
            )
    return {split: questions[split][: count or None] for split, count in counts.items()}


def read_questions(
    path: Path, skip_bad: bool, omissions: list[str], places: dict[str, str]
) -> list[OwnQuestion]:
    """Read the questions of a file.

    `places` has the places of all earlier questions by their keys, which must not be repeated.
    """

    counts: Counter[str] = Counter()

    def parse(value: tuple[str, Any]) -> OwnQuestion:
        place, record = value
        if isinstance(record, ValueError):
            raise record
        if isinstance(record, dict):
            for column in HARMLESS.keys() & record.keys():
                # A column `index` of texts or truth values means something, and is refused.
                number = _whole_numbers(record[column])
                if isinstance(number, int | None) and not isinstance(number, bool):
                    counts[column] += record.pop(column) is not None
        question = OwnQuestion.model_validate(record)
        if question.key in places:
            raise ValueError(f"the same question as {places[question.key]}")
        question.set_place(f"{path.name}, {place}")
        places[question.key] = question.place
        return question

    values = _parquet(path) if path.suffix.lower() == ".parquet" else json_records(path)
    keys = ", ".join(OwnQuestion.model_fields)
    remedy = f"fix the file (a question is a line such as {QUESTION_EXAMPLE}; its keys are {keys})"
    values_with_places = ((place, (place, value)) for place, value in values)
    questions = list(
        parse_records(values_with_places, parse, str(path), skip_bad, omissions, remedy)
    )
    if counts:
        say(f"  {path.name}: {describe_counts(counts, HARMLESS)}")
    return questions


def give_metadata_one_type(questions: dict[str, list[OwnQuestion]]) -> None:
    """Check that each key of the metadata has one type in all splits.

    Integers become floats where a key has both. A split is a table of typed columns, so questions
    that were drawn together would otherwise decide whether the file is accepted. Raises
    AgentR1Error with two places.
    """
    first: dict[str, tuple[str, str]] = {}  # key -> type, and the place where it was met first
    floats: set[str] = set()
    for entries in questions.values():
        for number, question in enumerate(entries, 1):
            place = question.place or f"question {number}"
            for key, kind in _types(question.metadata, "metadata"):
                if kind == "float":
                    floats.add(key)
                    kind = "number"
                first_kind, first_place = first.setdefault(key, (kind, place))
                if first_kind != kind:
                    raise AgentR1Error(
                        f"{key} is a {first_kind} in {first_place} and a {kind} in {place}; give "
                        "each key of the metadata one type in all questions",
                        code="mixed_metadata",
                    )
    for entries in questions.values():
        for question in entries:
            question.metadata = _with_floats(question.metadata, "metadata", floats)


def _types(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the type of each value; a list's elements have one key."""
    if value is None:
        return
    if isinstance(value, dict):
        yield key, "object"
        for name, element in value.items():
            yield from _types(element, f"{key}.{name}")
    elif isinstance(value, list):
        yield key, "list"
        for element in value:
            yield from _types(element, f"{key}[]")
    elif isinstance(value, bool):
        yield key, "truth value"
    elif isinstance(value, int):
        yield key, "number"
    elif isinstance(value, float):
        yield key, "float"
    elif isinstance(value, str):
        yield key, "text"
    else:
        yield key, type(value).__name__


def _whole_floats_as_integers(value: Any) -> Any:
    """Return the value of a file with 3 for 3.0, as in other columns.

    pandas writes integers with a gap as floats. `give_metadata_one_type` makes them floats again
    where a key has others.
    """
    if isinstance(value, dict):
        return {key: _whole_floats_as_integers(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_whole_floats_as_integers(element) for element in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT:
        return int(value)
    return value


def _with_floats(value: Any, key: str, floats: set[str]) -> Any:
    """Return the value with floats for the integers of those keys."""
    if isinstance(value, dict):
        return {
            name: _with_floats(element, f"{key}.{name}", floats) for name, element in value.items()
        }
    if isinstance(value, list):
        return [_with_floats(element, f"{key}[]", floats) for element in value]
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_integer and key in floats else value


def _without_held_out(
    questions: dict[str, list[OwnQuestion]], omissions: list[str]
) -> dict[str, list[OwnQuestion]]:
    """Remove val and test questions from train, and test questions from val.

    Raise ConfigError if none remains.
    """
    held_out: set[tuple[str, str]] = set()
    rest = {}
    for split in reversed(SPLITS):
        keys = []
        rest[split] = []
        for question in questions[split]:
            others = question.model_dump_json(exclude={"question", "answer"})
            key = (question_key(question.question), others)
            keys.append(key)
            if key in held_out:
                omissions.append(f"{split}: {key[0][:80]!r} is held out")
            else:
                rest[split].append(question)
        if not rest[split]:
            raise ConfigError(
                f"every question that was made for {split} is also in val or test; make different "
                "questions for each split, or, if the same text is intended, put the split into "
                "their metadata",
                code="questions_held_out",
            )
        held_out.update(keys)
    return {split: rest[split] for split in SPLITS}


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with bounds.open_file(path, most_bytes=None) as file:
            values = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise AgentR1Error(
            f"{path} cannot be read as parquet ({first_line(error)}); write it again",
            code="damaged_file",
        ) from None
    for number, value in enumerate(values, 1):
        # pandas writes a missing number as NaN, in a column of floats.
        yield f"row {number}", {key: cell for key, cell in value.items() if cell == cell}


def _questions_from_function(name: str, seed: int, split: str, count: int) -> list[OwnQuestion]:
    """Call a user-defined `questions(split, count, rng)` for one split."""
    make = plugins.load_trusted(name, "data.name")
    if not callable(make):
        raise ConfigError(
            f"data.name={name} is not a function; write `def questions(split, count, rng)`, which "
            f"yields {QUESTION_EXAMPLE}",
            code="wrong_code",
        )
    try:
        questions = [
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
    if len(questions) < max(count, 1):
        raise ConfigError(
            f"data.name={name} made {len(questions)} questions for {split}, but "
            f"data.{split}={count}",
            code="too_few_questions",
        )
    return questions


class OwnRows(RecordSource):
    """User-defined questions."""

    def title(self, config: DataConfig) -> str:
        return "your own"

    def local_files(self, config: DataConfig) -> dict[str, list[Path]]:
        return {part: [path] for part, path in source_files(config).items()}

    def check_settings(self, config: DataConfig, seed: int) -> None:
        """Read the questions of a file, and divide them. A function is not called."""
        files = self.local_files(config)
        if not files:
            return
        omissions: list[str] = []
        parts = self.parts(config, files, seed, omissions)
        if "own" in parts:
            split_one(config, f"{seed}/own", parts["own"], omissions)

    def parts(
        self, config: DataConfig, files: dict[str, list[Path]], seed: int, omissions: list[str]
    ) -> dict[str, list[OwnQuestion]]:
        return splits_of(config, {part: path for part, (path,) in files.items()}, seed, omissions)

    def asked(self, config: DataConfig, record: OwnQuestion) -> Asked:
        return Asked(
            record.prompt,
            record.answer,
            record.extra(),
            record.system or config.system,
            record.tools,
        )


ROWS = OwnRows()
