"""Read and write the Hermes dialect of Qwen models: thoughts, calls and answers in tags.

    <think> ... </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>                       a turn may have several calls, which run concurrently
    <answer> ... </answer>             ends the episode

`split_turn` is the only parser of these tags: execution, the end of an episode, rewards and screens
all use its result. Its input is model output, so nothing here may raise. A call that cannot be
parsed becomes a `ToolCall` with an error, which the agent reads like any tool result. Next:
`reward/qa.py` scores the answer.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from agent_r1.env.dialect import Dialect, Part
from agent_r1.env.questions import QuestionEnv
from agent_r1.tool.base import BaseTool, ToolCall

Tags = tuple[str, str]
TAGS = ("tool_call", "tool_response")
"""Names of the tags around calls and results.

Thoughts and answers have the same tags in every such dialect.
"""


@cache
def _pattern(tags: Tags) -> re.Pattern[str]:
    return re.compile(f"<(/?)(think|answer|{'|'.join(tags)})>")


def split_turn(text: str, tags: Tags = TAGS) -> tuple[Part, ...]:
    """Split a turn into its parts, in order and without their tags.

    An opening tag extends to its own closing tag, or to the end of the turn. A call inside a
    thought is part of the thought, and an answer inside a call is part of its arguments. So is
    every tag inside the call's JSON. A call or answer that is opened again before its closing tag
    counts as never closed. An unmatched closing tag is text, and so is `<tool_response>`.
    """
    return _split(text, tags)[0]


# Execution, the end of an episode, reward and records all split the same turn.
@lru_cache(maxsize=1024)
def _split(text: str, tags: Tags) -> tuple[tuple[Part, ...], list[tuple[int, int]]]:
    """Return the parts of `split_turn`, and the places of the tags around them."""
    parts: list[Part] = []
    places: list[tuple[int, int]] = []
    # A subclass may name its tags otherwise; a part has the name that TAGS gives it.
    kinds = dict(zip(tags, TAGS, strict=True))
    kind = "text"  # of the part that is open
    start = 0  # of the open part, after its opening tag
    json_end = 0  # of the open call's JSON, in which tags are text
    for tag in _pattern(tags).finditer(text):
        # A call may write about tags: {"code": "print('</tool_call>')"}.
        if tag.start() < json_end:
            continue
        opens = not tag[1]
        name = kinds.get(tag[2], tag[2])
        # The two `continue`s are the whole grammar. Outside of any tag, only an opening tag counts,
        # and never that of a result: the agent must not write its tool's answers.
        if kind == "text" and (not opens or name == "tool_response"):
            continue
        # Inside a part, only the part's own tags count. So a call inside a thought is not run, and
        # an answer inside a call is not paid. A thought may even mention <think>.
        if kind != "text" and (name != kind or (opens and kind == "think")):
            continue
        # A part that is opened again was never closed. It ends where the new one begins.
        opens_again = opens and kind != "text"
        end = tag.end() if kind != "text" and not opens_again else tag.start()
        parts.append(Part(kind, text[start : tag.start()], closed=not opens_again, end=end))
        places.append(tag.span())
        kind = name if opens else "text"
        start = tag.end()
        json_end = _json_end(text, start) if kind == "tool_call" else 0
    # What is still open was cut off: a call without its closing tag is reported, not run.
    parts.append(Part(kind, text[start:], closed=kind == "text", end=len(text)))
    return tuple(part for part in parts if part.text or part.kind != "text"), places


JSON = json.JSONDecoder()
BLANKS = re.compile(r"\s*")


def _json_end(text: str, start: int) -> int:
    """Return where the JSON object at `start` ends; 0 without a valid one."""
    begin = BLANKS.match(text, start).end()
    if not text.startswith("{", begin):
        return 0
    try:
        return JSON.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return 0


def answer_of(text: str, tags: Tags = TAGS) -> str | None:
    """Return the stripped text of the last closed `<answer>`, or None if missing or empty.

    Pass only the agent's last turn: the system prompt has an example, and a retrieved document may
    contain anything.
    """
    answer = None
    for part in split_turn(text, tags):
        if part.kind == "answer" and part.closed:
            # The last one counts. If any right one did, an agent would learn to list guesses.
            answer = part.text.strip()
    return answer or None


def is_well_formed(text: str, tags: Tags = TAGS) -> bool:
    """Return whether a turn is `(<think>...</think>)* <answer>something</answer>` and blanks.

    Text before and between the tags is allowed. The answer is not empty, and no part contains a
    tag. There is no call, which would not be run, and no `<tool_response>`, which only a tool may
    write.
    """
    # All tags in their order, also those inside of parts: any other tag is a fault.
    tags_of_turn = [tag[0] for tag in _pattern(tags).finditer(text)]
    thoughts = tags_of_turn[:-2]
    return (
        tags_of_turn[-2:] == ["<answer>", "</answer>"]
        and thoughts == ["<think>", "</think>"] * (len(thoughts) // 2)
        and text.rstrip().endswith("</answer>")
        and answer_of(text, tags) is not None
    )


class Hermes(Dialect):
    """Calls in JSON, thoughts and answers, all in tags."""

    tags: Tags = TAGS
    tool_parser = "hermes"
    reasoning_parser = "deepseek_v4"
    """Of vLLM 0.27's parsers the one that knows turns with and without thoughts. Without thinking,
    `qwen3` runs calls in thoughts, and `deepseek_r1` takes a bare call for a thought."""

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        # `end`, in characters, is where a reward for the call goes: `AgentEnvLoop.locate_rewards`.
        parts = [part for part in self.parts(text) if part.kind == "tool_call"]
        return [replace(parse_call(part.text, part.closed), end=part.end) for part in parts]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        return answer_of(text, self.tags), is_well_formed(text, self.tags)

    def parts(self, text: str) -> list[Part]:
        return list(split_turn(text, self.tags))

    @property
    def tag_words(self) -> frozenset[str]:
        names = ("think", "answer", self.tags[0])
        return frozenset(f"<{slash}{name}>" for name in names for slash in ("", "/"))

    def tag_places(self, turn: str) -> list[tuple[int, int]]:
        return _split(turn, self.tags)[1]

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str:
        thought = f"<think>{thought or 'go on'}</think>"
        if isinstance(message, str):
            return f"{thought}<answer>{message}</answer>"
        return f"{thought}{self.write_call(message)}"

    def write_call(self, call: ToolCall) -> str:
        """Write a call between its tags."""
        request = {"name": call.name, "arguments": call.arguments}
        # Names stay as they are written: "Ærø" as \u00c6r\u00f8 would be more tokens to learn.
        body = json.dumps(request, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    @classmethod
    def call(cls, name: str, thought: str = "", /, **arguments: Any) -> str:
        """Write a turn that calls a tool, as a demonstrator does."""
        return cls().write_turn(ToolCall(name, arguments), thought)

    @classmethod
    def answer(cls, text: object, thought: str = "") -> str:
        """Write the last turn of an episode."""
        return cls().write_turn(str(text), thought)


HERMES = Hermes()


class HermesToolEnv(QuestionEnv):
    """Question answering with tools, in this dialect."""

    dialect = HERMES


# ------------------------------------------------------------------------------------- parsed calls


def parse_call(body: str, closed: bool) -> ToolCall:
    """Parse the text between a call's tags. A fault goes into `error`, in words for the agent."""
    if not closed:
        return ToolCall("", {}, error="the call is not closed with </tool_call>")
    try:
        call = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        # Thousands of opening brackets raise RecursionError. The agent reads the error as the
        # call's result, so it can try again in its next turn.
        return ToolCall(
            "", {}, error='the call is not valid JSON; write {"name": ..., "arguments": {...}}'
        )
    # Valid JSON may still be a list or a number. Whether the tool exists and its arguments fit the
    # schema is checked by `call_tool`, which knows the tools.
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, error='the call has no "name"')
    if not isinstance(call.get("arguments"), dict):
        return ToolCall(call["name"], {}, error='the call has no "arguments" object')
    return ToolCall(call["name"], call["arguments"])


def _finite(number: str) -> float:
    """Parse a number.

    Raise ValueError for NaN, Infinity and 1e999, which Python reads but JSON cannot record.
    """
    # "1e999" is valid JSON for infinity, and a rollout with it could not be written as JSON again.
    if not math.isfinite(float(number)):
        raise ValueError(number)
    return float(number)
