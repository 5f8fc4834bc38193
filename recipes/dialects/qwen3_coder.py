"""Write calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 do, in tags.

    <think> ... </think>
    <tool_call>
    <function=search>
    <parameter=query>
    Sosnum
    </parameter>
    </function>
    </tool_call>                                   a turn may have several calls
    <answer> ... </answer>                         ends the episode

A value is plain text between its tags, without one line break at each end. The tool's schema says
what the text means. A parameter of type string stays text, also `007` or `true`. Any other one is
read as JSON, and stays text if it is none. A value may have several lines, and tags: it ends at the
first `</parameter>` after which another parameter or the end of the function follows. Only
`</tool_call>` cannot be in a value, because it ends the call.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from agent_r1 import BaseTool, Hermes, ToolCall

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


class Qwen3Coder(Hermes):
    """Thoughts and answers as in Hermes, calls in XML."""

    tool_parser = "qwen3_coder"

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        parts = [part for part in self.parts(text) if part.kind == "tool_call"]
        return [replace(_call(part.text, part.closed, tools), end=part.end) for part in parts]

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str:
        if isinstance(message, str):
            return super().write_turn(message, thought)
        lines = [f"<function={message.name}>"]
        for name, value in message.arguments.items():
            lines += [f"<parameter={name}>", _write_value(value), "</parameter>"]
        body = "\n".join([*lines, "</function>"])
        return f"<think>{thought or 'go on'}</think><tool_call>\n{body}\n</tool_call>"


def _call(body: str, is_closed: bool, tools: dict[str, BaseTool]) -> ToolCall:
    """Parse the text between a call's tags. A fault goes into `error`, in words for the agent."""
    if not is_closed:
        return ToolCall("", {}, error="the call is not closed with </tool_call>")
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return ToolCall("", {}, error="write <function=NAME> ... </function> inside <tool_call>")
    name = function[1].strip()
    inside = function[2]
    # A tool that does not exist has no schema: the agent reads that, whatever its values are.
    schemas = tools[name].parameters.get("properties", {}) if name in tools else {}
    arguments: dict[str, Any] = {}
    place = 0
    while parameter := _PARAMETER.match(inside, place):
        key = parameter[1].strip()
        if key in arguments:
            return ToolCall(name, {}, error=f"the parameter {key!r} is given twice")
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _read(value, _types_of(schemas.get(key, {})))
        place = parameter.end()
    if inside[place:].strip():
        return ToolCall(
            name, {}, error="write each value between <parameter=NAME> and </parameter>"
        )
    return ToolCall(name, arguments)


def _types_of(schema: dict[str, Any]) -> set[str]:
    """Return the types that a parameter's schema allows, also in `anyOf`."""
    declared_type = schema.get("type") or []
    types = {declared_type} if isinstance(declared_type, str) else set(declared_type)
    for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= _types_of(option)
    if not types and any(isinstance(value, str) for value in schema.get("enum", ())):
        return {"string"}
    return types


def _read(value: str, types: set[str]) -> Any:
    """Read a value by the types of its schema. Text that is no JSON stays text."""
    # The template writes Python's spelling of these three.
    constants = {"True": True, "False": False, "None": None}
    if "string" in types:
        absent = "null" in types and value in ("null", "None")
        return None if absent else value
    if value in constants:
        return constants[value]
    try:
        return json.loads(value, parse_constant=_refuse)  # NaN is not JSON
    except (ValueError, RecursionError):
        return value


def _refuse(number: str) -> Any:
    raise ValueError(number)


def _write_value(value: Any) -> str:
    """Write a value as its template does: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
