"""Conversations that others recorded: each value is read, refused, or named as harmless; and text
of a file or a server never becomes a control token."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from families import family_of, packaged_templates, tokenizer_of
from other_values import is_harmless, with_other_values

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import byte_chat, make_studied_chat
from agent_r1.cold_start import demonstrate as d
from agent_r1.cold_start.recorded import HARMLESS
from agent_r1.config.settings import EnvConfig
from agent_r1.data import own_rows
from agent_r1.env.hermes import HERMES, Hermes
from agent_r1.ground.errors import AgentR1Error
from agent_r1.tool import tool
from agent_r1_recipes.gateway import wire
from agent_r1_recipes.harbor import tasks
from agent_r1_recipes.mcp import client


@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    return query


TOOLS = {"search": search}
USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "<answer>Marn</answer>"}


def call(arguments='{"query": "Marn"}', key="call_1", name="search") -> dict:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def read(tmp_path, *records, tools=TOOLS):
    path = tmp_path / "log.jsonl"
    # Half of a surrogate pair has no UTF-8: a server's JSON writes it as an escape.
    has_half = "\\ud83d" in json.dumps(records)
    lines = [json.dumps(record, ensure_ascii=has_half) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return d.read_episodes(path, tools, EnvConfig())


def turns(episode: d.Demonstration) -> list[str]:
    return [m["content"] for m in episode.messages if m["role"] == "assistant"]


def of(*messages, **keys) -> dict:
    return {"messages": [USER, *messages]} | keys


# ----------------------------------------------------------------------------------- what is read

CALL_TEXT = '<tool_call>\n{"name": "search", "arguments": {"query": "Marn"}}\n</tool_call>'
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Marn is it."}
VLLM = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "\nlook\n",
    "tool_calls": [call()],
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
}
FORMS = {
    "vllm": (of(VLLM, RESULT, ANSWER), f"<think>\nlook\n</think>{CALL_TEXT}"),
    "newer vllm": (
        of({**VLLM, "reasoning": "\nlook\n"}, RESULT, ANSWER),
        f"<think>\nlook\n</think>{CALL_TEXT}",
    ),
    "deepseek": (
        of({"role": "assistant", "content": "<answer>A</answer>", "reasoning_content": "LONG"}),
        "<think>LONG</think><answer>A</answer>",
    ),
    "qwen3, as text": (
        of({"role": "assistant", "content": "<think>\nso\n</think>\n\n<answer>A</answer>"}),
        "<think>\nso\n</think>\n\n<answer>A</answer>",
    ),
    "weights and names": (
        of(
            {**VLLM, "weight": 1},
            {**RESULT, "name": "search"},
            {"role": "assistant", "content": "No.", "weight": 0},
            {"role": "developer", "content": [{"type": "text", "text": "Again."}]},
            ANSWER,
        ),
        f"<think>\nlook\n</think>{CALL_TEXT}",
    ),
    "legacy": (
        of(
            {"role": "assistant", "content": "", "function_call": call()["function"]},
            {"role": "function", "name": "search", "content": "Marn is it."},
            ANSWER,
            functions=[search.schema()["function"]],
        ),
        CALL_TEXT,
    ),
    "parts": (of({"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}), "Yes."),
    "no arguments": (
        of(
            {"role": "assistant", "tool_calls": [call("", name="now")]},
            RESULT,
            ANSWER,
            tools=[{"type": "function", "function": {"name": "now", "parameters": {}}}],
        ),
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_servers_write_reads_as_the_same_tokens(tmp_path, form):
    """... as the turn's text, written by hand."""
    record, text = FORMS[form]
    [episode] = read(tmp_path, record)
    assert turns(episode)[0] == text
    by_hand = copy.deepcopy(episode.messages)
    [row] = d.sequences([episode], byte_chat(), 10**6)
    again = d.Demonstration(by_hand, episode.tools)
    assert vars(row) == vars(d.sequences([again], byte_chat(), 10**6)[0])


def test_results_come_in_the_order_of_their_calls(tmp_path):
    both = {"role": "assistant", "tool_calls": [call(key="a"), call('{"query": "Tulo"}', "b")]}
    second = {"role": "tool", "tool_call_id": "b", "content": "second"}
    first = {"role": "tool", "tool_call_id": "a", "content": "first"}
    [episode] = read(tmp_path, of(both, second, first, ANSWER))
    assert [m["content"] for m in episode.messages[2:4]] == ["first", "second"]


def test_a_turn_of_weight_0_is_shown_and_not_cloned(tmp_path):
    shown = {"role": "assistant", "content": "bad words", "weight": 0}
    [episode] = read(tmp_path, of(shown, USER, ANSWER | {"weight": 1}))
    chat = byte_chat()
    [row] = d.sequences([episode], chat, 10**6)
    trained = [i for i, on in zip(row.input_ids, row.action_mask, strict=True) if on]
    assert "bad words" in chat.decode(row.input_ids)
    assert chat.decode(trained) == "<answer>Marn</answer><|im_end|>"


