"""Render a chat template, so that contents stay data.

In: messages and tools. Out: the template's control tokens and the stretches of text between them.
`format.py` encodes both. A template is a program that came with the model, so `renderer.py` runs
it with limits, and its failures become errors of one line.

There are two ways, and a test compares them:

    copied    a template that only copies contents is rendered once for each *shape* of a
              conversation (its roles), with a placeholder for each content: its *skeleton*
    rendered  any other template reads the contents themselves, because it may trim, escape or
              compare them; only what spells a control token in them is hidden by a placeholder
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agent_r1.chat.renderer import RenderError, renderer_of
from agent_r1.core import Message
from agent_r1.ground.errors import ConfigError, first_line

# A placeholder is a number between two private-use characters, which no chat template has.
_OPEN = "\ue0f0"
_CLOSE = "\ue0f1"
TURN = "\ue0f2"
"""Stands for the agent's turn, in front of what continues it."""
PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_BESIDE_DATA = re.compile(f"(<[^<>\\s]+>)\\s*(?={_OPEN})|(?<=[{_CLOSE}{TURN}])\\s*(<[^<>\\s]+>)")

Skeleton = tuple[list[int | str], list[str]]
"""Control ids and text runs with placeholders; and the text of each placeholder."""
Tools = Sequence[dict[str, Any]] | None
Record = Callable[[list[Message], Sequence[str]], tuple[list[Message], str]]
"""Maps results and the names of their calls to a conversation with those calls. The second value is
the text between the turn and its end."""
Calls = tuple[str, ...] | None
"""Names of the calls of the turn before the messages; None before the first turn."""

MOST_SKELETONS = 256
"""Shapes of conversations that are kept: one for each number of messages, and set of tools."""
OUR_SOURCES: set[str] = set()
"""Templates that came with this project (`tokenizer.py`), which only copy contents. Any other is a
stranger's program, and is rendered in a process of its own (`renderer.py`)."""
NOW = datetime.datetime.now()
"""One date for the whole process: the prompt of a long run must not change at midnight."""


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))


