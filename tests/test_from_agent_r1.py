"""docs/from-agent-r1-0.1.md: its tool and its conversion, on files of the original's form, and the
names that it gives for the original's."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
import types
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import ROOT, main
from test_tutorial import blocks, empty_folder  # noqa: F401, the fixture

import agent_r1
from agent_r1.app import cli  # noqa: F401, declares the commands
from agent_r1.app.parser import COMMANDS
from agent_r1.config import load_config
from agent_r1.data.storage import read_rows
from agent_r1.tool import BaseTool, ToolCall, ToolErrorKind, call_tool

PAGE = "../from-agent-r1-0.1.md"
TEXT = (ROOT / "docs/from-agent-r1-0.1.md").read_text()


@pytest.fixture
def files(empty_folder):  # noqa: F811
    names = ("theirs.py", "ours.py", "convert.py")
    for name, code in zip(names, blocks(PAGE, "python"), strict=True):
        (empty_folder / name).write_text(code)
    return empty_folder


@dataclass
class ToolResponse:
    text: str


class OriginalTool:
    """What release 0.1 has of `BaseTool`, as far as the page's tool uses it."""

    @classmethod
    def register(cls, name):
        return lambda tool: tool


def test_the_tool_says_what_it_said_before(files, monkeypatch):
    ours = runpy.run_path(str(files / "ours.py"))["Price"]()
    with monkeypatch.context() as patch:
        module = types.SimpleNamespace(BaseTool=OriginalTool, ToolResponse=ToolResponse)
        patch.setitem(sys.modules, "agent_r1.tool", module)
        theirs = runpy.run_path(str(files / "theirs.py"))["Price"]()
    assert isinstance(ours, BaseTool)
    assert (ours.name, ours.description) == (theirs.name, theirs.description)
    assert ours.parameters == theirs.parameters

    def ask(**arguments):
        before, reward, data = asyncio.run(theirs.execute(arguments))
        result = asyncio.run(call_tool({"price": ours}, ToolCall("price", arguments), 5, 1000))
        assert reward is None
        return before.text, data, result

    for item in ("lamp", "chair"):
        text, data, result = ask(item=item)
        assert (result.content, result.data, result.ok) == (text, data, True)
    text, _, result = ask(item="sofa")
    assert result.content == f"error: price: {text}" == "error: price: unknown item sofa"
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert ask()[2].content.startswith("error: price: missing argument 'item'")


def original_row(number: int, **more) -> dict:
    """A row as the original's `gsm8k_tool.py` writes it."""
    answer = str(2 * number)
    user = {"role": "user", "content": f"What are {number} and {number}?"}
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "agent_env_loop",
        "prompt": [{"role": "system", "content": "You are a math expert."}, user],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": number, "answer": answer, "question": "?"},
        "env_kwargs": json.dumps(
            {
                "env_type": "tool",
                "tools": ["calc_gsm8k_reward"],
                "tool_format": "hermes",
                "tools_kwargs": {"ground_truth": answer},
            }
        ),
    } | more


def test_a_data_file_of_the_original_becomes_questions(files, monkeypatch):
    pq.write_table(
        pa.Table.from_pylist([original_row(number) for number in range(12)]),
        files / "train.parquet",
    )
    convert, data = re.findall(r"^(?:python|agent-r1) (.*)$", blocks(PAGE, "bash")[0], re.MULTILINE)
    monkeypatch.setattr(sys, "argv", convert.split())
    runpy.run_path("convert.py", run_name="__main__")
    assert main(*data.split()) == 0
    rows = [
        row for name in (files / "artifacts").glob("rows-*/*.parquet") for row in read_rows(name)
    ]
    assert len(rows) == 12
    for row in rows:
        system, user = row["prompt"]
        number = int(user["content"].split()[2])
        assert system["content"] == "You are a math expert."
        assert user["content"] == f"What are {number} and {number}?"
        assert row["reward_model"]["ground_truth"] == [str(2 * number)]
        assert row["agent_name"] == "hermes"


def test_a_row_of_legacy_has_no_system_message_and_perhaps_several_answers(files):
    question_of = runpy.run_path(str(files / "convert.py"))["question_of"]
    user = {"role": "user", "content": "Question: Who?"}
    truth = {"style": "rule", "ground_truth": ["Ann Lee", "A. Lee"]}
    assert question_of({"prompt": [user], "reward_model": truth}) == {
        "question": "Question: Who?",
        "answer": ["Ann Lee", "A. Lee"],
    }


def right_column(heading: str, column: int) -> list[str]:
    """The names in code of a table's column."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [
        name for line in lines for name in re.findall(r"`([^`]+)`", line.split("|")[column + 1])
    ]


def test_every_name_that_the_page_gives_exists():
    config = load_config("small")
    settings = right_column("Settings", 1)
    assert len(settings) > 25
    for name in settings:
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key), name
    metrics = (ROOT / "docs/metrics.md").read_text()
    for name in right_column("Metrics", 1):
        assert name in ("reward/em", "reward/format") or f"`{name}`" in metrics, name
    for name in right_column("Classes", 2):
        if name.isidentifier() and name[0].isupper():
            assert hasattr(agent_r1, name), name
        elif name.startswith("env.name="):
            load_config("small", [name])
    called = [name.split()[1] for name in right_column("Commands", 1) if name[:9] == "agent-r1 "]
    assert len(called) > 9 and set(called) <= COMMANDS.keys()