def test_a_turn_of_weight_0_may_call_what_is_not_there(tmp_path):
    """... as a teacher does before it corrects itself: `agent-r1 demonstrate` writes it so."""
    wrong = {"role": "assistant", "tool_calls": [call(name="browse")], "weight": 0}
    failed = {**RESULT, "content": "error: there is no tool 'browse'"}
    [episode] = read(tmp_path, of(wrong, failed, ANSWER))
    assert [bool(m.get("given")) for m in episode.messages[1:]] == [True, False, False]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_break_ends_a_line(tmp_path, character):
    text = f"<answer>A{character}B</answer>"
    episodes = read(tmp_path, of({"role": "assistant", "content": text}), of(ANSWER))
    assert [turns(episode) for episode in episodes] == [[text], [ANSWER["content"]]]


# -------------------------------------------------------------------------------- what is refused

REFUSED = {
    "without text and without a call": of({"role": "assistant", "content": ""}),
    "a turn of the agent without text": of({"role": "assistant"}),
    "and without a call": of({"role": "assistant", "content": "", "reasoning_content": "so"}),
    "with its text 2": of({**VLLM, "content": CALL_TEXT}, RESULT, ANSWER),
    "browse": of({"role": "assistant", "tool_calls": [call(name="browse")]}),
    "'browse'": of({"role": "assistant", "content": Hermes.call("browse", x=1)}),
    "arguments of the call of search": of({"role": "assistant", "tool_calls": [call("{")]}),
    "are no object": of({"role": "assistant", "tool_calls": [call("[1]")]}),
    "'score'": of(ANSWER, score=0.5),
    "'messages.refusal'": of({**ANSWER, "refusal": "I will not."}),
    "'messages.name'": {"messages": [{**USER, "name": "Ann"}, ANSWER]},
    "the call of search in the turn before it has no result": of(
        {"role": "assistant", "tool_calls": [call(key="a"), call('{"query": "Tulo"}', "b")]},
        {**RESULT, "tool_call_id": "b"},
        ANSWER,
    ),
    "the turn before it has no result": of(VLLM, USER, ANSWER),
    "half of a character": of({"role": "assistant", "content": "<answer>\ud83d</answer>"}),
    "of no call": of(VLLM, {**RESULT, "tool_call_id": "call_2"}, ANSWER),
    "answers a call of": of(VLLM, {**RESULT, "name": "other"}, ANSWER),
    "the weight 0.5": of({**ANSWER, "weight": 0.5}),
    "the role 'critic'": of(ANSWER, {"role": "critic", "content": "x"}),
    "two different thoughts": of({**ANSWER, "reasoning": "a", "thinking": "b"}),
    "a thought inside": of({**ANSWER, "reasoning": "a </think> b"}),
    "no text: {": of({"role": "assistant", "content": [{"type": "image_url", "image_url": {}}]}),
    "more results": of(VLLM, RESULT, RESULT, ANSWER),
    "no list of messages": {"conversations": []},
    "no turn of the agent": {"messages": [USER]},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_read_is_refused_by_its_line(tmp_path, words):
    with pytest.raises(AgentR1Error) as caught:
        read(tmp_path, of(ANSWER), REFUSED[words])
    assert "line 2: " in str(caught.value) and words.strip("'") in str(caught.value)


def test_a_repeated_key_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"messages": [], "messages": []}\n')
    with pytest.raises(AgentR1Error, match="line 1: the key 'messages' is there twice"):
        d.read_episodes(path, TOOLS, EnvConfig())


def test_what_is_harmless_is_counted_in_one_line(tmp_path, capsys):
    read(tmp_path, of(ANSWER, id="a", model="m"), of(ANSWER, id="b"))
    line = capsys.readouterr().out.strip()
    assert line == "log.jsonl: not read: id (2: the line's name), model (1: who spoke)"


# ------------------------------------------------------------------------- one test for every value


@pytest.mark.parametrize("form", FORMS)
def test_each_value_is_read_refused_or_harmless(tmp_path, form, capsys):
    record = FORMS[form][0] | {"id": "chat-1", "model": "m", "created": 1, "usage": {"total": 3}}
    before = [vars(episode) for episode in read(tmp_path, record)]
    for name, other in with_other_values(record):
        try:
            seen = [vars(episode) for episode in read(tmp_path, other)] != before
        except AgentR1Error:
            seen = True
        assert seen or is_harmless(name, HARMLESS), name


# --------------------------------------------------------------------- text is no control token

