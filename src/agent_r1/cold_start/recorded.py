"""Read a conversation that was recorded elsewhere.

In: one object with `messages`, of a server's log or a data set for fine-tuning. Out: the messages
of a demonstration, and the schemas of its tools. Next: `demonstrate.py` reads a file of them.

The forms of OpenAI's API, vLLM, DeepSeek, Qwen3 and recipes/gateway are read. Calls stand in the
text, in `tool_calls` or in `function_call`; thoughts in the text or in `reasoning_content`. A key
with a value that is not read is refused, so nothing of a turn is lost without a word.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from agent_r1.core import Message
from agent_r1.env import Dialect
from agent_r1.env.hermes import Hermes
from agent_r1.ground import bounds
from agent_r1.ground.fields import Fields
from agent_r1.tool import ToolCall

ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's older name
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a thought in vLLM, DeepSeek and others. A message may have two with one text."""
HARMLESS = {
    "id": "the line's name",
    "model": "who spoke",
    "created": "when",
    "object": "the kind of the record",
    "usage": "counts of tokens",
    "system_fingerprint": "the server's version",
    "parallel_tool_calls": "a setting of the server; the turns show what it did",
    "messages.id": "the message's name",
    "messages.tool_calls.index": "the place in a stream; the list has the same order",
}
"""Keys of recorded conversations whose values are not read -> what they are."""


def read_conversation(
    record: Any,
    dialect: Dialect,
    tools: list[dict[str, Any]],
    counts: Counter[str],
    any_tool: bool = False,
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages of a recorded conversation, and the schemas of its tools.

    `tools` are the schemas that hold if the record has none. `any_tool`: the environment's tools
    are known only in its episodes. Raises ValueError for a value that is not read, or that cannot
    be used. Harmless keys are counted in `counts`.
    """
    if not isinstance(record, dict):
        raise ValueError("not an object")
    fields = Fields(record)
    schemas = _schemas(fields) or tools
    names = {schema_name(schema) for schema in schemas}
    messages: list[Message] = []
    pending = Pending()
    entries = fields.get("messages")
    if not isinstance(entries, list) or not all(isinstance(entry, Fields) for entry in entries):
        raise ValueError("no list of messages")
    for number, entry in enumerate(entries, 1):
        try:
            message = _message(entry, dialect, pending)
            if message["role"] == "assistant" and not any_tool and not message.get("given"):
                _check_tools(pending.calls, names)
            _check_unicode(message["content"])
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
        messages.append(message)
    fields.refuse_unread(HARMLESS, counts)
    _check_turns(messages)
    return pending.in_order(messages), schemas


def schema_name(schema: dict[str, Any]) -> str:
    """Return a tool's name, with or without OpenAI's envelope around its schema."""
    return (schema.get("function") or schema)["name"]


def _schemas(fields: Fields) -> list[dict[str, Any]]:
    """Read `tools`, or `functions`, its older name. A template may print every key of a schema."""
    schemas = fields.whole("tools") or []
    for function in fields.whole("functions") or []:
        schemas = [*schemas, {"type": "function", "function": function}]
    for schema in schemas:
        function = schema.get("function", schema) if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool without a name")
        if schema is not function and schema.get("type", "function") != "function":
            raise ValueError(f"a tool of type {schema['type']!r}")
    plain_schemas = json.loads(json.dumps(schemas))  # templates write them as JSON
    for schema in plain_schemas:
        # OpenAI lets a tool without arguments omit them, and templates do not.
        function = schema.get("function", schema)
        nothing = {"type": "object", "properties": {}}
        function["parameters"] = nothing | (function.get("parameters") or {})
    return plain_schemas


# ---------------------------------------------------------------------------------------- a message


class Pending:
    """Pair the results of calls with their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str | None, str]] = []
        """(id, name) of the latest turn's calls."""
        self.places: list[int | None] = []
        """Of each message: its place among the results of one turn; None for other messages."""

    def turn(self, calls: list[tuple[str | None, str]]) -> None:
        ids = [key for key, _ in calls if key]
        if len(set(ids)) < len(ids):
            raise ValueError(f"two calls have the id {max(ids, key=ids.count)!r}")
        self._check_results()
        self.calls = calls
        self.places.append(None)

    def _check_results(self) -> None:
        """Raise ValueError for a call without a result.

        An agent reads the result before its next turn.
        """
        results = self.places[len(self.places) - self._count_results() :]
        for place, (_, name) in enumerate(self.calls):
            if place not in results:
                raise ValueError(f"the call of {name} in the turn before it has no result")

    def result(self, key: str | None, name: str | None) -> None:
        """Find the call of a result. Raise ValueError for one that answers no call."""
        count = self._count_results()
        place = count
        if self.calls and count >= len(self.calls):
            raise ValueError("more results than calls in the turn before it")
        if key is not None:
            places = [n for n, (call_id, _) in enumerate(self.calls) if call_id == key]
            if not places:
                raise ValueError(f"tool_call_id {key!r} is of no call in the turn before it")
            place = places[0]
        tool = self.calls[place][1] if self.calls else None
        if name is not None and name != tool:
            raise ValueError(f"the result of {name!r} answers a call of {tool!r}")
        if place in self.places[len(self.places) - count :]:
            raise ValueError("a second result of one call")
        self.places.append(place)

    def _count_results(self) -> int:
        """Count the results since the latest turn."""
        count = 0
        for place in reversed(self.places):
            if place is None:
                break
            count += 1
        return count

    def in_order(self, messages: list[Message]) -> list[Message]:
        """Sort the results of each turn by their calls: an episode shows them so."""
        order: list[Message] = []
        run: list[tuple[int, Message]] = []
        for place, message in zip(self.places, messages, strict=True):
            if place is None:
                order += [result for _, result in sorted(run, key=lambda pair: pair[0])]
                order.append(message)
                run = []
            else:
                run.append((place, message))
        return order + [result for _, result in sorted(run, key=lambda pair: pair[0])]


