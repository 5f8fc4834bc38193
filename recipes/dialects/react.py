"""ReAct (2210.03629), text only: the untrained baseline, which needs no vocabulary of its own.

    Thought: I have to look it up.
    Action: search
    Action Input: {"query": "Sosnum"}      ends the turn; the next message is

    Observation: Sosnum is a book by ...

    Thought: I know it.
    Final Answer: Bumvel                   ends the episode

A tool with one argument takes plain words for it, as the paper's does.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agent_r1 import BaseTool, Dialect, Message, Part, ToolCall, ToolResult

_LABEL = re.compile(r"^[ \t]*(Thought|Action Input|Action|Observation|Final Answer):", re.MULTILINE)


def sections_of(text: str) -> list[tuple[str, str]]:
    """(label, text) in order. What stands before the first label has none."""
    labels = list(_LABEL.finditer(text))
    ends = [label.start() for label in labels[1:]] + [len(text)]
    sections = [
        (label[1], text[label.end() : end].strip())
        for label, end in zip(labels, ends, strict=False)
    ]
    before = text[: labels[0].start()] if labels else text
    return [("", before.strip()), *sections] if before.strip() else sections


PART_KINDS = {
    "Thought": "think",
    "Action": "tool_call",
    "Action Input": "tool_call",
    "Final Answer": "answer",
}
"""Label -> what a person is shown it as; the rest is text."""


CALL_FORMAT = """
To call one, end your turn with
Thought: what you want to know
Action: its name
Action Input: its arguments in JSON
and the result comes back behind "Observation:"."""


def _describe_tool(name: str, description: str, parameters: dict[str, Any]) -> str:
    """Describe a tool in two lines, without line breaks of its author."""
    arguments = json.dumps(parameters, ensure_ascii=False)
    return f"- {name}: {' '.join(description.split())}\n  arguments: {arguments}"


def _call(name: str, text: str, tools: dict[str, BaseTool]) -> ToolCall:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = text
    if isinstance(arguments, dict):
        return ToolCall(name, arguments)
    properties = tools[name].parameters.get("properties", {}) if name in tools else {}
    if len(properties) == 1:
        return ToolCall(name, {next(iter(properties)): text})
    return ToolCall(
        name,
        {},
        error="the Action Input is no JSON object with the arguments" if properties else None,
    )


class ReAct(Dialect):
    """One action a turn."""

    describes_format = True

    def system_prompt(self, tools: dict[str, BaseTool]) -> str:
        end = "When you know the answer, write\nThought: how you know it\nFinal Answer: the answer"
        descriptions = [_describe_tool(**tool.schema()["function"]) for tool in tools.values()]
        return "\n".join(["Your tools:", *descriptions, CALL_FORMAT, end]) if tools else end

    partial_tag = re.compile(r"^[ \t]*[A-Za-z ]{0,12}\Z", re.MULTILINE)

    def parts(self, text: str) -> list[Part]:
        return [Part(PART_KINDS.get(label, "text"), words) for label, words in sections_of(text)]

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        sections = [section for section in sections_of(text) if section[0] not in ("", "Thought")]
        labels = [label for label, _ in sections]
        if "Action" not in labels and "Action Input" not in labels:
            return []
        if labels != ["Action", "Action Input"]:
            form = (
                "write one Action: and one Action Input: in a turn, "
                "and nothing behind them; the Observation is not yours"
            )
            return [ToolCall("", {}, error=form)]
        return [_call(sections[0][1], sections[1][1], tools)]

    def responses(
        self, calls: list[ToolCall], results: list[ToolResult], tools: dict[str, BaseTool]
    ) -> list[Message]:
        # On one line: no line of it can begin with a label.
        return [
            {"role": "user", "content": f"Observation: {' '.join(result.content.split())}"}
            for result in results
        ]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        sections = sections_of(text)
        answers = [words for label, words in sections if label == "Final Answer"]
        labels = [label for label, _ in sections if label not in ("", "Thought")]
        if not answers or not answers[-1] or "Action" in labels:
            return None, False
        return answers[-1], labels == ["Final Answer"] and sections[-1][0] == "Final Answer"

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str | None:
        thought = f"Thought: {thought or 'go on'}"
        if isinstance(message, str):
            return f"{thought}\nFinal Answer: {message}"
        arguments = json.dumps(message.arguments, ensure_ascii=False)
        return f"{thought}\nAction: {message.name}\nAction Input: {arguments}"
