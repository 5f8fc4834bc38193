"""Demonstrations of one's own, played and recorded: what the model learns from is what the agent
will see."""

from __future__ import annotations

import json

from conftest import fails_with, question_row

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import train_tokenizer
from agent_r1.cold_start import demonstrate as d
from agent_r1.config import load_config
from agent_r1.config.settings import EnvConfig
from agent_r1.env.hermes import Hermes
from agent_r1.tool import tool

CONFIG = load_config("small", ["env.tools=[]"])


@tool
def double(x: int) -> str:
    """Double a number.

    Args:
        x: The number.
    """
    return str(2 * x)


def played(monkeypatch, function, rows):
    monkeypatch.setattr(d.plugins, "load_trusted", lambda name, setting: function)
    return d.play_demonstrations("f.py:f", rows, {"double": double}, CONFIG.rollout, CONFIG.env, 0)


def good(row, history, rng):
    if history[-1]["role"] == "tool":
        return Hermes.answer(history[-1]["content"])
    return Hermes.call("double", "double it", x=int(row["prompt"][-1]["content"]))


ROWS = [question_row(str(i), (str(2 * i),)) for i in range(40)]


def test_what_is_learnt_from_are_the_players_turns_alone(monkeypatch):
    episodes = played(monkeypatch, good, ROWS)
    assert (
        all(e.score == 1.0 for e in episodes)
        and d.describe_demonstrations(episodes) == "40 demonstrations, which score 1.00"
    )
    chat = ChatFormat(train_tokenizer(d.texts_of(episodes), 400))
    rows = d.sequences(episodes, chat, 320)
    assert len(rows) == 40
    row = rows[7]
    actions = chat.decode([i for i, m in zip(row.input_ids, row.action_mask, strict=True) if m])
    assert actions == (
        "<think>double it</think>"
        '<tool_call>\n{"name": "double", "arguments": {"x": 7}}\n</tool_call><|im_end|>'
        "<think>go on</think><answer>14</answer><|im_end|>"
    )
    # The ids are those that the episode loop would show: prompt with the tools, then the
    # continuation behind each turn.
    messages, schema = episodes[7].messages, [double.schema()]
    prompt = chat.prompt_ids([m for m in messages[:-3]], schema)
    assert row.input_ids[: len(prompt)] == prompt
    assert chat.decode(row.input_ids) == chat.tokenizer.apply_chat_template(
        messages, schema, tokenize=False
    ).rstrip("\n")


def test_recorded_conversations_give_the_same_sequences(monkeypatch, tmp_path):
    """... with calls as text or in OpenAI's form, which need not spell the thought."""
    episodes = played(monkeypatch, good, ROWS)
    chat = ChatFormat(train_tokenizer(d.texts_of(episodes), 400))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": e.messages}) + "\n" for e in episodes)
    )
    read = d.read_episodes(tmp_path / "a.jsonl", {"double": double}, EnvConfig())
    assert [vars(r) for r in d.sequences(read, chat, 320)] == [
        vars(r) for r in d.sequences(episodes, chat, 320)
    ]

    call = {"id": "1", "type": "function", "function": {"name": "double", "arguments": '{"x": 7}'}}
    messages = [m for m in episodes[7].messages[:-3]]
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "14"},
    ]
    messages += [{"role": "assistant", "content": "<answer>14</answer>"}]
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"messages": messages, "tools": [double.schema()]})
    )
    turn = d.read_episodes(tmp_path / "b.jsonl", {}, EnvConfig())[0].messages[-3]
    assert turn == {
        "role": "assistant",
        "content": Hermes.call("double", x=7).partition("</think>")[2],
    }


def test_what_does_not_fit_is_left_out_and_most_of_it_refused(monkeypatch):
    episodes = played(monkeypatch, good, ROWS)
    chat = ChatFormat(train_tokenizer(d.texts_of(episodes), 400))
    lengths = sorted(len(row.input_ids) for row in d.sequences(episodes, chat, 320))
    limit = lengths[25]
    assert len(d.sequences(episodes, chat, limit)) == sum(length <= limit for length in lengths)
    with fails_with("demonstrations_too_long"):
        d.sequences(episodes, chat, lengths[0] - 1)