def _message(entry: Fields, dialect: Dialect, pending: Pending) -> Message:
    """Read one message. Structured calls and thoughts are written in the dialect."""
    role = ROLES.get(str(entry.get("role")))
    if role is None:
        raise ValueError(f"the role {entry.get('role')!r:.40}; roles are {', '.join(ROLES)}")
    content = _text(entry.get("content"))
    if role == "tool":
        key = _optional_text(entry, "tool_call_id")
        pending.result(key, _optional_text(entry, "name"))
        return {"role": role, "content": content}
    if role != "assistant":
        pending.turn([])
        return {"role": role, "content": content}
    calls = _calls(entry)
    text = _write_turn(content, _thought(entry), [call for _, call in calls], dialect)
    calls_in_text = dialect.calls(text, {})
    if calls and any(call.error for call in calls_in_text):
        raise ValueError("its calls cannot be written in this dialect (env.name)")
    if calls and len(calls_in_text) > len(calls):
        raise ValueError(
            f"{len(calls)} calls in tool_calls, and with its text {len(calls_in_text)}"
        )
    calls = calls or [(None, call) for call in calls_in_text]
    pending.turn([(key, call.name) for key, call in calls])
    if not text.rpartition("</think>")[2].strip():  # a thought alone answers nothing
        raise ValueError("a turn of the agent without text and without a call")
    message: Message = {"role": role, "content": text}
    # OpenAI's form for fine-tuning: 0 is a turn that is shown and not trained.
    weight = entry.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1, None):
        raise ValueError(f"the weight {weight!r}; it is 1, or 0 for a turn that is not cloned")
    if weight == 0:
        message["given"] = True
    return message


