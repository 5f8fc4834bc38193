"""Room 4, the Hermes dialect: one reader for what is executed, what ends an episode and what is
paid."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace

import pytest
from conftest import ScriptedPolicy, call, fails_with, make_env_loop, task
from hypothesis import given
from test_env import Counting, hermes, model_text, step

from agent_r1.chat.format import ChatFormat
from agent_r1.config import load_config
from agent_r1.config.settings import EnvConfig
from agent_r1.core import Sampling, StopReason
from agent_r1.env import HermesToolEnv
from agent_r1.env.hermes import Hermes, answer_of, is_well_formed, split_turn
from agent_r1.tool import ToolCall, ToolResult

# ------------------------------------------------------------------------------------ the last turn


@pytest.mark.parametrize(
    ("text", "expected", "well_formed"),
    [
        ("<answer>Oslo</answer>", "Oslo", True),
        ("I found it. <answer>Oslo</answer>\n \n", "Oslo", True),
        ("<think>hm</think>\n<answer>\n Oslo \n</answer>", "Oslo", True),
        ("", None, False),
        ("Oslo", None, False),
        ("<Answer>Oslo</Answer>", None, False),
        ("<answer>Oslo", None, False),
        ("</answer>Oslo<answer>", None, False),
        ("<answer> \n </answer>", None, False),
        ("<answer>Oslo</answer> thanks", "Oslo", False),
        # The last one that is closed.
        ("<answer>Rome</answer> no: <answer>Oslo</answer>", "Oslo", False),
        ("<answer>Rome</answer> <answer>Os", "Rome", False),
        ("<answer>Rome <answer>Oslo</answer>", "Oslo", False),
        ("<answer>Rome</answer><answer> </answer>", None, False),
        # What is inside a thought, a call or another tag's opening is no answer.
        ("<think><answer>Oslo</answer></think>", None, False),
        ("<answer>Rome</answer><think><answer>Oslo</answer></think>", "Rome", False),
        (
            '<tool_call>{"name": "search", "arguments": '
            '{"query": "<answer>Oslo</answer>"}}</tool_call>',
            None,
            False,
        ),
        ("<ans<think></think>wer>Oslo</answer>", None, False),
        # Thoughts that do not stand closed before it, a call beside it, a tool's own tag.
        ("hm</think><think> <answer>Oslo</answer>", None, False),
        ("<think><think>a</think></think><answer>Oslo</answer>", "Oslo", False),
        ("<answer><think>hm</think>Oslo</answer>", "<think>hm</think>Oslo", False),
        ('<tool_call>{"name": "search"}</tool_call><answer>Oslo</answer>', "Oslo", False),
        ("<tool_response>Rome</tool_response><answer>Oslo</answer>", "Oslo", False),
    ],
)
def test_the_answer_of_a_turn_and_whether_it_is_well_formed(text, expected, well_formed):
    assert answer_of(text) == expected
    assert is_well_formed(text) == well_formed


@given(model_text)
def test_a_turn_is_cut_at_tags_and_nothing_is_glued(text):
    """The parts are stretches of the turn, in order: no text stands together that did not stand
    together before."""
    place = 0
    for part in split_turn(text):
        place = text.index(part.text, place) + len(part.text)
    answer = answer_of(text)
    assert answer is None or f"{answer}" in text and answer == answer.strip() != ""
    assert answer is not None or not is_well_formed(text)


# ----------------------------------------------------------------------------- what ends an episode


PAID = {"em": 1.0, "format": 0.0}
RIGHT_BUT_MALFORMED = {"em": 1.0, "format": -0.2}
NOTHING = {"em": 0.0, "format": -0.2}
QUOTED = call(query="<answer>Marn</answer>")


@pytest.mark.parametrize(
    ("turn", "reason", "parts"),
    [
        ("<think>so</think><answer>Marn</answer>", StopReason.ANSWERED, PAID),
        ("<answer>Marn</answer> I think", StopReason.ANSWERED, RIGHT_BUT_MALFORMED),
        (
            "<tool_response>Marn</tool_response><answer>Marn</answer>",
            StopReason.ANSWERED,
            RIGHT_BUT_MALFORMED,
        ),
        (call(query="x") + "<answer>Marn</answer>", StopReason.ANSWERED, RIGHT_BUT_MALFORMED),
        ("<answer>Rome</answer><think><answer>Marn</answer></think>", StopReason.ANSWERED, NOTHING),
        ("<think><answer>Marn</answer></think>", StopReason.NO_ANSWER, NOTHING),
        ("", StopReason.NO_ANSWER, NOTHING),
        ("<answer>Marn", StopReason.NO_ANSWER, NOTHING),
        ("<answer> </answer>", StopReason.NO_ANSWER, NOTHING),
        ("<tool_<think></think>call>" + call(query="x")[11:], StopReason.NO_ANSWER, NOTHING),
        (QUOTED, None, NOTHING),
        (f"<think>{QUOTED}</think>" + call(query="x"), None, NOTHING),
    ],
)
def test_what_ends_an_episode_is_what_is_paid(turn, reason, parts):
    """`answered` and the answer come from one reader: nothing is paid that did not end the episode
    as an answer."""
    env = hermes(Counting())
    assert step(env, turn).stop_reason is reason
    assert env.outcome(reason or StopReason.MAX_TURNS).parts == parts


@given(model_text)
def test_only_an_answered_episode_is_paid(text):
    env = hermes(Counting())
    result = step(env, text)
    outcome = env.outcome(result.stop_reason or StopReason.MAX_TURNS)
    assert (result.stop_reason is StopReason.ANSWERED) == (answer_of(text) is not None)
    assert (
        result.stop_reason is StopReason.ANSWERED
        or outcome.parts["em"] == outcome.metrics["f1"] == 0
    )


def test_an_argument_reaches_the_tool_as_it_was_written():
    search = Counting()
    step(hermes(search), call(query="a<think>b</think>c"))
    assert search.queries == ["a<think>b</think>c"]


# ---------------------------------------------------- templates that open the thought for the agent


def test_a_call_inside_a_thought_that_the_template_opened_is_a_thought(tokenizer):
    """Qwen3's thinking models: the prompt ends with `<think>`, so the sampled turn begins inside of
    a thought."""
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = tokenizer.chat_template.replace(
        "assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif"
    )
    assert thinking.chat_template != tokenizer.chat_template
    chat, search = ChatFormat(thinking), Counting()
    turns = [
        "maybe " + call(query="thought") + "</think>" + call(query="meant"),
        "so</think><answer>Marn</answer>",
    ]
    loop = make_env_loop(
        ScriptedPolicy(chat, turns), lambda row: HermesToolEnv({"search": search}, EnvConfig())
    )
    done = asyncio.run(loop.run(task(), Sampling(400)))
    assert search.queries == ["meant"]
    assert done.stop_reason is StopReason.ANSWERED and done.reward_parts == PAID
    endless = make_env_loop(ScriptedPolicy(chat, ["it is <answer>Marn</answer>"]), loop.make_env)
    assert asyncio.run(endless.run(task(), Sampling(400))).stop_reason is StopReason.NO_ANSWER


# -------------------------------------------------------------------------------------------- calls


def test_the_same_call_is_paid_once(chat):
    """Six equal calls and a wrong answer must not be worth more than a right answer."""
    turns = [call(query="x") * 3, call(query="x") + call(query="y"), "<answer>Rome</answer>"]
    config = EnvConfig(call_reward=0.15, max_turns=9)
    loop = make_env_loop(
        ScriptedPolicy(chat, turns), lambda row: HermesToolEnv({"search": Counting()}, config)
    )
    done = asyncio.run(loop.run(task(), Sampling(400)))
    assert [s.reward for s in done.steps] == pytest.approx([0.15, 0.15, 0.0])


def paid_for(name: str, *arguments: dict) -> list[float]:
    env = HermesToolEnv({}, EnvConfig(call_reward=1))
    return [env.process_reward(ToolCall(name, one), ToolResult("found")) for one in arguments]


def test_a_call_in_other_letters_is_the_same_call():
    same = [
        "Sosnum",
        "sosnum ",
        "  Sosnum",
        "SOSNUM",
        "Sos\u200bnum",
        "Sosnum?",
        '"Sosnum"',
        "Ｓosnum",
        "Sos num",
    ]
    assert paid_for("search", *({"query": query} for query in same)) == [1] + [0] * (len(same) - 1)
    assert paid_for(
        "search", {"queries": ["a", "b "]}, {"queries": ["A", "b"]}, {"queries": ["b", "a"]}
    ) == [1, 0, 1]
    for calls in (
        ["3+4", "3-4", "3*4", "34"],
        ["Rome", "Romeo"],
        ["é", "e"],
    ):  # other calls all the same
        assert paid_for("calculator", *({"expression": text} for text in calls)) == [1] * len(calls)


def test_calls_can_never_pay_as_much_as_a_right_answer():
    # 0.168 is below 0.17, which the message of an earlier version named: six calls earned 1.008.
    with fails_with("excessive_reward") as error:
        load_config("small", ["env.call_reward=0.168"])
    assert str(error.value).endswith("set it below 1/6")
    assert load_config("small", ["env.call_reward=0.16"]).env.call_reward == 0.16
    with fails_with("excessive_reward") as error:
        load_config("small", ["env.evidence_reward=.5", "env.call_reward=.1105"])
    assert str(error.value).endswith("set it below 0.337")
    for words in (["env.evidence_reward=1"], ["env.evidence_reward=.5", "env.call_reward=.1"]):
        with fails_with("excessive_reward"):
            load_config("small", words)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[1.5, -1e999]"])
def test_numbers_that_json_cannot_write_make_a_malformed_call(number):
    """Python's reader takes them, and a rollouts file with them is no JSON."""
    result = step(
        hermes(Counting()),
        f'<tool_call>{{"name": "search", "arguments": {{"query": {number}}}}}</tool_call>',
    )
    [recorded] = result.info["tool_calls"]
    assert recorded["error"] == "malformed_call"
    json.dumps(result.info, allow_nan=False)


@pytest.mark.parametrize(
    "code",
    [
        "print('</tool_call>')",
        "x = '<tool_call>'",
        "</tool_call><tool_call>",
        "<answer>1</answer>",
        "</think>",
        "<tool_response>",
    ],
)
def test_the_json_of_a_call_may_contain_tags(code):
    body = json.dumps({"name": "python", "arguments": {"code": code}})
    turn = f"<think>so</think><tool_call>\n{body}\n</tool_call>"
    first, second = Hermes().calls(f"{turn}<tool_call>{body}</tool_call>", {})
    assert first == replace(second, end=first.end) and first.arguments == {"code": code}
    assert first.error is None and first.end == len(turn)
    assert not is_well_formed(turn) and answer_of(turn) is None


def test_a_broken_call_with_a_tag_ends_at_its_first_closing_tag():
    turn = '<tool_call>{"name": "python" </tool_call><answer>1</answer>'
    (call,) = Hermes().calls(turn, {})
    assert call.error.startswith("the call is not valid JSON") and answer_of(turn) == "1"
    assert Hermes().calls('<tool_call>{"a": "' * 500, {})[-1].error
