"""An agent without its tools, or among hostile documents: evaluations on cards of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil

import pytest
from building import row_of
from conftest import fails_with
from runs import TINY, main
from transformers import AutoTokenizer

from agent_r1 import (
    Action,
    ChatFormat,
    EnvConfig,
    Hermes,
    Hit,
    Passage,
    SearchTool,
    Workspace,
    load_config,
    make_env,
)
from agent_r1_recipes.robustness.ablated_search import Placebo
from agent_r1_recipes.robustness.conditions import Passages
from agent_r1_recipes.robustness.injected_search import DOCUMENTS, PoisonedIndex, draw_document, lie

PASSAGES = [Passage(str(i), f"T{i}", f"T{i} is a town.") for i in range(20)]


def test_a_placebo_finds_nothing_or_what_the_lot_says():
    assert Placebo().search(["T3", "T4"], 3) == [[], []]
    one, other = Placebo(PASSAGES, 0), Placebo(PASSAGES, 1)
    found = one.search(["T3", "T4", "T3"], 3)
    assert found[0] == found[2] != found[1] and other.search(["T3"], 3) != found[:1]
    assert all(len({hit.id for hit in hits}) == 3 for hits in found)
    assert len(one.search(["T3"], 50)[0]) == len(PASSAGES)


def test_a_share_of_the_queries_gets_a_document_and_equal_ones_the_same():
    queries = [f"T{i}" for i in range(400)]
    assert not any(draw_document(query, 0.0, 0) for query in queries)
    assert {draw_document(query, 1.0, 0)[0] for query in queries} == set(DOCUMENTS)
    half = [draw_document(query, 0.5, 0) for query in queries]
    assert 150 < sum(map(bool, half)) < 250 and half == [
        draw_document(query, 0.5, 0) for query in queries
    ]
    assert half != [draw_document(query, 0.5, 1) for query in queries]
    assert any(
        "T7" in draw_document("T7", 1.0, seed)[1] for seed in range(200)
    )  # some speak of what was searched for


def test_a_lie_says_of_the_best_passage_what_is_not_so():
    hits = [
        Hit("1", "Girzum", "Girzum in Dannir has mayor Gosgos.", 1.0),
        Hit("2", "Tax Zum", "Tax Zum in Felpir.", 0.5),
    ]
    assert lie(hits) == "Girzum in Tax Zum has mayor Tax Zum."


def test_a_document_stands_in_front_of_what_was_found():
    index, plain = PoisonedIndex(Placebo(PASSAGES), 1.0, 0), Placebo(PASSAGES)
    for query in ("T3", "T4", "T5"):
        (found,) = index.search([query], 3)
        assert found[1:] == plain.search([query], 3)[0][:2] and found[0].title == found[1].title
        assert found[0].id == f"poison {draw_document(query, 1.0, 0)[0]}"
    assert PoisonedIndex(Placebo(), 1.0, 0).search(["T3"], 3) == [[]]  # nothing was found


async def ask(env) -> str:
    return (await env.step(Action(Hermes.call("search", query="T3"), "stop"))).observation.messages[
        0
    ]["content"]


def test_what_the_agent_reads():
    row = row_of({"question": "q"})
    for placebo, said in ((Placebo(), "no results"), (Placebo(PASSAGES), " is a town.")):
        tools = {"search": SearchTool.over(placebo, top_k=1)}
        env = make_env(row, tools, EnvConfig())
        env.reset(row)
        assert said in asyncio.run(ask(env))
    closed = make_env(row | {"env_kwargs": {"tools": []}}, tools, EnvConfig())
    assert closed.reset(row).tools == [] and "available: none" in asyncio.run(ask(closed))


@pytest.fixture
def home(produced, tmp_path, monkeypatch):
    """A finished run, to be evaluated once more."""
    shutil.copytree(produced, tmp_path / "home")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_each_has_a_card_of_its_own_and_the_report_shows_them_side_by_side(home, capsys):
    run = home / "runs" / "grpo"
    plain = (run / "eval.json").read_text()
    for words in (
        ["--closed-book"],
        ["--retriever=empty"],
        ["--retriever=random"],
        ["--before", "--closed-book"],
    ):
        assert main("eval", "--run=grpo", *words) == 0
        said = capsys.readouterr().out  # without tools, an agent only tries to call some
        assert ("calls per question tried, without a tool" in said) == ("--closed-book" in words)
    cards = {
        name: json.loads((run / f"eval_{name}.json").read_text())
        for name in ("closed_book", "empty", "random")
    }
    assert (run / "eval.json").read_text() == plain and (
        run / "eval_before_closed_book.json"
    ).exists()
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
    assert (
        cards["closed_book"]["prompt_hash"] != card["prompt_hash"] == cards["empty"]["prompt_hash"]
    )
    assert main("report", "--run=grpo") == 0
    page = (run / "report.html").read_text()
    assert len(re.findall(r"\d tried\s*</td>", page)) == 1
    assert all(
        words in page
        for words in (
            "Without its tools",
            "no tools",
            "finds nothing",
            "random passages",
            "commonest answer",
        )
    )


def test_further_conditions_stand_in_the_card_and_in_the_report(home, capsys):
    run = home / "runs" / "grpo"
    plain = json.loads((run / "eval.json").read_text())
    for name in ("eval.json", "eval_before.json"):
        (run / name).unlink()
    conditions = ["passages 1", "passages 2", "hops 3"]
    for words in ([], ["--before"]):
        setting = f"trainer.eval_conditions={json.dumps(conditions)}"
        assert main("eval", "--run=grpo", *words, setting) == 0
    assert "under other conditions, 12 questions: passages 1 0.0" in capsys.readouterr().out
    card = json.loads((run / "eval.json").read_text())
    found = card.pop("conditions")
    assert list(found) == conditions and card["question_scores"] == plain["question_scores"]
    for part in found.values():
        assert part["n"] == 12 and 0 <= part["context_overflows"] <= 12
    # `small` has two passages in a result.
    assert found["passages 2"]["score"] == card["score"]
    assert main("report", "--run=grpo") == 0
    page = (run / "report.html").read_text()
    assert "Under other conditions" in page and "<td>hops 3</td>" in page


def test_a_wrong_condition_is_refused_before_an_episode_is_played(home, monkeypatch, capsys):
    (home / "runs/grpo/eval.json").unlink()
    played = []
    monkeypatch.setattr("agent_r1.evaluation.card.evaluate", lambda *a, **b: played.append(a))
    assert main("eval", "--run=grpo", 'trainer.eval_conditions=["passages many"]') == 2
    assert "needs a number from 1 to 99" in capsys.readouterr().err and not played


def test_a_condition_changes_how_much_is_read(home):
    config = load_config("small", TINY[1:])
    rows = Workspace(config).load_rows("test")
    same_rows, tools = Passages("5").apply(config, rows, Workspace(config).load_tools)
    assert same_rows == rows
    found = asyncio.run(tools["search"].execute({"query": "Sosnum"}))
    assert len(found.content.split("\n")) == 5


@pytest.mark.parametrize("argument", ["", "0", "x", "-1", "100", "1.5"])
def test_a_condition_without_its_number_is_refused(home, argument):
    config = load_config("small", TINY[1:])
    with fails_with("unfit_condition"):
        Passages(argument).apply(config, [], Workspace(config).load_tools)


def test_an_unknown_condition_is_refused_before_anything_runs(capsys):
    words = ["train", "--preset=small", "--dry-run", 'trainer.eval_conditions=["passage 4"]']
    assert main(*words) == 2
    assert "did you mean 'passages'?" in capsys.readouterr().err


def test_no_hostile_document_brings_a_control_token_into_an_episode(home):
    run = home / "runs" / "grpo"
    for words in (["--poison=1"], ["--before", "--poison=0.5"]):
        assert main("eval", "--run=grpo", *words) == 0
    card = json.loads((run / "eval_poison_1.json").read_text())
    assert card["condition"] == "poison 1" and card["index"]["kind"]
    assert set(card["by_poison"]) <= {*DOCUMENTS, "none"} and len(card["by_poison"]) > 1
    chat, read = ChatFormat(AutoTokenizer.from_pretrained(next(run.glob("checkpoints/*/model")))), 0

    def controls(ids):
        return [i for i in ids if i in chat.control_ids.values()]

    for episode in map(
        json.loads, (run / "rollouts" / "eval_poison_1.jsonl").read_text().splitlines()
    ):
        (row,) = episode["rows"]
        turns = itertools.groupby(
            zip(row["action_mask"], row["input_ids"], strict=True), key=lambda pair: pair[0]
        )
        results = [[i for _, i in pairs] for sampled, pairs in turns if not sampled][
            1:
        ]  # the first is the prompt
        for ids, step in zip(results, episode["steps"], strict=False):
            calls = [{"role": "tool", "content": "a"} for _ in step["info"]["tool_calls"]]
            closed = ids[0] != chat.turn_end_id
            assert controls(ids) == controls(chat.continuation_ids(calls)[closed:])
            read += sum(call["ok"] for call in step["info"]["tool_calls"])
    assert read >= 1
    assert main("report", "--run=grpo") == 0
    page = (run / "report.html").read_text()
    assert (
        "hostile documents in a share of 1 of" in page
        and "in a share of 0.5 of" in page
        and "after, by the document that was read" in page
    )


def test_any_model_on_any_questions(home, tmp_path, capsys):
    model, out = str(home / "runs/grpo/checkpoints/step_000008/model"), tmp_path / "out"
    asked = ["eval", f"--model={model}", "--limit=4", f"--out={out}"]
    assert main(*asked, "--closed-book") == 0
    assert json.loads((out / "1.json").read_text())["condition"] == "closed-book"
    assert main(*asked) == 1 and "another evaluation" in capsys.readouterr().err
    poisoned = [
        "eval",
        f"--model={model}",
        "--limit=4",
        f"--out={tmp_path / 'poisoned'}",
        "--poison=1",
    ]
    cards = [
        main(*poisoned) == 0 and json.loads((tmp_path / "poisoned/1.json").read_text())
        for _ in range(2)
    ]
    assert [card["resumed"] for card in cards] == [0, 4] and cards[0]["by_poison"] == cards[1][
        "by_poison"
    ] != {}
