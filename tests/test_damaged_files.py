"""Files that may come from others, damaged in every way that I could think of: each reader answers
with what it read, or with one line. None hangs, none shows a traceback."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config import from_yaml, load_config, to_yaml
from agent_r1.evaluation import card, power
from agent_r1.ground.bounds import MAX_FILE, open_file, read_file
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import read_jsonl, sha256
from agent_r1.watch.report import load_run
from agent_r1.watch.tokens import print_trajectory
from agent_r1_recipes.browser.record import read_record
from agent_r1_recipes.page.microscope import read_group, title_of

ROOT = Path(__file__).parents[1]
CARD = {
    "model": "m", "split": "test", "n": 4, "score": 0.5, "score_ci95": [0.1, 0.9],
    "score_name": "em", "rows_hash": "a", "questions_hash": "b", "question_scores": [0, 1, 1, 0],
}  # fmt: skip
GROUP = (ROOT / "docs" / "lessons" / "group.jsonl").read_text().splitlines()[0] + "\n"
RECORD = next((ROOT / "recipes" / "browser" / "records").glob("*.json")).read_text()

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "card": (json.dumps(CARD), power.read_card),
    "against": (json.dumps(CARD), card.read_card),
    "microscope": (GROUP, lambda file: title_of(read_group(file))),
    "record": (RECORD, read_record),
    "rollouts": (GROUP, read_jsonl),
    "inspect": (GROUP, lambda file: print_trajectory(file, 0, table=True)),
    "config": (to_yaml(load_config("small")), from_yaml),
    "report": (to_yaml(load_config("small")), lambda file: load_run(file.parent)),
}
"""Name -> a good file, and its reader."""


def damaged_texts(good: str) -> Iterator[bytes]:
    """Damage a text as disks, editors and attackers do."""
    data = good.encode()
    rng = random.Random(0)
    yield b""
    yield b"\0" * 100
    yield b"\xff\xfe" + data
    yield data[: len(data) // 2]
    yield data + b"\n{"
    yield b"[" * 100_000
    yield b'{"a":' * 100_000
    yield b"&a [*a, *a]"
    yield b"!!python/object/apply:os.system ['true']"
    yield data.replace(b'"', b"'")
    yield b"null"
    yield b"1e999"
    yield b'"\\ud800"'
    for _ in range(5):
        place = rng.randrange(len(data))
        yield data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


def damaged_values(good: str) -> Iterator[bytes]:
    """Replace each value at the top of a JSON object by one of another type, or leave it out."""
    try:
        value = json.loads(good)
    except ValueError:
        return
    for key in ("rows", "steps"):  # what an episode holds is a file's form, too
        for inner in (value.get(key) or [{}])[0]:
            for other in (None, 7, "\ud800", [], [None] * 5, {"a": 1}):
                changed = copy.deepcopy(value)
                changed[key][0][inner] = other
                yield json.dumps(changed).encode() + b"\n"
    for key in value:
        for other in (None, 7, -1e300, "\ud800", [], {}, [[]], {"a": None}):
            changed = copy.copy(value)
            changed[key] = other
            yield json.dumps(changed).encode() + b"\n"
        yield json.dumps({k: v for k, v in value.items() if k != key}).encode() + b"\n"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, name):
    good, read = READERS[name]
    (tmp_path / "run").mkdir()  # alone: the error of a run lists its neighbours
    file = tmp_path / "run" / "config.yaml"
    file.write_text(good)
    read(file)
    cases = [*damaged_texts(good), *damaged_values(good)]
    refusals = 0
    for data in cases:
        file.write_bytes(data)
        try:
            read(file)
        except AgentR1Error as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            refusals += 1
    assert refusals


def test_there_are_more_than_a_hundred_damages():
    counts = [len([*damaged_texts(good), *damaged_values(good)]) for good, _ in READERS.values()]
    assert sum(counts) > 300 and min(counts) > 15


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "endless"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, name, kind):
    file = tmp_path / "config.yaml"
    if kind == "pipe":
        os.mkfifo(file)  # opening it would wait for a writer
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/null" if kind == "device" else "/dev/zero")
    with pytest.raises((AgentR1Error, OSError)) as refused:
        READERS[name][1](file)
    assert "\n" not in str(refused.value)


def test_only_regular_files_are_hashed(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (Path("/dev/null"), tmp_path, pipe):  # /dev/zero would be hashed for ever
        with pytest.raises((ValueError, OSError)):
            sha256(file)


def test_a_file_is_bounded_also_when_it_grows(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_file(file, 4)
    with open_file(file, 5) as opened:
        assert opened.read() == b"12345"
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_file(Path("/proc/self/maps"), 10)  # its size is said to be 0
    assert MAX_FILE < 2**30
