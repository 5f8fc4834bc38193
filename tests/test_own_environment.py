"""An environment of one's own, without exact match, on its whole way: trained, evaluated, compared, reported, chatted with.

A worked example of test_env.py, which reports next to nothing, under the commands of a speedrun."""

from __future__ import annotations

import io
import json
import random
import re
from statistics import fmean

import pytest
from conftest import question_row
from runs import curve, main
from test_env import CapitalEnv, capital

from agent_r1.config import load_config, tables
from agent_r1.data.storage import Passage, make_folder, write_corpus, write_rows
from agent_r1.workspace import Workspace
from agent_r1_recipes.laptop.tinyhop_source import TINYHOP

SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_tokens_per_turn=6", "rollout.max_context=384",
    "rollout.max_concurrent_episodes=16",
    "trainer.steps=2", "trainer.eval_every=1", "trainer.save_every=1", "trainer.rollouts_every=1",
    "trainer.threads=1", "trainer.device=cpu", "env.max_turns=3", "data.train=8", "data.val=4", "data.test=6", "data.cold=1",
]  # fmt: skip
QA = {"em", "em_ci95", "f1", "sub_em"}


def rows_of(split: str, count: int) -> list[dict]:
    numbers = random.Random(split)
    asked = "Which is the capital?"
    made = {"agent_name": "capital", "env_kwargs": {"tools": None}}
    return [question_row(f"{asked} ({split} {i})", (str(numbers.randrange(10)),), **made) for i in range(count)]


@pytest.fixture
def home(tmp_path, monkeypatch, micro_model):
    """Environment, tool and rows of one's own in place; returns the options of every command."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setitem(tables.entries("env"), "capital", {"code": CapitalEnv})
    monkeypatch.setitem(tables.entries("tool"), "capital", {"code": lambda **_: capital})
    settings = [*SETTINGS, "env.name=capital", "env.tools=[capital]", f"model.path={micro_model}"]
    config = load_config("smoke", settings, algorithm="grpo")

    def write(folder):
        for split in ("train", "val", "test", "cold"):
            write_rows(folder / f"{split}.parquet", rows_of(split, getattr(config.data, split)))
        write_corpus(folder / "corpus.jsonl", [Passage("p", "Paris", "Paris is a city.")])
        return {}

    files = [*(f"{split}.parquet" for split in TINYHOP.splits), "corpus.jsonl"]
    make_folder(Workspace(config).data, write, files)
    return tmp_path, ["--preset=smoke", "--run=mine", *settings]


def test_an_environment_without_exact_match_goes_all_the_way(home, capsys, monkeypatch):
    root, options = home
    run = root / "runs" / "mine"
    assert main("eval", "--before", "grpo", *options) == 0
    assert main("train", "grpo", *options) == 0
    assert main("eval", "grpo", *options) == 0
    assert main("report", "--run=mine") == 0

    lines = curve(run)
    assert not [key for line in lines for key in line if re.search(r"\bem\b|f1", key)]
    assert all("val-core/test/acc/mean@1" in line and "episode/tool_calls" in line for line in lines)
    assert {key for key in lines[0] if key.startswith("reward/")} == {"reward/right"}

    for name in ("eval_before", "eval"):
        card = json.loads((run / f"{name}.json").read_text())
        records = [json.loads(line) for line in (run / "rollouts" / f"{name}.jsonl").read_text().splitlines()]
        assert not QA & card.keys() and not QA & card["sampled"].keys()
        assert card["score_name"] == "reward" and card["score"] == pytest.approx(fmean(r["reward"] for r in records))
        assert card["mean_turns"] == pytest.approx(fmean(len(r["steps"]) for r in records))
        called = [len(step["info"].get("tool_calls", ())) for r in records for step in r["steps"]]
        assert card["mean_tool_calls"] * len(records) == pytest.approx(sum(called))

    page = (run / "report.html").read_text()
    assert "<small>reward</small>" in page and "its mean reward" in page and "xact match" not in page
    assert "EM " not in capsys.readouterr().out

    out, model = root / "out", run / "checkpoints" / "step_000002" / "model"
    models = ["--model", str(run / "checkpoints" / "step_000001" / "model"), "--model", str(model)]
    assert main("eval", *models, "--out", str(out)) == 0
    compared, whole = json.loads((out / "comparison.json").read_text()), (out / "2.jsonl").read_text()
    second = json.loads((out / "2.json").read_text())
    assert compared["score_name"] == "reward" and "em" not in compared
    assert compared["reward"][1] == pytest.approx(second["score"])
    low, high = compared["ci95"]
    assert compared["difference"] == pytest.approx(compared["reward"][1] - compared["reward"][0])
    assert low <= compared["difference"] <= high

    (out / "2.jsonl").write_text("".join(whole.splitlines(keepends=True)[:3]))  # taken up after an interruption
    (out / "2.json").unlink()
    assert main("eval", *models, "--out", str(out)) == 0
    again = json.loads((out / "2.json").read_text())
    changed = {"wall_seconds", "resumed"}
    assert {k: v for k, v in again.items() if k not in changed} == {k: v for k, v in second.items() if k not in changed}

    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    question = rows_of("test", 1)[0]["prompt"][-1]["content"]
    assert main("chat", "--model", str(model), "--question", question, "--json") in (0, 1)
    assert json.loads(capsys.readouterr().out)["question"] == question
