"""Released data: `agent-r1 data --release FOLDER`, and `--from FOLDER` on another machine."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import fails_with
from runs import TINY, main, tree

from agent_r1.ground.files import sha256

DATA = ("data", *TINY)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A home with data, and its release."""
    home = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(home))
        assert main(*DATA, "--release", str(home / "release")) == 0
    return home


@pytest.fixture
def other(made, tmp_path, monkeypatch):
    """Another machine: an empty home, and a copy of the release in it."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return shutil.copytree(made / "release", tmp_path / "release")


def data_of(home):
    (folder,) = (home / "artifacts").glob("tinyhop-*")
    return folder


def test_a_release_becomes_the_same_data(made, other, monkeypatch, capsys):
    def build(*words):
        raise AssertionError("it was made again")

    monkeypatch.setattr("agent_r1.data.build.build", build)
    assert main(*DATA, "--from", str(other)) == 0
    assert f"data: from {other}" in capsys.readouterr().out
    mine, theirs = data_of(other.parent / "home"), data_of(made)
    assert (mine.name, tree(mine)) == (theirs.name, tree(theirs)) and len(tree(mine)) == 6


def test_the_card(made):
    release = made / "release"
    card, manifest = (
        (release / "README.md").read_text(),
        json.loads((release / "manifest.json").read_text()),
    )
    passages = len((release / "corpus.jsonl").read_text().splitlines())
    kinds = manifest["splits"]["train"]["kinds"]
    assert f"| `train.parquet` | 64 | 1-hop {kinds['1-hop']}, 2-hop {kinds['2-hop']} |" in card
    assert f"| `corpus.jsonl` | {passages} | passages |" in card
    assert str(made) not in card


def test_the_command_of_the_card_reads_it(made, other, capsys):
    import shlex

    command = (other / "README.md").read_text().rpartition("    agent-r1 ")[2]
    assert main(*shlex.split(command)[:-1], str(other)) == 0
    assert data_of(other.parent / "home").name == data_of(made).name


def refused(capsys, code: int, *argv: str) -> str:
    capsys.readouterr()
    assert main(*argv) == code
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", ["test.parquet", "corpus.jsonl"])
def test_a_tampered_or_missing_file_is_refused(other, capsys, name):
    content = bytearray((other / name).read_bytes())
    content[len(content) // 2] ^= 1
    (other / name).write_bytes(content)
    assert f"{other / name} has changed since it was made" in refused(
        capsys, 1, *DATA, "--from", str(other)
    )
    (other / name).unlink()
    assert f"{other / name} is missing" in refused(capsys, 1, *DATA, "--from", str(other))
    (other / "manifest.json").unlink()
    assert f"{other} is not a release" in refused(capsys, 1, *DATA, "--from", str(other))
    assert not (other.parent / "home" / "artifacts").exists()


def test_a_file_outside_of_the_release_is_neither_read_nor_written(other, capsys):
    victim = other.parent / "victim.jsonl"
    victim.write_text("mine")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["files"]["../victim.jsonl"] = sha256(victim)
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert "outside the folder" in refused(capsys, 1, *DATA, "--from", str(other))
    assert victim.read_text() == "mine" and not list((other.parent / "home").rglob("victim*"))


@pytest.mark.parametrize("change", [{"config": None}, {"config": []}, {"seed": None}])
def test_a_manifest_without_settings_is_refused(other, capsys, change):
    manifest = json.loads((other / "manifest.json").read_text()) | change
    kept = {key: value for key, value in manifest.items() if value is not None}
    (other / "manifest.json").write_text(json.dumps(kept))
    assert "names no settings" in refused(capsys, 1, *DATA, "--from", str(other))


@pytest.mark.parametrize(
    ("argv", "words"),
    [(["--seed=1"], "seed=0 there, 1 here"), (["data.train=65"], "train=64 there, 65 here"),
     (["env.name=react"], "env.name='hermes' there, 'react' here")],
)  # fmt: skip
def test_data_of_other_settings_are_refused(other, capsys, argv, words):
    assert words in refused(capsys, 2, *DATA, *argv, "--from", str(other))


def test_a_manifest_that_names_no_corpus_is_refused(other, capsys):
    manifest = json.loads((other / "manifest.json").read_text())
    del manifest["files"]["corpus.jsonl"]
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert "does not name corpus.jsonl" in refused(capsys, 1, *DATA, "--from", str(other))


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": 2, "files": []}', '{"format": 2, "files": {}, "sources": [1]}'],
)
def test_a_manifest_of_another_form_is_refused_in_one_line(other, capsys, text):
    (other / "manifest.json").write_text(text)
    assert "manifest.json" in refused(capsys, 1, *DATA, "--from", str(other))


def test_a_corpus_line_is_bounded(tmp_path):
    from agent_r1.data.storage import read_corpus

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "a", "text": "' + "x" * (17 << 20) + '"}\n')
    with fails_with("bad_passage", "16 MB"):
        list(read_corpus(corpus))
