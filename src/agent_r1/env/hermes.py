"""The Hermes dialect, which Qwen models speak: thoughts, calls and answers in tags.

    <think> ... </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>                                   one turn may hold several calls: they run side by side
    <answer> ... </answer>                         ends the episode

`split_turn` is the only reader of these tags: what is executed, what ends an episode, what is paid and what a person
sees all come from it. Everything here reads what a model wrote, so nothing may raise: a call that cannot be parsed
becomes a `ToolCall` with an error, which the agent gets to read like any tool result and can learn from.
"""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agent_r1.data.spellings import title_key
from agent_r1.env.base import INVALID, BaseToolEnv, Outcome, Part
from agent_r1.reward.named import Episode, named_outcome
from agent_r1.reward.qa import qa_outcome
from agent_r1.settings import EnvConfig
from agent_r1.tool.base import BaseTool, ToolCall, ToolResult
from agent_r1.types import Message, StopReason


@dataclass(frozen=True)
class Tags:
    """What calls and results are called; thoughts and answers are called so in every dialect of tags."""

    call: str = "tool_call"
    result: str = "tool_response"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(f"<(/?)(think|{self.call}|answer|{self.result})>")


HERMES = Tags()


def split_turn(text: str, tags: Tags = HERMES) -> list[Part]:
    """The parts of a turn in order, their tags left out.

    Whatever opens first holds everything up to its own closing tag, or to the end of the turn: a call or an answer
    inside a thought is a thought, an answer inside a call is an argument. A call or an answer that opens again before it
    was closed was never closed. A closing tag that closes nothing, and `<tool_response>`, are text.
    """
    parts: list[Part] = []
    kind, start, kinds = "text", 0, {tags.call: "tool_call", tags.result: "tool_response"}
    for tag in tags.pattern.finditer(text):
        opens, name = not tag[1], kinds.get(tag[2], tag[2])
        if kind == "text" and (not opens or name == "tool_response"):
            continue
        if kind != "text" and (name != kind or (opens and kind == "think")):
            continue
        end = tag.start() if kind == "text" or opens else tag.end()
        parts.append(Part(kind, text[start : tag.start()], kind == "text" or not opens, end))
        kind, start = name if opens else "text", tag.end()
    parts.append(Part(kind, text[start:], kind == "text", len(text)))
    return [part for part in parts if part.text or part.kind != "text"]


def answer_of(text: str, tags: Tags = HERMES) -> str | None:
    """What the last closed `<answer>` of a turn holds, without surrounding blanks; None if there is none, or only blanks.

    Give it the agent's last turn only: the system prompt has an example, and a retrieved document may claim anything.
    """
    answers = [part.text.strip() for part in split_turn(text, tags) if part.kind == "answer" and part.closed]
    return (answers or [""])[-1] or None


