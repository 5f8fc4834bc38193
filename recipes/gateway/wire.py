"""Read and write OpenAI's chat completions.

In: the body of a request, or a sampled turn. Out: a `Call`, or a `Refusal` with a status and a
sentence; the body of an answer, or the events of a stream. Next: `matching.py` finds the
conversation.

What is not read is refused, never ignored: an ignored field would change the agent in silence. Two
lists are the exception, and are counted. The run's own temperature and noise win, because a
client's `seed=42` would make all samples of a group equal. `HARMLESS` names fields that change no
turn.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agent_r1 import Fields, Message, ToolCall

OVERRIDDEN_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""The run samples with its own temperature, from the whole distribution, with its own noise."""
REFUSED_SETTINGS = {
    "logit_bias": "the trainer's log-probabilities assume the model's own distribution",
    "response_format": "it would restrict the tokens, and the trainer assumes all of them",
    "functions": "use `tools`",
    "function_call": "use `tools`",
    "audio": "only text is supported",
    "prediction": "it would be another text than the one that is sampled",
    "top_logprobs": "log-probabilities are not returned",
    "web_search_options": "there is no search on the server's side",
}
HARMLESS = {
    "user": "who asks",
    "safety_identifier": "who asks",
    "metadata": "for a server's log",
    "store": "for a server's log",
    "service_tier": "a server's queue",
    "prompt_cache_key": "a server's cache",
    "prompt_cache_retention": "a server's cache",
    "reasoning_effort": "the model thinks as long as it was trained to",
    "verbosity": "the model writes as much as it was trained to",
    "parallel_tool_calls": "a turn has as many calls as the model writes",
    "stream_options.include_obfuscation": "padding of a stream",
    "messages.name": "who speaks; a result is known by its call's id",
    "messages.annotations": "links that a server adds to an answer",
    "messages.tool_calls.index": "the place in a stream; the list has the same order",
    "messages.content.annotations": "links that a server adds to an answer",
    "messages.content.cache_control": "a server's cache",
}
"""Fields of a request whose values are not read -> what they are."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant message in which clients keep or drop the thought."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a content's parts whose `text` is the message's."""


MOST_FIELDS = 100
"""Fields of a request; the protocol has about forty."""
MOST_NAME = 200
"""Letters of a name: of the model, a tool, a stop string."""
MOST_STOPS = 16
MOST_TOOLS = 1000
MOST_TOOL_LETTERS = 2**18
"""Of all tools as JSON: to encode them holds the event loop."""
MOST_VALUES = 100_000
"""Texts, numbers, lists and objects of a body. Half a million hold the event loop for seconds."""
TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)
"""A string, also one without an end, or a comma or bracket outside of strings.

`*+` gives nothing back, so the time is linear also for a string without an end.
"""