_WORDS = re.compile(
    r"[\s\u2581]+|</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|p|br|hr|ul|ol|li|blockquote|"
    r"strong|em|b|i|u|s|sub|sup|code|pre|a|img|div|span)>"
)
"""Added tokens that are words of a text: runs of blanks, and HTML. Gemma 3 has 6,000 of them."""


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the control tokens of a tokenizer: text -> id.

    These are its special and added tokens. Blanks and HTML are none if they are not flagged as
    special, unless the template writes that tag.
    """
    tokens: dict[str, int] = {}
    source = str(tokenizer.chat_template)
    for index, token in tokenizer.added_tokens_decoder.items():
        is_word = not token.special and _WORDS.fullmatch(token.content)
        if not is_word or (token.content.startswith("<") and token.content in source):
            tokens[token.content] = index
    return tokens


class Template:
    """The chat template of a tokenizer. `study.py` finds out what a stranger's needs."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.control_ids = control_tokens(tokenizer)
        self.control = _any_of(self.control_ids)
        self.source = tokenizer.chat_template
        """One template, or several by name, such as `default` and `tool_use`."""
        self.copies = isinstance(self.source, str) and self.source in OUR_SOURCES
        """Whether the first way of the module's docstring is right. False is safe."""
        self.record: Record | None = None
        """Set for a template that reads a result only after a call in structured form."""
        self.guard_pattern = _any_of({*self.control_ids, *self._tags_next_to_data()})
        """What data must not spell: control tokens, and the tags around data in the template."""
        self.hidden = re.compile(f"{self.guard_pattern.pattern}|[{_OPEN}{_CLOSE}{TURN}]")
        self._skeletons: dict[tuple[Any, ...], Skeleton] = {}

    # ---------------------------------------------------------------------------------- one render

    def render(self, messages: list[Message], tools: Tools = None, opens: bool = True) -> str:
        """Render a conversation. `opens`: up to the point where the agent speaks."""
        # A tool's result belongs to a conversation with tools, also where they are not at hand.
        several = isinstance(self.source, dict) and "tool_use" in self.source
        purpose = "tool_use" if several and _have_results(messages) else None
        words: dict[str, Any] = {
            "add_generation_prompt": opens,
            # Qwen3's template then opens each turn with an empty thought. Thinking would use up a
            # turn of a few hundred tokens. Other templates ignore the argument.
            "enable_thinking": False,
        }
        try:
            source = self.tokenizer.get_chat_template(purpose, tools)
            if source in OUR_SOURCES:
                return self.tokenizer.apply_chat_template(
                    messages, chat_template=source, tools=tools, tokenize=False, **words
                )
            special = {
                name: _text(value) for name, value in self.tokenizer.special_tokens_map.items()
            }
            return renderer_of(source, NOW).render(
                **special, messages=messages, tools=tools, documents=None, **words
            )
        except (RenderError, ValueError) as error:  # ValueError: no template for this purpose
            raise ConfigError(
                f"the chat template of {self.model} cannot be rendered ({first_line(error)}); use "
                "an instruct model with another template",
                code="broken_template",
            ) from None

    @property
    def model(self) -> str:
        """The model's name, for messages."""
        return repr(getattr(self.tokenizer, "name_or_path", "?"))

    def _tags_next_to_data(self) -> set[str]:
        """Find each literal `<...>` that the template puts directly before or after a content."""
        tags: set[str] = set()
        for roles in (
            ("user", "assistant"),
            ("system", "user"),
            ("user", "assistant", "tool", "tool"),
        ):
            messages = [{"role": role, "content": placeholder(i)} for i, role in enumerate(roles)]
            with contextlib.suppress(ConfigError):  # a template may refuse a role
                for pair in _BESIDE_DATA.findall(self.render(messages)):
                    tags.update(tag for tag in pair if tag)
        return tags

    # ----------------------------------------------------------------------------------- skeletons

    def prompt(self, messages: list[Message], tools: Tools = None) -> Skeleton:
        """Return the skeleton of a conversation up to the point where the agent speaks."""
        return self._fill_skeleton(messages, tools, None)

    def continuation(
        self, messages: list[Message], tools: Tools = None, calls: Sequence[str] = ()
    ) -> Skeleton:
        """Return the skeleton of what follows a turn, from the token that ends it.

        `calls`: names of the calls that `messages` answer.
        """
        if not (self.record and _have_results(messages)):
            return self._fill_skeleton(messages, tools, ())
        names = [name or "unknown" for name in calls] or [m.get("name", "tool") for m in messages]
        return self._fill_skeleton(messages, tools, tuple(names))

    def _fill_skeleton(self, messages: list[Message], tools: Tools, calls: Calls) -> Skeleton:
        contents = [_text_of(message) for message in messages]
        roles = tuple(message["role"] for message in messages)
        key = (roles, json.dumps(tools) if tools else None, calls)
        if key not in self._skeletons:
            while len(self._skeletons) >= MOST_SKELETONS:
                del self._skeletons[next(iter(self._skeletons))]
            self._skeletons[key] = self._shape(messages, tools, calls)
        parts, tool_texts = self._skeletons[key]
        plain_copy = parts, [*tool_texts, *contents]
        # Not if a content is empty: `content or ''` is a copy, `if content` is not.
        if self.copies and all(contents):
            return plain_copy
        hidden_tools, texts = self._hide_tools(tools)
        hidden_contents = [self._hide(content, texts) for content in contents]
        try:
            hidden_parts = self._parts(_with(messages, hidden_contents), hidden_tools, calls)
            # Changed by the template, a content could become a control token: `<|IM_END|>` in lower
            # case. A twin without letters cannot; it only shows which turns are left out.
            if _controls(hidden_parts) != _controls(parts):
                twins = [re.sub(r"\S", "-", content) for content in contents]
                twin = self._parts(_with(messages, twins), hidden_tools, calls)
                if _controls(hidden_parts) != _controls(twin):
                    return plain_copy
        except ConfigError:  # a template may refuse a text, and a page must not end an episode
            return plain_copy
        return hidden_parts, texts

    def _hide(self, text: str, texts: list[str]) -> str:
        """Replace each control token or tag by a placeholder, and append it to `texts`."""

        def mark(match: re.Match[str]) -> str:
            texts.append(match[0])
            return placeholder(len(texts) - 1)

        return self.hidden.sub(mark, text)

    def _hide_tools(self, tools: Tools) -> tuple[Tools, list[str]]:
        """Hide what a tool says about itself: it may be somebody else's."""
        texts: list[str] = []
        if not tools:
            return None, texts
        return json.loads(self._hide(json.dumps(tools, ensure_ascii=False), texts)), texts

    def _shape(self, messages: list[Message], tools: Tools, calls: Calls) -> Skeleton:
        """Return the skeleton with a placeholder for each content. The tools' come first.

        Raises ConfigError for a template that drops a message.
        """
        hidden_tools, texts = self._hide_tools(tools)
        marks = [placeholder(len(texts) + i) for i in range(len(messages))]
        parts = self._parts(_with(messages, marks), hidden_tools, calls)
        # Once through the text: a search for each mark takes minutes for 30,000 messages.
        shown: set[str] = set()
        for part in parts:
            if isinstance(part, str):
                shown.update(PLACEHOLDER.findall(part))
        for number, message in enumerate(messages, len(texts)):
            if str(number) not in shown:
                raise self.drops(message["role"])
        return parts, texts

    def drops(self, role: str) -> ConfigError:
        return ConfigError(
            f"the chat template of {self.model} drops a message of role {role!r}; use an instruct "
            "model with another template",
            code="template_drops_messages",
        )

    def _parts(self, messages: list[Message], tools: Tools, calls: Calls) -> list[int | str]:
        """Render messages, and split the text at its control tokens."""
        if calls is None:
            return self._split(self.render(messages, tools))
        return self._split(self._tail(messages, tools, calls))

    def _split(self, text: str) -> list[int | str]:
        parts: list[int | str] = []
        start = 0
        for match in self.control.finditer(text):
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self.control_ids[match[0]])
            start = match.end()
        return parts + ([text[start:]] if start < len(text) else [])

    def _tail(self, messages: list[Message], tools: Tools, calls: tuple[str, ...]) -> str:
        """Render what follows an agent's turn, from the token that ends the turn.

        Raises ConfigError if the template drops the turn.
        """
        # The turn is rendered in a conversation of one question; `probe.py` compares with
        # longer ones.
        turn = {"role": "assistant", "content": TURN}
        conversation = [{"role": "user", "content": "?"}, turn, *messages]
        turn_end = ""
        if calls and self.record:
            conversation, turn_end = self.record(messages, calls)
        _, mark, after = self.render(conversation, tools).rpartition(TURN)
        if not mark:
            raise self.drops("assistant")
        return after.removeprefix(turn_end)


def _text(token: Any) -> Any:
    """Return a special token as text: `transformers` has it with its flags."""
    if isinstance(token, list):
        return [str(one) for one in token]
    return str(token)


def _text_of(message: Message) -> str:
    """Return a content. Raise ConfigError for a list of parts, such as pictures."""
    if not isinstance(message["content"], list):
        return str(message["content"])
    raise ConfigError(
        "a message has pictures, and only texts are read here; see recipes/pictures/README.md",
        code="pictures_not_read",
    )


def _have_results(messages: list[Message]) -> bool:
    """Return whether a message is a tool's result. Some dialects name its author as the role."""
    return any(m["role"] not in ("system", "user", "assistant") for m in messages)


def _with(messages: list[Message], contents: list[str]) -> list[Message]:
    return [m | {"content": text} for m, text in zip(messages, contents, strict=True)]


def _controls(parts: list[int | str]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


def placeholder(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"