def is_well_formed(text: str, tags: Tags = HERMES) -> bool:
    """Whether a last turn is `(<think>...</think>)* <answer>something</answer>` and then nothing but blanks.

    Plain text may stand before and between the tags. So: one non-empty answer, closed thoughts before it, no tag inside
    of either, no call beside it (nobody would run it), and no `<tool_response>`, which only a tool may write.
    """
    found = [tag[0] for tag in tags.pattern.finditer(text)]
    thoughts, answer = found[:-2], found[-2:]
    return (
        answer == ["<answer>", "</answer>"]
        and thoughts == ["<think>", "</think>"] * (len(thoughts) // 2)
        and text.rstrip().endswith("</answer>")
        and answer_of(text, tags) is not None
    )


class HermesToolEnv(BaseToolEnv):
    """Question answering with tools. The outcome is exact match, less a penalty for a malformed ending.

    Another dialect overrides `extract_tool_calls`, `format_tool_response`, `answer_in`, `told`, `parts` and `written`
    (retool.py, mathtir.py, react.py, harmony.py).
    """

    tags = HERMES

    def __init__(self, tools: dict[str, BaseTool], config: EnvConfig):
        super().__init__(tools, config)
        self._paid: set[str] = set()
        """Calls that were paid for."""

    def extract_tool_calls(self, text: str) -> list[ToolCall]:
        parts = [part for part in self.parts(text) if part.kind == "tool_call"]
        return [replace(parse_call(part.text, part.closed), end=part.end) for part in parts]

    def format_tool_response(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        # The chat template wraps each message of role `tool` into <tool_response> tags, inside one user turn.
        return [{"role": "tool", "content": result.content} for result in results]

    @classmethod
    def parts(cls, text: str) -> list[Part]:
        return split_turn(text, cls.tags)

    @classmethod
    def answer_in(cls, text: str) -> tuple[str | None, bool]:
        return answer_of(text, cls.tags), is_well_formed(text, cls.tags)

    @classmethod
    def written(cls, said: ToolCall | str, thought: str = "") -> str | None:
        return answer(said, thought) if isinstance(said, str) else call(said.name, thought, **said.arguments)

    def stop(self, text: str, calls: list[ToolCall]) -> StopReason | None:
        # An answer ends the episode even beside a call: the agent must not answer and search in one turn.
        if self.answer_in(text)[0] is not None:
            return StopReason.ANSWERED
        return None if calls else StopReason.NO_ANSWER

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        if result.error in INVALID:
            return -self.config.call_reward
        asked = json.dumps([call.name, _plain(call.arguments)], sort_keys=True) if result.ok else ""
        if not result.ok or asked in self._paid:  # asking the same again finds nothing, and must not pay
            return 0.0
        self._paid.add(asked)
        return self.config.call_reward

    def outcome(self, stop_reason: StopReason) -> Outcome | Awaitable[Outcome]:
        targets = list(self.row["reward_model"]["ground_truth"])
        last = (self.final_turn or "") if stop_reason is StopReason.ANSWERED else ""
        answer, closed = self.answer_in(last)
        if self.config.reward:
            return self._named(answer, closed)
        reward, parts, metrics = qa_outcome(answer, closed, targets, self.config.format_penalty)
        metrics |= self.calls_by_tool() | {"malformed": float(not closed)}
        if (found := self.evidence()) is not None:
            metrics["evidence"] = found
            if self.config.evidence_reward:
                parts["evidence_reward"] = self.config.evidence_reward * found
                reward += parts["evidence_reward"]
        return Outcome(reward, parts, metrics)

    async def _named(self, answer: str | None, closed: bool) -> Outcome:
        episode = Episode(self.turns, self.calls)
        return Outcome(*await named_outcome(answer, closed, self.row, self.config, episode), self.calls_by_tool())

    def evidence(self) -> float | None:
        """Share of the question's supporting titles that searches brought; None where the data set names none."""
        supporting = (self.row.get("extra_info") or {}).get("supporting")
        if supporting is None or not len(supporting):
            return None
        wanted = {title_key(title) for title in supporting}
        return len(wanted & {title_key(title) for title in self.titles}) / len(wanted)


# ---------------------------------------------------------------------------------------------------- written turns


def call(name: str, thought: str = "", /, **arguments: Any) -> str:
    """A turn that calls a tool, as a demonstrator writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_thought(thought)}<tool_call>\n{body}\n</tool_call>"


def answer(text: object, thought: str = "") -> str:
    """The last turn of an episode."""
    return f"{_thought(thought)}<answer>{text}</answer>"


def _thought(text: str) -> str:
    return f"<think>{text or 'go on'}</think>"


# ----------------------------------------------------------------------------------------------------- parsed calls


def broken_up(text: str, *words: str) -> str:
    """`text` with a blank behind the first character of each of `words`, so that a result cannot spell the end of results.

    For words that a dialect writes beside data and a vocabulary may have as ordinary text; control tokens are the business of
    `rollout/chat_format.py`.
    """
    for word in words:
        text = text.replace(word, f"{word[0]} {word[1:]}")
    return text


def parse_call(body: str, closed: bool) -> ToolCall:
    """One call from between its tags; what is wrong with it goes into `error`, in words for the agent."""
    if not closed:
        return ToolCall("", {}, error="the call is not closed with </tool_call>")
    try:
        call = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):  # RecursionError: ten thousand opening brackets
        return ToolCall("", {}, error='the call is not valid JSON; write {"name": ..., "arguments": {...}}')
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, error='the call has no "name"')
    if not isinstance(call.get("arguments"), dict):
        return ToolCall(call["name"], {}, error='the call has no "arguments" object')
    return ToolCall(call["name"], call["arguments"])


def _plain(value: Any) -> Any:
    """Arguments without what does not make a call another one: case, blanks, invisible characters, marks around a text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    text = unicodedata.normalize("NFKC", value).casefold()
    return "".join(c for c in text if unicodedata.category(c)[0] not in "ZC").strip(string.punctuation)


def _finite(number: str) -> float:
    """Python reads NaN, Infinity and 1e999. JSON has no word for them, so they could not be recorded as JSON."""
    if not math.isfinite(float(number)):
        raise ValueError(number)
    return float(number)
