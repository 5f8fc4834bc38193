"""docs/tutorial/your-own-environment.md, followed in an empty folder: its code, and its commands made small."""

from __future__ import annotations

import asyncio
import json
import runpy

import pytest
from conftest import question_row
from openenv_server import serving
from runs import ROOT, main
from test_tutorial import SMALL, blocks, commands, empty_folder, follow  # noqa: F401, the fixture

from agent_r1.config import plugins
from agent_r1.config.settings import EnvConfig
from agent_r1.core import Action
from agent_r1.env import make_env

PAGE = "your-own-environment.md"
ROWS = ["data.train=8", "data.val=4", "data.test=4", "rollout.max_concurrent_episodes=16"]
TURNS = ["env.max_turns=2", "rollout.max_tokens_per_turn=8"]


@pytest.fixture
def files(empty_folder):  # noqa: F811
    """What the page has one write."""
    for name, code in zip(("guess.py", "desk.py", "words.py"), blocks(PAGE, "python"), strict=False):
        (empty_folder / name).write_text(code)
    return empty_folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "score"), [(0, "found"), (1, "reward"), (2, "reward")], ids=["class", "env", "openenv"]
)
def test_every_command_of_the_page_trains(files, micro_model, number, score):
    words = commands(PAGE)[number]
    settings = [
        *(s for s in SMALL if not s.startswith("model")),
        *ROWS,
        *TURNS,
        f"model.path={micro_model}",
        "--run=mine",
    ]
    with serving() as url:
        words = [word.replace("http://127.0.0.1:8000", f"{url}/guess") for word in words]
        assert follow(words, *settings, "--plain") == 0
        assert follow(["eval", *words[1:]], *settings) == 0
    assert main("report", "--run=mine") == 0
    run = files / "runs" / "mine"
    assert f"<small>{score}</small>" in (run / "report.html").read_text()
    card = json.loads((run / "eval.json").read_text())
    assert card["score_name"] == score and "em" not in card and card["n"] == 4
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2 and (f"episode/{score}" in metrics[0]) == (score == "found")


def test_a_small_model_learns_to_play_from_the_demonstrator(files):
    words = commands(PAGE)[0]
    assert follow(words, *SMALL, *ROWS, "--run=mine", "--plain") == 0


def test_the_desk_pays_for_an_answer_and_names_the_parts(files):
    name = f"{files / 'desk.py'}:Desk"
    plugins.trust([name, name.replace(":Desk", ":play")])
    play = plugins.load_trusted(name.replace(":Desk", ":play"), "cold_start.demonstrator")
    row = question_row("Until when?", agent_name=name, extra_info={"metadata": {"reader": "Ada"}})
    env, history = make_env(row, {}, EnvConfig(name=name)), []

    async def episode():
        await env.reset(row)
        result = None
        while result is None or not result.done:
            result = await env.step(Action(play(row, history, None)))
            history.extend(result.observation.messages if result.observation else ())
        return await env.outcome(result.stop_reason)

    outcome = asyncio.run(episode())
    env.close()
    assert outcome.parts == {"right": 1.0, "calls": -0.02} and outcome.reward == 0.98


def test_what_an_agent_would_see(tmp_path, capsys):
    with serving() as url:
        (tmp_path / "look.py").write_text(blocks(PAGE, "python")[3].replace("http://127.0.0.1:8000", f"{url}/guess"))
        runpy.run_path(str(tmp_path / "look.py"))
    observation, result = capsys.readouterr().out.splitlines()
    assert "Find the number.\\na number below 100" in observation and "'required': ['number']" in observation
    assert "'content': 'right'" in result and "reward=1.0, done=True" in result


def test_the_page_names_all_that_is_read():
    from agent_r1.env.class_env import ENV_ATTRIBUTES, RESERVED

    page = (ROOT / "docs/tutorial" / PAGE).read_text()
    assert all(f"`{name}" in page or f"`self.{name}" in page for name in (*ENV_ATTRIBUTES, *RESERVED))
