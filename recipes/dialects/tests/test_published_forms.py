"""The forms of calls that published models write: Qwen3-Coder's tags and Llama 3's JSON."""

from __future__ import annotations

import asyncio

import pytest
from conftest import ScriptedPolicy, make_env_loop, question_row, task
from hypothesis import given
from hypothesis import strategies as st

from agent_r1 import BaseTool, EnvConfig, Sampling, StopReason, ToolCall, make_env
from agent_r1_recipes.dialects.llama3_json import PYTHON_TAG, Llama3Json
from agent_r1_recipes.dialects.qwen3_coder import Qwen3Coder


class Look(BaseTool):
    """Says what it was asked."""

    name, description = "look", "Looks a word up."
    parameters = {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "kinds": {"type": "array", "items": {"type": "string"}},
            "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "order": {"enum": ["up", "down"]},
        },
        "required": ["word"],
    }

    async def execute(self, args):
        return f"{args['word']}: Marn is in Tulo."


TOOLS = {"look": Look()}
XML, JSON = Qwen3Coder(), Llama3Json()


def xml(name: str = "look", **values: str) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def only(calls: list[ToolCall]) -> ToolCall:
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize("dialect", ["qwen3_coder", "llama3_json"])
def test_a_whole_episode(chat, dialect):
    spoken = {"qwen3_coder": XML, "llama3_json": JSON}[dialect]
    turns = [spoken.write_turn(ToolCall("look", {"word": "007"})), spoken.write_turn("Tulo")]
    loop = make_env_loop(
        ScriptedPolicy(chat, turns), lambda row: make_env(row, TOOLS, EnvConfig(name=dialect))
    )
    row = question_row("Where is Marn?", ("Tulo",), agent_name=dialect)
    played = asyncio.run(loop.run(task(row), Sampling(400)))
    assert (played.stop_reason, played.reward) == (StopReason.ANSWERED, 1.0)
    assert played.steps[0].info["tool_calls"][0]["arguments"] == {"word": "007"}
    assert "007: Marn is in Tulo." in chat.decode(played.steps[1].observation_ids)


ARGUMENTS = [
    {"word": "x"},
    {"word": "007", "count": 7, "exact": True, "kinds": ["a", "b"]},
    {"word": "two\nlines\n\n", "where": None},
    {"word": "\n", "order": "up"},
    {"word": "true", "exact": False, "count": -3},
    {"word": "null", "where": "1930"},
    {"word": "", "kinds": []},
    {"word": "a <b> c </b> <parameter> <function=x> {}"},
    {},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize("dialect", [XML, JSON], ids=["xml", "json"])
def test_what_a_demonstrator_writes_reads_back(dialect, arguments):
    for thought in ("", "I look it up."):
        turn = dialect.write_turn(ToolCall("look", arguments), thought)
        call = only(dialect.calls(turn, TOOLS))
        assert (call.name, call.arguments, call.error) == ("look", arguments, None)
        assert call.end == len(turn) and dialect.answer_in(turn) == (None, False)
    assert dialect.answer_in(dialect.write_turn("Tulo")) == ("Tulo", True)


# --------------------------------------------------------------------------------- values in tags


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("word", "007", "007"),
        ("word", "true", "true"),
        ("word", " x ", " x "),
        ("word", "</parameter> is a tag", "</parameter> is a tag"),
        ("word", "a\n</parameter>\nb", "a\n</parameter>\nb"),
        ("count", "007", "007"),  # not JSON: the tool's schema refuses it
        ("count", "7", 7),
        ("count", " 7 ", 7),
        ("count", "NaN", "NaN"),
        ("exact", "true", True),
        ("exact", "True", True),
        ("exact", "None", None),
        ("kinds", '["a"]', ["a"]),
        ("kinds", "a, b", "a, b"),
        ("where", "null", None),
        ("where", "12", "12"),
        ("order", "up", "up"),
        ("unknown", "12", 12),
    ],
)
def test_a_value_has_the_type_of_the_schema(key, text, value):
    call = only(XML.calls(xml(**{key: text}), TOOLS))
    assert call.error is None and call.arguments == {key: value}
    assert type(call.arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        ("<tool_call>\n<function=look>", "not closed"),
        ("<tool_call>look</tool_call>", "<function=NAME>"),
        ('<tool_call>{"name": "look", "arguments": {}}</tool_call>', "<function=NAME>"),
        ("<tool_call><function=look>word</function></tool_call>", "<parameter=NAME>"),
        (
            "<tool_call><function=look><parameter=word>x</function></tool_call>",
            "<parameter=NAME>",
        ),
        (xml(word="x").replace("</tool_call>", "and more</tool_call>"), "<function=NAME>"),
        (xml().replace("</f", "<parameter=a>1</parameter><parameter=a>2</parameter></f"), "twice"),
    ],
)
def test_a_faulty_call_in_tags_says_what_is_wrong(turn, fault):
    assert fault in only(XML.calls(turn, TOOLS)).error


