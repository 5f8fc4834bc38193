"""docs/tutorial/your-own-environment.md and recipes/openenv, followed in an empty folder: commands
made small."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from openenv_server import serving
from runs import ROOT, main
from test_tutorial import SMALL, blocks, commands, empty_folder, follow  # noqa: F401, the fixture

PAGE, OPENENV = "your-own-environment.md", "../../recipes/openenv/README.md"
ROWS = ["data.train=8", "data.val=4", "data.test=4", "rollout.max_concurrent_episodes=16"]
TURNS = ["env.max_turns=2", "rollout.max_tokens_per_turn=8"]


@pytest.fixture
def files(empty_folder):  # noqa: F811
    """What the page has one write."""
    for name, code in zip(("treasure.py", "words.py"), blocks(PAGE, "python"), strict=False):
        (empty_folder / name).write_text(code)
    (empty_folder / "guess.py").write_text(blocks(OPENENV, "python")[0])
    return empty_folder


@pytest.fixture(scope="module")
def server():
    with serving() as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "score"),
    [(0, "found"), (1, "reward"), (2, "reward")],
    ids=["class", "env", "openenv"],
)
def test_every_command_of_the_page_trains(files, server, micro_model, number, score):
    """The class has a demonstrator, so its model is one that was cloned from it."""
    trained = [words for words in commands(PAGE) if words[0] == "train"]
    words = [*trained, commands(OPENENV)[1]][number]
    words = [word.replace("http://127.0.0.1:8000", f"{server}/guess") for word in words]
    settings = [*SMALL, *ROWS, "--run=mine"]
    if number:
        settings = [s for s in settings if not s.startswith("model")] + [
            *TURNS,
            f"model.path={micro_model}",
        ]
    assert follow(words, *settings, "--plain") == 0
    assert follow(["eval", *words[1:]], *settings) == 0
    assert main("report", "--run=mine") == 0
    run = files / "runs" / "mine"
    page = (run / "report.html").read_text()
    assert f"<small>{score}</small>" in page and "xact match" not in page
    card = json.loads((run / "eval.json").read_text())
    assert card["score_name"] == score and "em" not in card and card["n"] == 4
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2 and (f"episode/{score}" in metrics[0]) == (score == "found")
    assert (metrics[0].keys() >= {"reward/treasure", "reward/steps"}) == (score == "found")


def test_what_an_agent_would_see(files, server, monkeypatch, capsys):
    (turn,) = re.findall(r"`(<tool_call>{.*?)`", (ROOT / "docs/tutorial" / OPENENV).read_text())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{turn}\n".encode())))
    words = [
        word.replace("http://127.0.0.1:8000", f"{server}/guess") for word in commands(OPENENV)[0]
    ]
    assert words[0] == "try"
    main(*words)
    said = capsys.readouterr().out
    assert "tools: step(number)" in said and "a number below 100" in said
    assert "step: ok" in said


GYM = "../../recipes/gym/README.md"
MCP = "../../recipes/mcp/README.md"
DATA = "your-own-data.md"


@pytest.mark.slow
def test_the_example_of_gymnasium_trains(empty_folder):  # noqa: F811
    code = (ROOT / "recipes/gym/corridor.py").read_text()
    (empty_folder / "corridor.py").write_text(code)
    words = commands(GYM)[0]
    assert follow(words, *SMALL, *ROWS, "--run=mine", "--plain") == 0
    assert follow(["eval", *words[1:]], *SMALL, *ROWS, "--run=mine") == 0
    card = json.loads((empty_folder / "runs" / "mine" / "eval.json").read_text())
    assert card["n"] == 4 and card["score_name"] in ("success", "reward")
    metrics = (empty_folder / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2


@pytest.mark.slow
def test_the_example_of_mcp_trains(empty_folder, monkeypatch):  # noqa: F811
    pytest.importorskip("mcp")
    for name in ("prices.py", "shopping.py"):
        (empty_folder / name).write_text((ROOT / "recipes/mcp" / name).read_text())
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    [words] = [words for words in commands(MCP) if "env.tools=[prices]" in words]
    assert follow(words, *SMALL, "--run=mine", "--plain") == 0
    metrics = (empty_folder / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2
    rows = (empty_folder / "runs" / "mine" / "config.yaml").read_text()
    assert "python prices.py" in rows


@pytest.mark.slow
def test_the_example_of_questions_trains(empty_folder):  # noqa: F811
    (empty_folder / "invoices.py").write_text(blocks(DATA, "python")[1])
    subprocess.run([sys.executable, "invoices.py"], check=True)
    [words] = [words for words in commands(DATA) if words[0] == "train"]
    settings = [*SMALL, "trainer.rollouts_every=1", "--run=mine", "--plain"]
    assert follow(words, *settings) == 0
    record = json.loads(
        (empty_folder / "runs/mine/rollouts/step_000002.jsonl").read_text().splitlines()[0]
    )
    prompt = "".join(record["rows"][0]["tokens"])
    assert "[context]" in prompt and prompt.count("What is the") == 1


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/tutorial").glob("your-own-*.md")), ids=lambda page: page.stem
)
def test_no_example_writes_the_name_of_its_split_into_a_question(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert not re.search(r'"question": f"[^"]*\{split\}', code)


def test_the_doors_are_all_there():
    page = (ROOT / "docs/tutorial/which-door.md").read_text()
    doors = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(doors) == 7
    for door in doors:
        (link,) = re.findall(r"\]\(([^)#]+)[^)]*\)", door)
        assert (ROOT / "docs/tutorial" / link).exists(), door