class Refusal(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request"):
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": None}}


@dataclass
class Call:
    """One request for a completion."""

    messages: list[Message]
    """role, content as text; of assistants `thought`, and `tool_calls` as (id, name, arguments).

    Arguments are text.
    """
    tools: list[dict[str, Any]]
    stop: list[str]
    max_tokens: int | None
    stream: bool
    with_usage: bool
    model: str
    required: str = ""
    """The tool that `tool_choice` requires; `any` for one of them, "" for none."""
    overridden_names: list[str] = field(default_factory=list)
    ignored_names: list[str] = field(default_factory=list)


def parse_body(body: bytes) -> Any:
    """Read a body with one meaning: no key twice, no NaN, no Infinity. Raise ValueError."""
    # UTF-8 as RFC 8259 requires. `json.loads` of bytes would guess UTF-16, too, whose quotation
    # marks are not where `count_values` looks for them.
    text = body.decode()
    count_values(text)
    return json.loads(
        text, object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_finite
    )


def count_values(text: str) -> None:
    """Raise ValueError for JSON of more than `MOST_VALUES` values, before it is parsed.

    Each value but the first comes after a comma or opens its list or object. Strings are skipped:
    a CSV file in one has as many commas as it likes. 8 MB of `[],` held the event loop for 2 s in
    the parser; here they are refused after 30 ms.
    """
    values = 1
    strings = 0
    for token in TOKEN.finditer(text):
        if text[token.start()] == '"':
            strings += 1
        else:
            values += 1
        # A value has at most two strings, itself and its key. More of them are no JSON.
        if values > MOST_VALUES or strings > 2 * MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a JSON parser's pairs. Raise ValueError for a key that is there twice."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("duplicate keys")
    return dict(pairs)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value


def read_call(body: bytes) -> Call:
    """Read a request's body. Raise Refusal for anything that would not be honoured."""
    try:
        values = parse_body(body)
        values = Fields(values) if isinstance(values, dict) else None
    except (ValueError, RecursionError):
        raise Refusal(
            "the body is not valid JSON, or it is too deep, or it has a key twice, NaN, Infinity "
            f"or more than {MOST_VALUES} values"
        ) from None
    if values is None:
        raise Refusal("the body is not a JSON object")
    if len(values) > MOST_FIELDS:
        raise Refusal(f"the body has more than {MOST_FIELDS} fields")
    names = {name for name, value in values.items() if value not in (None, [], {})}
    for name in sorted(names & REFUSED_SETTINGS.keys()):
        if values.whole(name) != {"type": "text"}:  # response_format's default
            raise Refusal(f"{name} is not supported: {REFUSED_SETTINGS[name]}")
    if values.get("n") is not None and (type(values["n"]) is not int or values["n"] != 1):
        raise Refusal("n must be 1: a call is one turn of one conversation; call again instead")
    if values.get("logprobs"):
        raise Refusal("logprobs are not returned")
    stop = values.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(word, str) and word for word in stop):
        raise Refusal("stop must be a string, or a list of strings")
    if len(stop) > MOST_STOPS or any(len(word) > MOST_NAME for word in stop):
        raise Refusal(f"stop has more than {MOST_STOPS} strings, or one above {MOST_NAME} letters")
    model = values.get("model", "agent")
    if not isinstance(model, str) or len(model) > MOST_NAME:
        raise Refusal(f"model must be a string of at most {MOST_NAME} letters")
    stream = values.get("stream")
    stream_options = values.get("stream_options")
    if stream not in (True, False, None) or not isinstance(stream_options, dict | None):
        raise Refusal("stream must be true or false, and stream_options an object")
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list of at least one message")
    tools = _read_tools(values.whole("tools") or [])
    requirement = _read_tool_choice(values.get("tool_choice"), tools)
    if values.get("tool_choice") == "none":
        tools = []
    if values.get("modalities") not in (None, [], ["text"]):
        raise Refusal("modalities must be text: nothing else is sampled")
    call = Call(
        messages=_read_messages(messages),
        tools=tools,
        stop=stop,
        max_tokens=_read_max_tokens(values),
        stream=stream is True,
        with_usage=bool((stream_options or {}).get("include_usage")),
        model=model,
        required=requirement,
        overridden_names=sorted(names & set(OVERRIDDEN_SETTINGS)),
    )
    call.ignored_names = _unread_names(values)
    return call


def _unread_names(values: Fields) -> list[str]:
    """Return the harmless fields that were not read. Raise Refusal for another one."""
    for name in (*OVERRIDDEN_SETTINGS, *REFUSED_SETTINGS):
        values.whole(name)
    counts: Counter[str] = Counter()
    try:
        values.refuse_unread(HARMLESS, counts)
    except ValueError as error:
        raise Refusal(f"not supported: {error}") from None
    return sorted(name.replace(".", "_") for name in counts)


def _read_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> str:
    """Return the tool that a client requires. The model still samples freely: see `Call.required`.

    To force the call would restrict the tokens, and the trainer assumes all of them. Clients cope
    with a turn without a call, because models write such turns, too.
    """
    if choice in ("auto", "none", None):
        return ""
    names = [tool["function"]["name"] for tool in tools]
    name = "any"
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
    elif choice != "required":
        name = None
    if not isinstance(name, str) or not names or (isinstance(choice, dict) and name not in names):
        raise Refusal("tool_choice must be auto, none, required or one of the tools")
    return name


def _read_max_tokens(values: dict[str, Any]) -> int | None:
    limits = []
    for name in ("max_tokens", "max_completion_tokens"):
        value = values.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Refusal(f"{name} must be a whole number of at least 1")
        limits.append(value)
    return min(limits, default=None)


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    """Check tools. One without arguments may leave its schema out; templates need it."""
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise Refusal(f"tools must be a list of at most {MOST_TOOLS}")
    if len(json.dumps(tools, ensure_ascii=False)) > MOST_TOOL_LETTERS:
        raise Refusal(f"the tools have more than {MOST_TOOL_LETTERS} letters; leave some out")
    checked_tools: list[dict[str, Any]] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal('each tool must be {"type": "function", "function": {"name": ...}}')
        name = function["name"]
        if not name or len(name) > MOST_NAME:
            raise Refusal(f"a tool's name has 1 to {MOST_NAME} letters")
        if not isinstance(function.get("description"), str | None):
            raise Refusal(f"the description of the tool {name[:40]!r} is no text")
        schema = function.get("parameters") or {"type": "object"}
        if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
            raise Refusal(
                f"the parameters of the tool {name[:40]!r} are no JSON schema of an object"
            )
        if "properties" not in schema:
            schema = schema | {"properties": {}}
        checked_tools.append(tool | {"function": function | {"parameters": schema}})
    return checked_tools


