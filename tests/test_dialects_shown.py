"""Every dialect on the screen, by hand, in the instructions of a task and in recorded
demonstrations."""

from __future__ import annotations

import copy
import io
import json
import re
import subprocess
import sys

import pytest
from conftest import question_row
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from speaking import GOLDEN, HARMONY, PIECES, QWEN25, TOOLS, env_of, played
from test_architecture import PACKAGE, arrows
from test_chat import Streaming, converse, make_agent, streamed_and_whole

from agent_r1.chat.fit import check_dialect
from agent_r1.chat.tokenizer import make_studied_chat
from agent_r1.cold_start.demonstrate import read_episodes, sequences
from agent_r1.config.settings import EnvConfig
from agent_r1.data.prompts import INSTRUCTIONS, instructions, messages
from agent_r1.env import environment
from agent_r1.ground.errors import ConfigError
from agent_r1.inference.conversation import exchange_record
from agent_r1.inference.play import expand, how_to
from agent_r1.inference.screen import Screen
from agent_r1.tool import ToolCall


@pytest.mark.parametrize("dialect", [*GOLDEN, "harmony"])
def test_the_task_leaves_it_to_the_dialect_how_one_answers(dialect):
    describes_format = environment(dialect).dialect.describes_format
    asked = messages("hotpotqa", "Who?", describes_format=describes_format)
    assert messages("hotpotqa", "Who?")[0]["content"] == INSTRUCTIONS
    for told in (asked[0]["content"], instructions({}, describes_format)):
        assert "<" not in told and told.endswith(
            " Your answer is as short as it can be: a name, a date, a number, yes or no."
        )
    assert asked[0]["content"].startswith(
        "You answer questions with the help of a search tool; let what you read tell"
    )


