"""Write calls as Llama 3.1 and 3.2 do: a JSON object, without tags.

    {"name": "search", "parameters": {"query": "Sosnum"}}      a call; the result comes as `ipython`
    <answer> ... </answer>                                     ends the episode

`arguments` is read like `parameters`, and `<|python_tag|>` may stand before the object. A turn may
have several calls, next to each other or with `;` between them. It ends with `<|eot_id|>` or, in
Llama's older form, with `<|eom_id|>`.

Without tags, an answer may contain JSON too. So an object is a call only if its name is that of a
tool, or after `<|python_tag|>`. An object inside another one is data, and so is one in a thought or
in an answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from agent_r1 import BaseTool, Hermes, Part, ToolCall

PYTHON_TAG = "<|python_tag|>"
FORM = 'write {"name": ..., "parameters": {...}}'
_START = re.compile(r"\{")
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')
_DECODER = json.JSONDecoder()


class Llama3Json(Hermes):
    """Thoughts and answers as in Hermes, calls as bare JSON."""

    tool_parser = "llama3_json"
    tool_parser_needs = (PYTHON_TAG,)
    partial_tag = re.compile(rf'{Hermes.partial_tag.pattern}|\A\s*\{{?\s*"?n?a?m?e?"?\Z')

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        calls = []
        for part in super().parts(text):
            if part.kind != "text":  # a thought, an answer, or a call in another form
                continue
            begin = part.end - len(part.text)
            for call in _calls_in(part.text, tools):
                calls.append(replace(call, end=begin + (call.end or 0)))
        return calls

    def parts(self, text: str) -> list[Part]:
        parts = []
        for part in super().parts(text):
            # A turn with a call begins with it, as far as a screen is concerned.
            begins = part.text.lstrip().startswith((PYTHON_TAG, '{"name"'))
            parts.append(replace(part, kind="tool_call") if begins else part)
        return parts

    @property
    def tag_words(self) -> frozenset[str]:
        return super().tag_words | {PYTHON_TAG}

    def tag_places(self, turn: str) -> list[tuple[int, int]]:
        """Add the tag before a call. Anywhere else it is data."""
        places = super().tag_places(turn)
        for part in super().parts(turn):
            begin = part.end - len(part.text)
            if part.kind == "text" and part.text.lstrip().startswith(PYTHON_TAG):
                start = turn.index(PYTHON_TAG, begin)
                places.append((start, start + len(PYTHON_TAG)))
        return sorted(places)

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str:
        if isinstance(message, str):
            return super().write_turn(message, thought)
        before = f"<think>{thought}</think>" if thought else ""
        body = {"name": message.name, "parameters": message.arguments}
        return before + json.dumps(body, ensure_ascii=False)


def _calls_in(text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
    """Parse the calls of a text. A fault goes into `error`, in words for the agent."""
    tag = text.find(PYTHON_TAG)
    has_tag = tag >= 0
    place = tag + len(PYTHON_TAG) if has_tag else 0
    calls: list[ToolCall] = []
    while start := _START.search(text, place):
        try:
            call_json, place = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            name_match = _NAME.match(text, start.start())
            if name_match and (has_tag or name_match[1] in tools):
                return [*calls, ToolCall("", {}, f"the call is not valid JSON; {FORM}", len(text))]
            place = start.end()
            continue
        call = _call(call_json, has_tag)
        if call and (has_tag or call.name in tools):
            calls.append(replace(call, end=place))
    if has_tag and not calls:
        return [ToolCall("", {}, f"there is no call after {PYTHON_TAG}; {FORM}", len(text))]
    return calls


def _call(call_json: object, has_tag: bool) -> ToolCall | None:
    """Make a call of a JSON object, or None if it is none."""
    if not isinstance(call_json, dict) or not isinstance(call_json.get("name"), str):
        return ToolCall("", {}, 'the call has no "name"') if has_tag else None
    arguments = call_json.get("arguments", call_json.get("parameters"))
    if arguments is None and not has_tag:
        return None
    if not isinstance(arguments, dict):
        return ToolCall(call_json["name"], {}, 'the call has no "parameters" object')
    return ToolCall(call_json["name"], arguments)
