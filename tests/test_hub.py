"""Start models of the Hugging Face hub, by a hub of folders; indexes of other machines; and the
card that names them."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import huggingface_hub
import pytest
from runs import TINY, main

from agent_r1 import __version__
from agent_r1.config import load_config
from agent_r1.evaluation.provenance import code_version, weights_hash
from agent_r1.workspace import Workspace


class FakeHub:
    """Stands in for the hub and its client: repositories with commits, and a cache that is called
    by them."""

    def __init__(self, root: Path):
        self.root, self.repos, self.asked, self.offline = root, {}, [], False

    def publish(self, name: str, folder: Path, kind: str = "model") -> str:
        """A new commit with these files."""
        commits = self.repos.setdefault((kind, name), {})
        commit = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits[commit] = shutil.copytree(
            folder, self.root / "server" / commit
        )  # what links point to, not the links
        return commit

    def snapshot_download(self, repo_id, *, repo_type, revision, allow_patterns) -> str:
        if self.offline:
            raise ConnectionError("cannot reach the hub\nwith a long story")
        if (repo_type, repo_id) not in self.repos:
            response = _response(404)
            raise huggingface_hub.errors.RepositoryNotFoundError(
                "404, no such repository", response=response
            )
        commits = self.repos[repo_type, repo_id]
        commit = revision or list(commits)[-1]
        cached = self.cache(repo_id) / "snapshots" / commit
        for file in sorted(commits[commit].iterdir()):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                self.asked.append(file.name)
                cached.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, cached / file.name)
        return str(cached)

    def cache(self, name: str) -> Path:
        return self.root / "cache" / name.replace("/", "--")


def _response(status: int):
    import httpx

    return httpx.Response(status, request=httpx.Request("GET", "http://localhost"))


@pytest.fixture
def fake(tmp_path, monkeypatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return fake


def refused(capsys, *argv: str) -> str:
    """The one line with which the command fails."""
    capsys.readouterr()
    assert main(*argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ------------------------------------------------------------------------------------- start models


@pytest.mark.parametrize("script", ["echo HEAD; exit 128", "exit 1"])
def test_a_git_that_fails_says_nothing_about_the_code(script, tmp_path, monkeypatch):
    """`git rev-parse HEAD` prints HEAD in a checkout without a commit, and fails."""
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\n{script}\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert code_version() == {"version": __version__, "commit": None}


def test_a_git_that_is_too_slow_loses_no_card(monkeypatch):
    def time_out(words, **options):
        raise subprocess.TimeoutExpired(words, options["timeout"])

    monkeypatch.setattr(subprocess, "run", time_out)
    assert code_version() == {"version": __version__, "commit": None}


def test_a_start_model_is_fetched_once_and_its_commit_kept(fake, micro_model, capsys):
    first = fake.publish("acme/tiny", micro_model)
    settings = [*TINY, "model.path=acme/tiny"]
    workspace = Workspace(load_config("small", settings[1:]))
    assert main("cold-start", *settings) == 0
    assert f"commit {first}" in capsys.readouterr().out
    manifest = json.loads((workspace.fetch_folder / "manifest.json").read_text())
    assert (manifest["model"], manifest["revision"]) == ("acme/tiny", first)
    assert (
        workspace.start_model
        == Path(manifest["folder"])
        == fake.cache("acme/tiny") / "snapshots" / first
    )
    assert weights_hash(workspace.start_model) == weights_hash(micro_model)
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(
        fake.asked
    )

    fake.publish("acme/tiny", micro_model)  # the author changes something
    assert main("cold-start", *settings) == 0 and "already done" in capsys.readouterr().out
    assert workspace.start_model.name == first
    shutil.rmtree(fake.cache("acme/tiny"))  # somebody needs the space
    assert main("cold-start", *settings) == 0
    assert workspace.start_model.is_dir() and workspace.start_model.name == first


def test_neither_code_nor_pickles_are_fetched(fake, micro_model, tmp_path):
    folder = shutil.copytree(micro_model, tmp_path / "model")
    for name in ("pytorch_model.bin", "modeling_evil.py", "training_args.pt", "x.pkl"):
        (folder / name).write_text("boom")
    fake.publish("acme/evil", folder)
    assert main("cold-start", *TINY, "model.path=acme/evil") == 0
    assert not [name for name in fake.asked if name.endswith((".bin", ".py", ".pt", ".pkl"))]


def test_weights_that_are_cut_short_are_refused_before_anything_starts(
    fake, micro_model, tmp_path, capsys
):
    """As a full disk or a copy that broke off leaves them: all names are there."""
    whole = (micro_model / "model.safetensors").stat().st_size
    settings = [*TINY, "model.path=acme/tiny", "trainer.max_tokens_per_microbatch=2048"]
    fake.publish("acme/tiny", micro_model)
    assert main("data", *settings) == main("index", *settings) == main("cold-start", *settings) == 0
    file = Workspace(load_config("small", settings[1:])).start_model / "model.safetensors"
    os.truncate(file, whole - 1)
    said = refused(capsys, "train", *settings)
    assert (
        f"{file.resolve()} is cut short or broken" in said
        and "delete it and make or download it again" in said
    )
    assert not (tmp_path / "home" / "runs").exists()
    file.unlink()  # as it says
    assert main("cold-start", *settings) == 0 and file.stat().st_size == whole


# ------------------------------------------------------------------------------------------ indexes


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A home with data and index."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("built")
        patch.setenv("AGENT_R1_HOME", str(home))
        assert main("data", *TINY) == main("index", *TINY) == 0
    return home


def settings_of(folder: Path) -> list[str]:
    return [*TINY, f"search.index={folder}"]


@pytest.fixture
def elsewhere(built, tmp_path, monkeypatch) -> Path:
    """A copy of that index outside of a home that has the data alone."""
    (theirs,) = built.glob("artifacts/index-*")
    (data,) = built.glob("artifacts/tinyhop-*")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    shutil.copytree(data, tmp_path / "home" / "artifacts" / data.name)
    return shutil.copytree(theirs, tmp_path / "theirs")


def test_an_index_that_another_machine_built_is_used_where_it_lies(built, elsewhere, capsys):
    assert main("index", *settings_of(elsewhere)) == 0
    said = capsys.readouterr().out
    assert "recall@2" in said and f"in {elsewhere}" in said
    assert not list((elsewhere.parent / "home").glob("artifacts/index-*"))
    (own,) = built.glob("artifacts/index-*")
    ours, theirs = (
        Workspace(load_config("small", settings_of(folder)[1:])).load_index()
        for folder in (own, elsewhere)
    )
    assert ours.search(["Vexlor founder", "city"], 3) == theirs.search(
        ["Vexlor founder", "city"], 3
    )


# ----------------------------------------------------------------------------------------- the card


def test_the_card_says_what_the_result_was_made_from(fake, built, micro_model, tmp_path):
    shutil.copytree(built, tmp_path / "home")
    data_folder = Workspace(load_config("small", TINY[1:])).data
    commit = fake.publish("acme/tiny", micro_model)
    settings = [*TINY, "model.path=acme/tiny"]
    assert (
        main("cold-start", *settings) == 0
        and main("eval", "--before", "grpo", *settings, "--run=x") == 0
    )
    card = json.loads((tmp_path / "home" / "runs" / "x" / "eval_before.json").read_text())
    data, index = (
        json.loads((p / "manifest.json").read_text()) for p in (data_folder, fetched_plain())
    )
    assert (
        card["start_model"] == "acme/tiny"
        and card["start_model_revision"] == card["model_revision"] == commit
    )
    assert (
        card["model_hash"] == weights_hash(micro_model)
        and card["seed"] == 0
        and card["wall_seconds"] > 0
    )
    assert (
        card["data"] == data_folder.name and card["data_revision"] is None
    )  # TinyHop is from nowhere
    assert card["index"] == {
        "encoder": "ngram", "encoder_package": None, "corpus": "contexts",
        "corpus_sha256": data["files"]["corpus.jsonl"], "kind": "Flat",
        "sha256": index["files"]["vectors.faiss"],
    }  # fmt: skip
    vectors = (fetched_plain() / "vectors.faiss").read_bytes()
    assert card["index"]["sha256"] == hashlib.sha256(vectors).hexdigest()
    assert card["command"].startswith("bash speedrun-nodocker.sh grpo --preset small --seed 0")
    assert 'model.path="acme/tiny"' in card["command"] and "core" in card["hardware"]
    assert len(card["rows_hash"]) == 16 and card["code"] == code_version()


def fetched_plain() -> Path:
    return Workspace(load_config("small", TINY[1:])).index
