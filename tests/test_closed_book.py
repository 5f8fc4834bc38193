"""An agent without its tools: evaluations closed-book and with a placebo, on cards of their own."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
from runs import TINY, main

from agent_r1.data.rows import Passage
from agent_r1.env import brings_tools, make_env, without_tools
from agent_r1.env.hermes import call
from agent_r1.rollout.evaluate import majority
from agent_r1.search.placebo import Placebo
from agent_r1.search.searcher import Searcher
from agent_r1.settings import EnvConfig
from agent_r1.tool import make_tools
from agent_r1.types import Action

PASSAGES = [Passage(str(i), f"T{i}", f"T{i} is a town.") for i in range(20)]


def row_of(question: str, kind: str, *answers: str) -> dict:
    return {
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": list(answers)},
        "extra_info": {"kind": kind},
        "agent_name": "hermes",
        "env_kwargs": {"tools": ["search"]},
    }


def test_the_commonest_answer_by_hand():
    train = [row_of("q", "a", "Paris"), row_of("q", "a", "Rome"), row_of("q", "a", "Rome"), row_of("q", "b", "yes")]
    asked = [
        row_of("q", "a", "Roma", "the Rome"),
        row_of("q", "a", "Oslo"),
        row_of("q", "b", "no"),
        row_of("q", "c", "x"),
    ]
    assert majority(train, asked) == {
        "em": 1 / 4,
        "by_kind": {
            "a": {"answer": "Rome", "em": 0.5},
            "b": {"answer": "yes", "em": 0.0},
            "c": {"answer": "", "em": 0.0},
        },
    }


def test_a_placebo_finds_nothing_or_what_the_lot_says():
    assert Placebo().search(["T3", "T4"], 3) == [[], []]
    one, other = Placebo(PASSAGES, 0), Placebo(PASSAGES, 1)
    found = one.search(["T3", "T4", "T3"], 3)
    assert found[0] == found[2] != found[1] and other.search(["T3"], 3) != found[:1]
    assert all(len({hit.id for hit in hits}) == 3 for hits in found)
    assert len(one.search(["T3"], 50)[0]) == len(PASSAGES)


async def ask(env) -> str:
    return (await env.step(Action(call("search", query="T3"), "stop"))).observation.messages[0]["content"]


def test_what_the_agent_reads():
    for placebo, said in ((Placebo(), "no results"), (Placebo(PASSAGES), " is a town.")):
        tools = make_tools(["search"], searcher=Searcher(placebo), top_k=1)
        env = make_env(row_of("q", "a", "x"), tools, EnvConfig())
        env.reset(row_of("q", "a", "x"))
        assert said in asyncio.run(ask(env))
    closed = make_env(without_tools(row_of("q", "a", "x")), tools, EnvConfig())
    assert closed.reset(row_of("q", "a", "x")).tools == [] and "available: none" in asyncio.run(ask(closed))


def test_a_world_keeps_its_tools():
    assert brings_tools("openenv") and not brings_tools("hermes")


@pytest.fixture
def home(produced, tmp_path, monkeypatch):
    """A finished run, to be evaluated once more."""
    shutil.copytree(produced, tmp_path / "home")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_each_has_a_card_of_its_own_and_the_report_shows_them_side_by_side(home, capsys):
    run = home / "runs" / "grpo"
    plain = (run / "eval.json").read_text()
    for words in (["--closed-book"], ["--retriever=empty"], ["--retriever=random"], ["--before", "--closed-book"]):
        assert main("eval", "--run=grpo", *words) == 0
    cards = {name: json.loads((run / f"eval_{name}.json").read_text()) for name in ("closed_book", "empty", "random")}
    assert (run / "eval.json").read_text() == plain and (run / "eval_before_closed_book.json").exists()
    card = json.loads(plain)
    for name, found in cards.items():
        assert found["condition"] == name.replace("_", "-") and 0 <= found["malformed_rate"] <= 1
        assert (found["n"], found["rows_hash"], found["model_hash"]) == (
            card["n"],
            card["rows_hash"],
            card["model_hash"],
        )
        assert found["majority"]["by_kind"].keys() == card["by_kind"].keys()
        assert (run / "rollouts" / f"eval_{name}.jsonl").exists()
    assert "condition" not in card and "malformed_rate" in card
    assert [cards[name]["retriever"] for name in cards] == ["none", "empty", "random"]
    # Without tools the prompt offers none; a placebo is not announced.
    assert cards["closed_book"]["prompt_hash"] != card["prompt_hash"] == cards["empty"]["prompt_hash"]
    assert main("report", "--run=grpo") == 0
    page = (run / "report.html").read_text()
    assert all(
        words in page for words in ("Without its tools", "no tools", "finds nothing", "by lot", "commonest answer")
    )


def test_any_model_on_any_questions(home, tmp_path, capsys):
    model, out = str(home / "runs/grpo/checkpoints/step_000008/model"), tmp_path / "out"
    asked = ["eval", f"--model={model}", "--limit=4", f"--out={out}"]
    assert main(*asked, "--closed-book") == 0
    assert json.loads((out / "1.json").read_text())["condition"] == "closed-book"
    assert main(*asked) == 1 and "another evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--closed-book", "--retriever=empty"], 2, "give one of them"),
        (["--retriever=wrong"], 2, "invalid choice"),
    ],
)
def test_what_does_not_go_together(home, capsys, words, code, said):
    assert main("eval", "--run=grpo", *words) == code and said in capsys.readouterr().err


def test_an_agent_that_does_not_search_needs_no_placebo(home, capsys):
    settings = [*TINY, "env.tools=[calculator]"]
    model = str(home / "runs/grpo/checkpoints/step_000008/model")
    assert main("eval", f"--model={model}", *settings, "--retriever=empty") == 2
    assert "does not search" in capsys.readouterr().err