def test_calls_in_tags_are_counted_and_a_thought_has_none():
    two = XML.calls(xml(word="a") + "\n" + xml("find", word="1"), TOOLS)
    assert [(call.name, call.arguments) for call in two] == [
        ("look", {"word": "a"}),
        ("find", {"word": 1}),  # a tool that does not exist has no schema
    ]
    assert XML.calls(f"<think>{xml(word='a')}</think><answer>b</answer>", TOOLS) == []
    assert only(XML.calls(f"I think: {xml(word='a')}", TOOLS)).name == "look"
    assert only(XML.calls("<tool_call><function=look></function></tool_call>", {})).arguments == {}


# ------------------------------------------------------------------------------------------- JSON

CALL = '{"name": "look", "parameters": {"word": "x"}}'


@pytest.mark.parametrize(
    ("turn", "count"),
    [
        (CALL, 1),
        (CALL.replace("parameters", "arguments"), 1),
        (PYTHON_TAG + CALL, 1),
        (f"  {CALL}\n", 1),
        (f"{CALL};{CALL}", 2),
        (f"{CALL}\n{CALL}", 2),
        (f"I look it up. {CALL}", 1),
        (f"<think>so</think>{CALL}", 1),
        (f"<think>{CALL}</think>no", 0),
        (f"<think>{CALL}", 0),
        (f"<answer>{CALL}</answer>", 0),
        ('The form is {"name": "Bob", "parameters": {}}.', 0),
        ('{"name": "find", "parameters": {}}', 0),
        ('{"a": 1}', 0),
        (f'{{"calls": [{CALL}]}}', 0),
        ("[1, 2] { not JSON }", 0),
        ('{"name": "look"}', 0),
    ],
)
def test_json_is_a_call_if_it_names_a_tool(turn, count):
    calls = JSON.calls(turn, TOOLS)
    assert [call.name for call in calls] == ["look"] * count
    assert not any(call.error for call in calls)


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        ('{"name": "look", "parameters": {"word": ', "not valid JSON"),
        (PYTHON_TAG + '{"name": "find", "param', "not valid JSON"),
        (PYTHON_TAG + 'look.call(word="x")', "no call after"),
        (PYTHON_TAG + '{"word": "x"}', 'no "name"'),
        ('{"name": "look", "parameters": "x"}', 'no "parameters" object'),
        (PYTHON_TAG + '{"name": "look"}', 'no "parameters" object'),
    ],
)
def test_a_faulty_call_in_json_says_what_is_wrong(turn, fault):
    assert fault in only(JSON.calls(turn, TOOLS)).error


def test_after_the_tag_an_unknown_tool_is_a_call_and_a_nested_one_is_data():
    call = only(JSON.calls(PYTHON_TAG + '{"name": "find", "parameters": {"n": 1}}', TOOLS))
    assert (call.name, call.arguments, call.error) == ("find", {"n": 1}, None)
    inside = '{"name": "look", "parameters": {"word": {"name": "look", "parameters": {}}}}'
    assert len(JSON.calls(inside, TOOLS)) == 1


PIECES = [
    "<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=word>",
    "</parameter>", "<think>", "</think>", "<answer>", "</answer>", PYTHON_TAG, CALL, "{", "}",
    '"name": "look"', '"parameters"', ":", ";", "\n", "x", "[", "NaN",
]  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=14).map("".join))
def test_no_turn_makes_them_raise_and_what_streams_only_grows(text):
    for dialect in (XML, JSON):
        for call in dialect.calls(text, TOOLS):
            assert isinstance(call.name, str) and 0 <= (call.end or 0) <= len(text)
        dialect.answer_in(text)
        assert dialect.parts(text) is not None


def test_deep_and_long_turns_are_read_in_time():
    deep = '{"name": ' * 3_000
    assert len(JSON.calls(deep, TOOLS)) <= 1
    assert XML.calls("<tool_call><function=look>" + "<parameter=a>" * 20_000, TOOLS)[0].error
    assert JSON.calls("{" * 50_000, TOOLS) == []
