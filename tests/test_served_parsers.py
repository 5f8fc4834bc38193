"""The parsers that `agent-r1 serve` gives to vLLM, against those of the training.

A client of a served model sees the calls that vLLM parses. Each difference is listed here with its
reason, and docs/inference/models.md tells of the kinds.
"""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from families import family_of, packaged_templates, tokenizer_of

from agent_r1.cluster import vllm_start
from agent_r1.config.settings import EnvConfig
from agent_r1.env import dialect_of
from agent_r1.tool import BaseTool

pytestmark = pytest.mark.slow  # importing vLLM takes seconds
TRL = packaged_templates("trl")
TEMPLATES = {"hermes": "qwen3", "qwen3_coder": "qwen3_5_think", "llama3_json": "llama3_2"}


class Look(BaseTool):
    name, description = "look", "Looks a word up."
    parameters = {
        "type": "object",
        "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
    }

    async def execute(self, args):
        return ""


TOOL = Look()


def hermes(arguments: str = '{"word": "x"}', name: str = "look") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(word: str = "x", name: str = "look", key: str = "word") -> str:
    return (
        f"<tool_call>\n<function={name}>\n<parameter={key}>\n{word}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


def bare(arguments: str = '{"word": "x"}', name: str = "look", key: str = "parameters") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CALL = hermes()
XML = xml()
JSON = bare()
TURNS: dict[str, dict[str, str]] = {
    "hermes": {
        "text": "Hello.",
        "answer": "<think>I know.</think><answer>Oslo</answer>",
        "call": CALL,
        "call after a thought": f"<think>so</think>{CALL}",
        "call in a thought": f"<think>{CALL}</think><answer>no</answer>",
        "call in a thought and after it": f"<think>{CALL}</think>{CALL}",
        "call in a thought that is never closed": f"<think>{CALL}",
        "call after a thought that was opened before": f"so</think>{CALL}",
        "two calls": CALL + "\n" + CALL,
        "text before": f"I look. {CALL}",
        "text after": f"{CALL} Done.",
        "two arguments": hermes('{"word": "x", "count": 3}'),
        "no arguments": hermes("{}"),
        "nested": hermes('{"word": {"name": "look", "arguments": {}}}'),
        "unknown tool": hermes(name="find"),
        "other scripts": hermes('{"word": "Größe 東京"}'),
        "escapes": hermes('{"word": "a\\n\\"b\\" \\\\"}'),
        "on one line": CALL.replace("\n", ""),
        "arguments as text": hermes('"{}"'),
        "null arguments": hermes("null"),
        "list of arguments": hermes("[1]"),
        "NaN": hermes('{"count": NaN}'),
        "unclosed": CALL.removesuffix("\n</tool_call>"),
        "not JSON": "<tool_call>look x</tool_call>",
        "no name": '<tool_call>{"arguments": {}}</tool_call>',
        "closing tag in a value": hermes('{"word": "a </tool_call> b"}'),
        "opening tag in a value": hermes('{"word": "a <tool_call> b"}'),
        "opened twice": f"<tool_call>{CALL}",
        "parameters": CALL.replace("arguments", "parameters"),
    },
    "qwen3_coder": {
        "text": "Hello.",
        "answer": "<think>I know.</think><answer>Oslo</answer>",
        "call": XML,
        "call after a thought": f"<think>so</think>{XML}",
        "call in a thought": f"<think>{XML}</think><answer>no</answer>",
        "two calls": XML + "\n" + XML,
        "text before": f"I look. {XML}",
        "text that looks like a number": xml("007"),
        "number": xml("3", key="count"),
        "no number": xml("many", key="count"),
        "several lines": xml("a\n\nb"),
        "tag in a value": xml("a <b> c"),
        "closing tag in a value": xml("a </parameter> b"),
        "no parameters": "<tool_call>\n<function=look>\n</function>\n</tool_call>",
        "unknown tool": xml(name="find"),
        "unclosed": XML.removesuffix("\n</tool_call>"),
        "JSON": CALL,
        "words": "<tool_call>look x</tool_call>",
        "given twice": XML.replace("</f", "<parameter=word>\ny\n</parameter>\n</f"),
    },
    "llama3_json": {
        "text": "Hello.",
        "answer": "<think>I know.</think><answer>Oslo</answer>",
        "call": JSON,
        "arguments": bare(key="arguments"),
        "call after a thought": f"<think>so</think>{JSON}",
        "call in a thought": f"<think>{JSON}</think><answer>no</answer>",
        "call in an answer": f"<answer>{JSON}</answer>",
        "after the tag": f"<|python_tag|>{JSON}",
        "two calls": f"{JSON};{JSON}",
        "text before": f"I look. {JSON}",
        "nested": bare('{"word": {"name": "look", "parameters": {}}}'),
        "unknown tool": bare(name="find"),
        "other JSON": 'The form is {"a": 1}.',
        "not JSON": '{"name": "look", "parameters": {"word": ',
        "no object": bare('"x"'),
    },
}
CHECKS = "vLLM passes on what the training answers with an error"
DIFFERENT: dict[str, dict[str, str]] = {
    "hermes": {
        "arguments as text": CHECKS,
        "null arguments": CHECKS,
        "list of arguments": CHECKS,
        "NaN": CHECKS,
        "unclosed": CHECKS,
        "closing tag in a value": "vLLM ends the call at the first tag, the training reads the "
        "string",
        "opened twice": "vLLM drops all calls, the training reads the second",
    },
    "qwen3_coder": {
        "closing tag in a value": "vLLM ends the value at the first tag",
        "unclosed": CHECKS,
        "given twice": CHECKS,
    },
    "llama3_json": {
        "call in an answer": "vLLM reads JSON anywhere outside a thought",
        "unknown tool": "vLLM does not ask whether a tool has that name",
        "no object": CHECKS,
    },
}
"""Turns of which vLLM makes other calls than the training -> why."""


def test_there_are_enough_turns():
    assert sum(map(len, TURNS.values())) >= 50


def trained(dialect: str, turn: str) -> list[tuple[str, str]]:
    """The calls that an episode would run; a faulty one is an error that the agent reads."""
    calls = dialect_of(EnvConfig(name=dialect)).calls(turn, {TOOL.name: TOOL})
    return [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in calls if not c.error]


def served(dialect: str, turns: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """The calls that vLLM's own manager's parsers give to a client."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    spoken = dialect_of(EnvConfig(name=dialect))
    made = ParserManager.get_parser(spoken.tool_parser, spoken.reasoning_parser, True, "agent")
    tokenizer = tokenizer_of(family_of(TEMPLATES[dialect]), TRL[TEMPLATES[dialect]])
    request = ChatCompletionRequest(
        model="agent", messages=[{"role": "user", "content": "?"}], tools=[TOOL.schema()]
    )
    found = {}
    for name, turn in turns.items():
        parser = made(tokenizer, request.tools, chat_template_kwargs={"enable_thinking": False})
        ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        _, _, calls = parser.parse(
            turn, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        found[name] = [(c.name, _plain(c.arguments)) for c in calls or []]
    return found


def _plain(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


@pytest.mark.cluster
@pytest.mark.parametrize("dialect", TURNS)
def test_a_client_sees_the_calls_of_the_training_but_for_these(dialect):
    theirs = served(dialect, TURNS[dialect])
    ours = {name: trained(dialect, turn) for name, turn in TURNS[dialect].items()}
    different = {name for name in ours if ours[name] != theirs[name]}
    shown = {name: (ours[name], theirs[name]) for name in different}
    assert different == DIFFERENT[dialect].keys(), shown


@pytest.mark.cluster
def test_vllm_makes_each_parser_exactly_for_the_vocabularies_that_we_say():
    from vllm.tool_parsers import ToolParserManager

    for dialect, template in TEMPLATES.items():
        spoken = dialect_of(EnvConfig(name=dialect))
        made = ToolParserManager.get_tool_parser(spoken.tool_parser)
        for other in TEMPLATES.values():
            tokenizer = tokenizer_of(family_of(other), TRL[other])
            fits = all(token in tokenizer.get_vocab() for token in spoken.tool_parser_needs)
            if fits:
                made(tokenizer)
            elif dialect != "llama3_json":
                pytest.fail(f"{dialect} needs a token of {template}")
            else:
                with pytest.raises(RuntimeError, match="could not locate"):
                    made(tokenizer)


@pytest.mark.cluster
def test_a_parser_that_refuses_the_vocabulary_ends_the_server_before_it_loads(
    micro_model, monkeypatch
):
    """`serve` compares the vocabulary itself; this is for a rule of vLLM that it does not know.

    The file runs here, because this process has imported vLLM already.
    """
    words = ["--model", str(micro_model), "--tool-call-parser", "llama3_json"]
    monkeypatch.setattr(sys, "argv", [vllm_start.__file__, *words])
    monkeypatch.setattr(sys, "path", ["the folder of the file", *sys.path])
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: pytest.fail("the server started"))
    with pytest.raises(RuntimeError, match="could not locate"):
        runpy.run_path(vllm_start.__file__, run_name="__main__")