def _text(content: Any) -> str:
    """Return a content as text. It may be a list of texts, as OpenAI's clients write it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    text = ""
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, Fields) or part.get("type") != "text":
            raise ValueError(f"a content that is no text: {json.dumps(part, default=str)[:60]}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type text without a text")
        text += part["text"]
    return text


def _optional_text(entry: Fields, key: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} is {value!r:.40}, and not a text")
    return value or None


def _thought(entry: Fields) -> str:
    """Return the text of a thought that stands in its own key; "" without one."""
    thoughts: set[str] = set()
    for key in THOUGHTS:
        thoughts.add(_optional_text(entry, key) or "")
    thoughts.discard("")
    if len(thoughts) > 1:
        raise ValueError(f"two different thoughts, in two of {', '.join(THOUGHTS)}")
    return thoughts.pop() if thoughts else ""


def _calls(entry: Fields) -> list[tuple[str | None, ToolCall]]:
    """Read the structured calls of a turn, each with its id."""
    calls: list[tuple[str | None, ToolCall]] = []
    entries = entry.get("tool_calls") or []
    if not isinstance(entries, list) or not all(isinstance(call, Fields) for call in entries):
        raise ValueError("tool_calls is no list of objects")
    for call in entries:
        if call.get("type", "function") not in ("function", None):
            raise ValueError(f"a call of type {call['type']!r}")
        function = call.get("function", call)
        calls.append((_optional_text(call, "id"), _call(function)))
    legacy = entry.get("function_call")
    if legacy:
        calls.append((None, _call(legacy)))
    return calls


def _call(function: Any) -> ToolCall:
    if not isinstance(function, Fields) or not isinstance(function.get("name"), str):
        raise ValueError("a call without the name of a function")
    name = function["name"]
    arguments = function.whole("arguments")
    if isinstance(arguments, str):
        # Several servers write "" for a tool that takes nothing.
        try:
            arguments = bounds.parse_json(arguments, unique=True) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"the arguments of the call of {name} are no JSON: {error}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the call of {name} are no object")
    return ToolCall(name, json.loads(json.dumps(arguments)))


# -------------------------------------------------------------------------------- the turn as text


def _write_turn(content: str, thought: str, calls: list[ToolCall], dialect: Dialect) -> str:
    """Write a turn in the dialect: the thought, the text, then the calls."""
    if not thought and not calls:
        return content
    if not isinstance(dialect, Hermes):
        return _write_other_turn(content, thought, calls, dialect)
    text = content
    if thought:
        if "</think>" in thought or "<think>" in content:
            raise ValueError("a thought inside of a thought, or a second one in the text")
        # As the server split it: no blank is added or taken away.
        text = f"<think>{thought}</think>{content}"
    for call in calls:
        # The thought of a demonstrator that has none; the recorded one stands before.
        text += dialect.write_turn(call).removeprefix("<think>go on</think>")
    return text


def _write_other_turn(content: str, thought: str, calls: list[ToolCall], dialect: Dialect) -> str:
    """Write a turn in a dialect with one call a turn."""
    if len(calls) > 1:
        raise ValueError(f"{len(calls)} calls in a turn; this dialect (env.name) writes one")
    if calls:
        parts = [part for part in (thought, content) if part]
        turn = dialect.write_turn(calls[0], "\n".join(parts))
    else:
        turn = dialect.write_turn(content, thought)
        if turn is not None and thought not in turn:
            turn = None
    if turn is None:
        raise ValueError("this dialect (env.name) cannot write such a call or thought")
    return turn


# -------------------------------------------------------------------------- the whole conversation


def _check_tools(calls: list[tuple[str | None, str]], names: set[str]) -> None:
    """Raise ValueError for a call of a tool that the task lacks."""
    for _, name in calls:
        if name and name not in names:  # a call that cannot be parsed has no name
            tools = ", ".join(sorted(names)) or "none"
            raise ValueError(f"it calls the tool {name!r}, which the task lacks (has: {tools})")


def _check_unicode(text: str) -> None:
    """Raise ValueError for half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} is half of a character") from None


def _check_turns(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    clones = [m for m in messages if m["role"] == "assistant" and not m.get("given")]
    if not clones or roles[0] == "assistant":
        raise ValueError("no turn of the agent after the user's")