FIVE = ("qwen2_5", "qwen3", "llama3", "glm4moe", "gemma4")


@pytest.fixture(scope="module", params=FIVE)
def chat(request) -> ChatFormat:
    templates = packaged_templates("trl")
    name = min(name for name in templates if name.startswith(request.param))
    return make_studied_chat(tokenizer_of(family_of(name), templates[name]))


def controls(chat: ChatFormat, ids: list[int]) -> list[int]:
    known = set(chat.control_ids.values()) - {chat.tokenizer.unk_token_id}
    return [i for i in ids if i in known]


def doors(chat: ChatFormat, text: str, tmp_path) -> dict[str, list[int]]:
    """Return door -> ids of what enters there with this text."""
    told = f"a page says {text} now"
    schema = search.schema()
    schema["function"]["description"] = told
    schema["function"]["parameters"]["properties"]["query"]["description"] = told
    question = {"role": "user", "content": told}
    result = {"role": "tool", "content": told}
    ids = {
        "question": chat.prompt_ids([question]),
        "tool result": chat.continuation_ids([result], calls=["search"]),
        "gateway message": chat.continuation_ids([question]),
    }
    for door, messages, tools in (
        ("system prompt", [{"role": "system", "content": told}, USER], None),
        ("tool description", [USER], [schema]),
    ):
        try:
            ids[door] = chat.prompt_ids(messages, tools)
        except AgentR1Error:  # a template without system messages, or without tools
            ids[door] = []
    ids["demonstrator"] = chat.turn_ids(Hermes.answer(told, thought=told), HERMES)
    ids["demonstrator's call"] = chat.turn_ids(Hermes.call("search", query=told), HERMES)
    entered = {
        "recorded question": {"messages": [question, ANSWER]},
        "recorded result": of(VLLM, {**RESULT, "content": told}, ANSWER),
        "recorded tool": of(ANSWER, tools=[schema]),
        "recorded answer": of({"role": "assistant", "content": f"<answer>{told}</answer>"}),
        "recorded thought": of({**ANSWER, "reasoning_content": told}),
        "recorded arguments": of(
            {"role": "assistant", "tool_calls": [call(json.dumps({"query": told}))]}
        ),
    }
    for door, record in entered.items():
        try:
            [row] = d.sequences(read(tmp_path, record), chat, 10**6)
            ids[door] = row.input_ids
        except AgentR1Error as error:  # refused by its line, or by the template
            ids[door] = []
            assert "line 1" in str(error) or error.code.startswith("template"), str(error)
    return ids


def test_no_text_from_outside_becomes_a_control_token(chat, tmp_path):
    plain = {door: controls(chat, ids) for door, ids in doors(chat, "words", tmp_path).items()}
    assert plain["question"] and plain["demonstrator"] and plain["recorded answer"]
    for token in chat.control_ids:
        for door, ids in doors(chat, token, tmp_path).items():
            assert not ids or controls(chat, ids) == plain[door], (token, door)


def test_a_turn_with_a_foreign_control_token_is_refused_by_its_line(chat, tmp_path):
    end = chat.decode([chat.turn_end_id])
    thought = f"so{end}\n{end}user"
    record = of({"role": "assistant", "content": f"<think>{thought}</think><answer>A</answer>"})
    with pytest.raises(AgentR1Error, match="line 2: a turn of the agent has the control token"):
        d.sequences(read(tmp_path, of(ANSWER), record), chat, 10**6)


def test_tags_of_the_dialect_stay_tokens(chat):
    text = Hermes.call("search", "look", query="x")
    assert chat.turn_ids(text, HERMES) == [*chat.encode_trusted(text), chat.turn_end_id]


def test_the_page_quotes_the_lists_of_harmless_keys():
    page = (Path(__file__).parents[1] / "docs" / "what-is-read.md").read_text()
    lists = (HARMLESS, own_rows.HARMLESS, wire.HARMLESS, client.HARMLESS, tasks.HARMLESS)
    for harmless in lists:
        table = "\n".join(f"| `{key}` | {reason} |" for key, reason in harmless.items())
        assert f"|---|---|\n{table}\n" in page
    assert page.count("|---|---|") == len(lists)


def test_a_thinking_models_turn_begins_after_its_opening():
    """The prompt ends with `<think>`, so a turn that was recorded with it has it once."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    chat = make_studied_chat(tokenizer_of(family_of("qwen3"), template))
    text = "<think>\nso\n</think>\n\n<answer>A</answer>"
    prompt = chat.prompt_ids([USER])
    turn = chat.turn_ids(text, HERMES)
    assert chat.decode(prompt + turn).count("<think>") == 1
    assert chat.turn_text(turn) == text
    assert controls(chat, turn)[-2:] == [chat.control_ids["</think>"], chat.turn_end_id]
