"""Room 7, checkpoints: what is on disk is whole, or it is refused with the remedy."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from conftest import fails_with, random_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agent_r1.chat.tokenizer import save_tokenizer
from agent_r1.model import files as model_files
from agent_r1.training import checkpoint
from agent_r1.training.checkpoint import (
    list_checkpoints,
    read_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)


def write_model(folder: Path) -> None:
    model_files.save_model(random_model(), folder, 3, 0)
    (folder / "tokenizer.json").write_text("{}")


STATE = {"actor_optimizer": {"step": 3, "m": torch.arange(4.0)}, "critic": {"w": torch.ones(2, 2)}}


def save(folder: Path, step: int, keep: int = 9, write=write_model, state=STATE) -> Path:
    return save_checkpoint(folder, step, write, state, "f00d", keep)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ----------------------------------------------------------------------------------- there and back


def test_what_is_saved_is_read(tmp_path):
    path = save(tmp_path, 40)
    assert path == tmp_path / "step_000040"
    assert names(path) == ["manifest.json", "model", "trainer.pt"]
    step, state = read_checkpoint(path, "f00d")
    assert step == 40 and state["actor_optimizer"]["step"] == 3
    assert torch.equal(state["actor_optimizer"]["m"], torch.arange(4.0)) and torch.equal(
        state["critic"]["w"], torch.ones(2, 2)
    )
    assert model_files.load_model(path / "model").parameter_count == random_model().parameter_count
    assert names(tmp_path) == ["step_000040"]  # nothing half-written is left


def test_old_checkpoints_are_pruned_and_the_newest_kept(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_best").mkdir()
    for step in (5, 10, 15, 100_000):
        save(tmp_path, step, keep=2)
    save(tmp_path, 100_000, keep=2, state={"v": 2})  # once more
    assert names(tmp_path) == ["notes.txt", "step_000015", "step_100000", "step_best"]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000015", "step_100000"]
    assert read_checkpoint(tmp_path / "step_100000", "f00d") == (100_000, {"v": 2})


# -------------------------------------------------------------------------------- interrupted saves


def test_an_interrupted_save_leaves_the_old_one_and_the_next_save_works(tmp_path):
    def interrupted(folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    save(tmp_path, 10)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 20, write=interrupted)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000010"]
    assert read_checkpoint(tmp_path / "step_000010", "f00d")[0] == 10
    save(tmp_path, 20)
    assert names(tmp_path) == ["step_000010", "step_000020"]


@pytest.mark.parametrize(
    "moment", ["in the model", "before the state", "before the manifest", "before the renaming"]
)
def test_kill_9_leaves_the_old_one(tmp_path, monkeypatch, moment):
    save(tmp_path, 10)

    def die(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    def half_a_model(part):
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"x" * 1000)
        die()

    with monkeypatch.context() as patch:
        at = {"before the state": (torch, "save"), "before the manifest": (checkpoint, "sha256")}
        if moment != "in the model":
            patch.setattr(*at.get(moment, (Path, "rename")), die)
        child = os.fork()
        if child == 0:
            try:
                save(tmp_path, 20, write=half_a_model if moment == "in the model" else write_model)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000010"]
    assert read_checkpoint(tmp_path / "step_000010", "f00d")[0] == 10
    save(tmp_path, 20)  # what the killed one left behind is in nobody's way
    assert names(tmp_path) == ["step_000010", "step_000020"]


# ----------------------------------------------------------------------------------------- no space


def test_no_space_says_so_and_keeps_what_is_there(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 9)
    save(tmp_path, 10)
    monkeypatch.setattr(Path, "rename", full)
    with fails_with("cannot_write"):
        save(tmp_path, 20, keep=2)
    assert names(tmp_path) == [
        "step_000009",
        "step_000010",
    ]  # nothing is pruned before there is something newer
    assert read_checkpoint(tmp_path / "step_000010", "f00d")[0] == 10


@pytest.fixture
def small_files_only():
    """The operating system refuses to write more than 60 kB into one file: a full disk, as the C++
    and Rust writers see it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_while_tensors_are_written_says_so_too(tmp_path, small_files_only):
    """safetensors, tokenizers and torch do not raise OSError then, but errors of their own."""

    def little(part):
        part.mkdir()

    def long_tokenizer(part):
        backend = Tokenizer(models.WordLevel({str(i): i for i in range(10_000)}, unk_token="0"))
        save_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), part)

    for write, state in (
        (write_model, {}),
        (long_tokenizer, {}),
        (little, {"m": torch.zeros(100_000)}),
    ):
        with fails_with("cannot_write"):
            save(tmp_path, 20, write=write, state=state)
        assert names(tmp_path) == []


# ----------------------------------------------------------------------------------------- refusals


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, 10)


def test_another_configuration_is_refused(saved):
    with fails_with("other_settings"):
        read_checkpoint(saved, "beef")


@pytest.mark.parametrize("name", ["trainer.pt", "model/tokenizer.json"])
def test_a_flipped_bit_in_any_file_is_refused(saved, name):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with fails_with("damaged_checkpoint"):
        read_checkpoint(saved, "f00d")


@pytest.mark.parametrize("name", ["trainer.pt", "manifest.json"])
def test_a_half_written_or_missing_file_is_refused(saved, name):
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(whole[: len(whole) // 2])
    with fails_with("damaged_checkpoint"):
        read_checkpoint(saved, "f00d")
    (saved / name).unlink()
    with fails_with("damaged_checkpoint"):
        read_checkpoint(saved, "f00d")


def test_a_checkpoint_of_another_version_is_refused(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with fails_with("other_format"):
        verify_checkpoint(saved)


def test_a_checkpoint_can_hold_no_code(saved):
    """A pickle that would run a command is refused by torch itself, even with a fitting
    checksum."""

    class Evil:
        def __reduce__(self):
            return (Path.touch, (saved / "owned",))

    torch.save({"x": Evil()}, saved / "trainer.pt")
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["trainer.pt"] = checkpoint.sha256(saved / "trainer.pt")
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match="(?i)weights.only"):
        read_checkpoint(saved, "f00d")
    assert not (saved / "owned").exists()