@pytest.mark.parametrize("dialect", [*GOLDEN, "hermes"])
def test_recorded_demonstrations_begin_as_episodes_do(dialect, qwen_chat, tmp_path):
    row = question_row("17 * 23 + 4?", ("395",), agent_name=dialect)
    line = {"messages": [*row["prompt"], {"role": "assistant", "content": "<answer>395</answer>"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    (recorded,) = sequences(
        read_episodes(tmp_path / "a.jsonl", TOOLS, EnvConfig(name=dialect)), qwen_chat, 4000
    )
    asked = played(dialect, qwen_chat, ["I do not know."]).steps[0].observation_ids
    assert recorded.input_ids[: recorded.action_mask.index(1)] == asked


@given(
    st.lists(
        st.sampled_from([*PIECES, "<tool_call>", "Thought:", " ", "`", "<b", "é"]), max_size=12
    ).map("".join)
)
def test_what_streams_is_what_a_whole_turn_gives(text):
    """Streaming shows each part once, as it grows, and ends with the same text as a turn that came
    in one piece."""
    for dialect in [*GOLDEN, "hermes", "harmony"]:
        streamed, whole = streamed_and_whole(text, EnvConfig(name=dialect))
        assert streamed == whole, dialect


SEEN = {
    "hermes": ("thought: go on", "search(query: Marn)", "thought: go on"),
    "retool": ("The product first.", "python(code: print(17 * 23))", "thought: And 4."),
    "mathtir": (
        "The product first.",
        "python(code: print(17 * 23))",
        "And 4, so it is $\\boxed{395}$.",
    ),
    "react": ("thought: Look it up.", "search(query: Marn)", "thought: I know."),
    "harmony": ("thought: Look it up.", "search(query: Marn)", "thought: I know."),
}
"""Before the call, the call, and before the answer."""


@pytest.mark.parametrize("dialect", SEEN)
def test_thoughts_calls_and_answers_are_shown_alike(dialect, qwen_chat, harmony_chat):
    chat = harmony_chat if dialect == "harmony" else qwen_chat
    turns = GOLDEN[dialect][0] if dialect in GOLDEN else HARMONY
    if dialect == "harmony":
        turns = [harmony_chat.encode_trusted(turn) for turn in HARMONY]
    elif dialect == "hermes":
        turns = [
            environment("hermes").dialect.write_turn(said)
            for said in (ToolCall("search", {"query": "Marn"}), "395")
        ]
    agent, file = make_agent(Streaming(chat, turns), chat, TOOLS.values()), io.StringIO()
    agent.config.env.name, agent.config.env.tool_timeout_s = dialect, 60.0
    screen = Screen(Console(file=file, width=100), agent.config.env)
    (exchange,) = converse(agent, "17 * 23 + 4?", watcher=screen).exchanges
    assert exchange_record(exchange, agent)["answer"] == "395"
    before, call, thought = SEEN[dialect]
    result = "391" if "python" in call else "Marn: Marn is in Tulo."
    wanted = [before, call, f"  | {result}", thought, "answer: 395"]
    shown = file.getvalue().splitlines()
    assert [line.rpartition("  ")[0] if line.startswith(call) else line for line in shown] == wanted


@pytest.mark.parametrize("dialect", SEEN)
def test_by_hand_one_writes_as_the_agent_would(dialect):
    env, tool = env_of(dialect), TOOLS["python" if dialect in ("retool", "mathtir") else "search"]
    key, value = ("code", "print(1)") if tool.name == "python" else ("query", "the Marn")
    written = expand(f"{tool.name} {key}='{value}'", TOOLS, env.dialect)
    (call,) = env.extract_tool_calls(written)
    assert (call.name, call.arguments, call.error) == (tool.name, {key: value}, None)
    assert env.dialect.answer_in(expand("= 395", TOOLS, env.dialect)) == ("395", True)
    ends = [env.dialect.end_token(turn) for turn in (written, expand("= 395", TOOLS, env.dialect))]
    assert ends == (["<|call|>", "<|return|>"] if dialect == "harmony" else [None, None])
    help_ = " ".join(how_to(env.dialect, {tool.name: tool}).split())
    assert (
        f"{tool.name} {key}=..." in help_
        and " ".join(written.replace(value, "...").split()) in help_
    )


def test_a_call_by_hand_needs_no_quotes():
    """Before, it searched for "the"."""
    env = env_of("hermes")
    for line in ("search query=the mayor of Pumfir", "search query='the mayor of Pumfir'"):
        (call,) = env.extract_tool_calls(expand(line, TOOLS, env.dialect))
        assert call.arguments == {"query": "the mayor of Pumfir"}
    (call,) = env.extract_tool_calls(expand("search Pumfir", TOOLS, env.dialect))
    assert call.arguments == {}  # the tool asks for its query


def test_a_dialect_knows_nothing_of_what_an_answer_is_worth():
    foreign = ("reward", "data", "rollout", "env.base", "env.questions")
    assert not [
        a for a in arrows(PACKAGE) if a.source == "env.dialect" and a.target.startswith(foreign)
    ]
    for file in (PACKAGE.parents[1] / "recipes/dialects").glob("*.py"):
        assert not re.search(
            "from agent_r1[.](reward|data|rollout|env.base|env.questions)", file.read_text()
        )


def test_the_first_dialect_is_imported_without_what_other_environments_need():
    code = "import sys, agent_r1.env.hermes; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    foreign = ("agent_r1_recipes", "agent_r1.search", "faiss", "torch", "httpx")
    assert "agent_r1.env.questions" in loaded and not [
        name for name in loaded if name.startswith(foreign)
    ]


def test_a_model_that_cannot_speak_harmony_is_refused(harmony_chat, qwen_chat):
    env = EnvConfig(name="harmony")
    check_dialect(harmony_chat, env, tools=True)
    with pytest.raises(
        ConfigError, match="requires the control token <.start.>, which this model lacks"
    ):
        check_dialect(qwen_chat, env, tools=True)
    other = copy.deepcopy(harmony_chat.tokenizer)
    other.chat_template = QWEN25  # which takes results of role `tool` alone
    with pytest.raises(
        ConfigError, match="save the TEMPLATE of agent_r1_recipes.dialects.harmony as the"
    ):
        check_dialect(make_studied_chat(other), env, tools=True)
