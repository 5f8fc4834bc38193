"""Harmony, the format of GPT-OSS (github.com/openai/harmony): messages with channels.

Its control tokens are its own.

    <|channel|>analysis<|message|>I have to look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.search
    <|constrain|>json<|message|>{"query": "Sosnum"}<|call|>

    <|start|>functions.search to=assistant<|channel|>commentary<|message|>Sosnum is a book by
    ...<|end|>

    <|start|>assistant<|channel|>final<|message|>Bumvel<|return|>

<|end|> closes a message; <|call|> or <|return|> ends the turn, and only there a policy stops
sampling. The tokenizer's chat template has to be `TEMPLATE`. The published template requires calls
in structured form, and here a call stays the sampled ids. The prompt is the published one
(docs/format.md there) without the current date, which would change tokens every day.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from agent_r1 import BaseTool, Dialect, Message, Part, ToolCall, ToolResult

TEMPLATE = """\
{%- macro comment(text, indent) -%}
{%- for line in (text or '').splitlines() -%}{{ indent ~ '// ' ~ line ~ '\\n' }}{%- endfor -%}
{%- endmacro -%}
{%- macro typed(schema, indent) -%}
{%- set kind = schema.type or 'any' -%}
{%- if schema.enum -%}{{ schema.enum | map('tojson') | join(' | ') }}
{%- elif schema.anyOf or schema.oneOf -%}
{%- for one in schema.anyOf or schema.oneOf -%}
{{- typed(one, indent) ~ ('' if loop.last else ' | ') }}{%- endfor -%}
{%- elif kind is not string -%}
{%- for one in kind -%}
{{- typed(dict(schema, type=one), indent) ~ ('' if loop.last else ' | ') }}{%- endfor -%}
{%- elif kind == 'object' -%}
{{- '{\\n' }}
{%- for name, value in (schema.properties or {}).items() -%}
{{- comment(value.description, indent) }}
{{- indent ~ name ~ (': ' if name in (schema.required or []) else '?: ') -}}
{{- typed(value, indent ~ '    ') ~ ',' }}
{%- if 'default' in value -%}
{{- ' // default: ' ~ (value.default if value.enum else value.default | tojson) }}{%- endif -%}
{{- '\\n' }}
{%- endfor -%}
{{- indent ~ '}' }}
{%- elif kind == 'array' -%}
{{- typed(schema['items'], indent) ~ '[]' if 'items' in schema else 'Array<any>' }}
{%- else -%}{{ 'number' if kind == 'integer' else kind }}
{%- endif -%}
{%- endmacro -%}
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message.
{%- if tools -%}
{{- '\\nCalls to these tools must go to the commentary channel: \\'functions\\'.' }}{%- endif -%}
<|end|>
{%- set told = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if told or tools -%}<|start|>developer<|message|>
{%- if told -%}{{ '# Instructions\\n\\n' ~ told }}{%- endif -%}
{%- if tools -%}
{{- ('\\n\\n' if told else '') ~ '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
{%- for tool in tools -%}
{%- set f = tool.function -%}
{{- comment(f.description, '') ~ 'type ' ~ f.name }}
{{- ' = (' ~ ('_: ' ~ typed(f.parameters, '') if f.parameters.properties else '') -}}
{{- ') => any;\\n\\n' }}
{%- endfor -%}
} // namespace functions
{%- endif -%}<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}<|start|>assistant{{ message.content }}<|end|>
{%- elif message.role == 'user' -%}<|start|>user<|message|>{{ message.content }}<|end|>
{%- elif message.role != 'system' -%}
<|start|>{{ message.role }} to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- elif not loop.first -%}
{{- '<|start|>developer<|message|># Instructions\\n\\n' ~ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

CONTROL_TOKENS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
_TAG = re.compile(
    r"<\|(?:end|message|channel|constrain)\|>|<\|start\|>(?=assistant)|<\|(?:call|return)\|>\Z"
)
_END = re.compile(r"<\|(?:end|call|return)\|>")
_HALF = rf"(?:\A|{_END.pattern})(?:(?!<\|message\|>|{_END.pattern}).)*\Z"
"""A header whose message has not begun."""
PART_KINDS = {"analysis": "think", "final": "answer"}


@dataclass(frozen=True)
class Said:
    """Hold one message of a turn."""

    channel: str
    to: str
    text: str
    whole: bool
    """Whether it has a header, a channel, and no control token in its text."""


def messages_of(turn: str) -> list[Said]:
    """Parse the messages of a turn."""
    messages = []
    for part in _END.split(turn):
        if not part.strip():
            continue
        header, mark, text = part.partition("<|message|>")
        channel = re.search(r"<\|channel\|>(analysis|commentary|final)\b", header)
        whole = bool(mark and channel) and not any(token in text for token in CONTROL_TOKENS)
        to = re.search(r"\bto=([\w.-]+)", header)
        messages.append(
            Said(channel[1] if channel else "", to[1] if to else "", text if mark else part, whole)
        )
    return messages


def _call(message: Said) -> ToolCall:
    if message.to == "python":
        return ToolCall("python", {"code": message.text})
    name = message.to.removeprefix("functions.")
    try:
        arguments = json.loads(message.text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, error="the arguments are not a JSON object")
    return ToolCall(name, arguments)


class Harmony(Dialect):
    """Write calls to `functions.NAME` or `python`, and answers in the final channel."""

    describes_format = True
    control_tokens = CONTROL_TOKENS
    tool_parser = "openai"
    reasoning_parser = "openai_gptoss"
    partial_tag = re.compile(f"{_HALF}|{Dialect.partial_tag.pattern}", re.DOTALL)

    def parts(self, text: str) -> list[Part]:
        return [
            Part("tool_call" if m.to else PART_KINDS.get(m.channel, "text"), m.text)
            for m in messages_of(text)
        ]

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        messages = messages_of(text)
        if not all(message.whole for message in messages):
            form = (
                "a message is <|channel|>analysis, commentary or final, "
                "then <|message|> and its text"
            )
            return [ToolCall("", {}, error=form)] if "to=" in text else []
        return [_call(message) for message in messages if message.to]

    def responses(
        self, calls: list[ToolCall], results: list[ToolResult], tools: dict[str, BaseTool]
    ) -> list[Message]:
        # A name that the agent invented must not become the author of a message.
        authors = [
            f"functions.{call.name}" if call.name in tools else "functions" for call in calls
        ]
        contents = [self.escape(result.content, *CONTROL_TOKENS) for result in results]
        return [
            {"role": author, "content": text}
            for author, text in zip(authors, contents, strict=True)
        ]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        messages = messages_of(text)
        answers = [
            message.text.strip()
            for message in messages
            if message.channel == "final" and not message.to
        ]
        if not answers or not answers[-1] or not all(message.whole for message in messages):
            return None, False
        return answers[-1], len(answers) == 1 and messages[-1].channel == "final" and not any(
            message.to for message in messages
        )

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str | None:
        before = (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        )
        if isinstance(message, str):
            return f"{before}<|channel|>final<|message|>{message}"
        arguments = json.dumps(message.arguments, ensure_ascii=False)
        channel = f"<|channel|>commentary to=functions.{message.name} <|constrain|>json"
        return f"{before}{channel}<|message|>{arguments}"

    def tag_places(self, turn: str) -> list[tuple[int, int]]:
        """Find the tokens of the agent's own messages; it opens none in another role's name."""
        return [match.span() for match in _TAG.finditer(turn)]

    def end_token(self, turn: str) -> str:
        return "<|call|>" if any(message.to for message in messages_of(turn)) else "<|return|>"
