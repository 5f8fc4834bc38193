"""The files of a data set: written whole or not at all, and checked before they are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent_r1.data.build import build
from agent_r1.data.storage import verify
from agent_r1.ground.errors import AgentR1Error
from agent_r1_recipes.laptop.settings import TinyHopSettings

FILES = ("train.parquet", "val.parquet", "test.parquet", "cold.parquet", "corpus.jsonl")
SMALL = TinyHopSettings(train=30, val=10, test=10, entities=60, cold=40, cold_entities=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("files") / "data"
    build(SMALL, seed=3, out=out)
    return out


def test_an_existing_folder_is_refused_and_kept(folder):
    with pytest.raises(AgentR1Error, match="already exists"):
        build(SMALL, seed=4, out=folder)
    assert verify(folder)["seed"] == 3


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / ".part-data").mkdir()  # what a killed run left behind
    (tmp_path / ".part-data" / "train.parquet").write_text("half")

    def no_space(path, passages):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agent_r1.data.build.write_corpus", no_space)
    with pytest.raises(AgentR1Error, match="No space left.*free some space"):
        build(SMALL, seed=0, out=tmp_path / "data")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """A data set that a test may damage."""
    return shutil.copytree(folder, tmp_path / "data")


def test_verify_sees_a_changed_byte_and_a_missing_file(copy):
    assert verify(copy)["seed"] == 3
    for name in FILES:
        content = (copy / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        (copy / name).write_bytes(changed)
        with pytest.raises(
            AgentR1Error, match=f"{name} has changed since it was made.*make the data again"
        ):
            verify(copy)
        (copy / name).unlink()
        with pytest.raises(AgentR1Error, match=f"{name} is missing"):
            verify(copy)
        (copy / name).write_bytes(content)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"\xff", "manifest.json is damaged"),
        (b'{"format": 1, "files": 3}', "manifest.json is damaged"),
        (b'{"format": 99, "files": {}}', "format 99"),
        (None, "manifest.json cannot be read"),
    ],
)
def test_verify_sees_a_damaged_manifest(tmp_path, manifest, says):
    if manifest is not None:
        (tmp_path / "manifest.json").write_bytes(manifest)
    with pytest.raises(AgentR1Error, match=says):
        verify(tmp_path)