def _read_messages(messages: list[Any]) -> list[Message]:
    """Check roles, contents and the ids of tool results."""
    known_ids: set[str] = set()
    texts: list[Message] = []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise Refusal(f"{place} is not an object")
        role = message.get("role")
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant", "tool"):
            raise Refusal(f"{place}: unknown role {str(role)[:40]!r}")
        text: Message = {"role": role, "content": _read_content(message.get("content"), place)}
        if role == "assistant":
            if message.get("function_call"):
                raise Refusal(f"{place}: function_call is not supported; use tool_calls")
            text["tool_calls"] = _read_calls(message.get("tool_calls") or [], place)
            text["thought"] = _read_thought(message, place)
            known_ids.update(call[0] for call in text["tool_calls"])
        elif role == "tool":
            key = message.get("tool_call_id")
            text["tool_call_id"] = key
            if not isinstance(key, str) or key not in known_ids:
                raise Refusal(f"{place}: its tool_call_id is not the id of a call before it")
        texts.append(text)
    return texts


def _read_content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{place}: content must be text")
    text = ""
    for part in content:
        is_text = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise Refusal(f"{place}: only text is supported; images and audio are not")
        text += part["text"]
    return text


def _read_thought(message: Fields, place: str) -> str:
    """Return the thought of a turn. Only one that was not sampled here is read by the model."""
    thoughts = [message.get(name) or "" for name in THOUGHTS]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise Refusal(f"{place}: a thought must be text")
    if len({*thoughts} - {""}) > 1:
        raise Refusal(f"{place}: two different thoughts, in two of {', '.join(THOUGHTS)}")
    return max(thoughts)


def _read_calls(calls: Any, place: str) -> list[tuple[str, str, str]]:
    entries: list[tuple[str, str, str]] = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise Refusal(f"{place}: a call must have an id and a function")
        if call.get("type") not in ("function", None):
            raise Refusal(f"{place}: a call of a type that is no function")
        key = call.get("id")
        name = function.get("name")
        arguments = function.get("arguments")
        if not (isinstance(key, str) and isinstance(name, str) and isinstance(arguments, str)):
            raise Refusal(f"{place}: a call's id, name and arguments must be strings")
        entries.append((key, name, arguments))
    return entries


# ------------------------------------------------------------------------------------------ answers


@dataclass
class Turn:
    """A sampled turn as a client sees it."""

    content: str
    thought: str
    calls: list[tuple[str, ToolCall]]
    """(id, call)."""
    finish_reason: str
    """stop, length or tool_calls."""

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [_call_body(key, call) for key, call in self.calls]
        return message


def _call_body(key: str, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    try:
        arguments.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, which the model escaped. A client that encodes it again would die.
        arguments = json.dumps(call.arguments)
    return {
        "id": key,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def usage_of(prompt_tokens: int, sampled_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def answer_body(turn: Turn, call: Call, key: str, usage: dict[str, int]) -> list[bytes]:
    """Write an answer: one body, or the events of a stream."""
    base: dict[str, Any] = {"id": key, "created": int(time.time()), "model": call.model}
    if not call.stream:
        choice = {
            "index": 0,
            "message": turn.message(),
            "finish_reason": turn.finish_reason,
            "logprobs": None,
        }
        body = base | {"object": "chat.completion", "choices": [choice], "usage": usage}
        return [json.dumps(body).encode()]
    # The turn is sampled first and streamed then: its calls are known at its end only.
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if turn.thought:
        deltas.append({"reasoning_content": turn.thought})
    for start in range(0, len(turn.content), 16):
        deltas.append({"content": turn.content[start : start + 16]})
    for number, (call_id, one) in enumerate(turn.calls):
        deltas.append({"tool_calls": [{"index": number} | _call_body(call_id, one)]})
    events = []
    for delta in deltas:
        events.append({"index": 0, "delta": delta, "finish_reason": None})
    events.append({"index": 0, "delta": {}, "finish_reason": turn.finish_reason})
    chunk = base | {"object": "chat.completion.chunk"}
    bodies = [chunk | {"choices": [event]} for event in events]
    if call.with_usage:
        bodies.append(chunk | {"choices": [], "usage": usage})
    return [
        *(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies),
        b"data: [DONE]\n\n",
    ]
