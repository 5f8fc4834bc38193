"""The agent that ships with the recipe: small, as good as its card says, and refused once a file
differs."""

from __future__ import annotations

import hashlib
import io
import json
import shutil

import pytest
import torch
from runs import main
from safetensors.torch import load_file

from agent_r1_recipes.laptop.settings import DEMO_AGENT

QUESTION = (
    "--question",
    "In which city is the publisher of Sosnum based?",
    "--temperature",
    "0",
    "--json",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty AGENT_R1_HOME: no run, no data, no index."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    return tmp_path


def test_it_is_small_in_half_precision_and_its_hashes_cover_every_file():
    files = [file for file in DEMO_AGENT.iterdir() if file.name != "SHA256SUMS"]
    assert (DEMO_AGENT / "SHA256SUMS").read_text() == "".join(
        f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in sorted(files)
    )
    assert sum(file.stat().st_size for file in files) < 2e6
    assert {tensor.dtype for tensor in load_file(DEMO_AGENT / "model.safetensors").values()} == {
        torch.float16
    }


def test_it_answers_as_its_card_says_in_the_world_that_its_settings_generate(home):
    recorded, text = (
        json.loads((DEMO_AGENT / "eval.json").read_text()),
        (DEMO_AGENT / "README.md").read_text(),
    )
    assert (
        f"| this folder (float16) | {recorded['em']:.3f} |" in text
        and recorded["code"]["commit"] in text
    )
    command = ["eval", "--model", str(DEMO_AGENT), "--out", str(home / "out")]
    assert main(*command, "trainer.eval_samples=1", "trainer.eval_conditions=[]") == 0
    card = json.loads((home / "out" / "1.json").read_text())
    for key in ("n", "rows_hash", "data", "data_hash", "model_hash", "config_hash"):
        assert card[key] == recorded[key], key
    assert card["index"]["corpus_sha256"] == recorded["index"]["corpus_sha256"]
    assert card["em"] == pytest.approx(recorded["em"], abs=0.01)  # another CPU has other last bits


def test_the_demo_needs_nothing_but_the_package(home, capsys):
    assert main("chat", *QUESTION) == 1 and "`agent-r1 chat --demo`" in capsys.readouterr().err
    assert main("chat", "--demo", *QUESTION) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert (record["answer"], record["reward"], len(record["tool_calls"])) == ("Landir", 1.0, 2)
    assert "it is generated now" in said.err and {path.name for path in home.iterdir()} == {
        "artifacts"
    }


@pytest.mark.parametrize("name", ["model.safetensors", "agent_r1.yaml", "tokenizer.json"])
def test_a_tampered_or_missing_file_is_refused(home, capsys, name):
    copy = shutil.copytree(DEMO_AGENT, home / "copy")
    changed = bytearray((copy / name).read_bytes())
    changed[-2] ^= 1
    (copy / name).write_bytes(changed)
    target = home / "new"
    for command in (
        ["chat", "--model", str(copy), *QUESTION],
        ["export", f"--checkpoint-dir={copy}", f"--target-dir={target}"],
    ):
        assert main(*command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{copy / name} is not the published file" in line
        (copy / name).unlink(missing_ok=True)
