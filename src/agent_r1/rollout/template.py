"""Render a chat template once per shape of a conversation, with placeholders for the contents.

In: roles and tools. Out: a *skeleton*, the template's control tokens and texts. `chat_format.py`
fills it with data. A template is a program that came with the model, so its time is limited, and
its failures become errors of one line.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from agent_r1.ground.errors import ConfigError, first_line

# A placeholder is a number between two private-use characters, which no chat template has.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_BESIDE_DATA = re.compile(f"(<[^<>\\s]+>)\\s*(?={_OPEN})|(?<={_CLOSE})\\s*(<[^<>\\s]+>)")

Skeleton = tuple[list[int | str], list[str]]
"""Control ids and text runs with placeholders; and the control tokens or tags that the tools'
descriptions spell."""

RENDER_S = 3.0
"""Limit for rendering a chat template, which takes milliseconds. A downloaded template could loop
for ever."""


def _in_time() -> Callable[..., Any]:
    """Make a trace function (`sys.settrace`) that stops a template after `RENDER_S` seconds."""
    until: list[float] = []

    def line(frame: Any, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != "<template>":  # Jinja's name for every template
            return None
        if not until:
            until.append(time.monotonic() + RENDER_S)
        elif time.monotonic() > until[0]:
            raise TimeoutError(f"not done after {RENDER_S:g} s")
        return line

    return line


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))


class Template:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, control_ids: dict[str, int]):
        self.tokenizer, self.control_ids = tokenizer, control_ids
        self._control = _any_of(control_ids)
        self.guarded = _any_of({*control_ids, *self._tags_beside_data()})
        """What data must not spell: control tokens, and the tags in which the template encloses
        data."""
        self._skeletons: dict[tuple[Any, ...], Skeleton] = {}

    def render(self, roles: tuple[str, ...], tools: list[dict[str, Any]] | None = None) -> str:
        """Render the template for these roles, with a placeholder for each content."""
        messages = [
            {"role": role, "content": f"{_OPEN}{i}{_CLOSE}"} for i, role in enumerate(roles)
        ]
        # Without thinking, Qwen3's template opens each turn with an empty thought. Thinking would
        # use up a turn of a few hundred tokens. Other templates ignore the argument.
        before = sys.gettrace()
        sys.settrace(_in_time())
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=False,
            )
        except Exception as error:  # a template is a program that came with the model
            raise ConfigError(
                f"the chat template of {getattr(self.tokenizer, 'name_or_path', '?')!r} cannot be "
                "rendered "
                f"({type(error).__name__}: {first_line(error)}); use an instruct model with "
                "another template",
                code="broken_template",
            ) from None
        finally:
            sys.settrace(before)

    def _tags_beside_data(self) -> set[str]:
        """Find each literal `<...>` that the template puts directly before or after a content."""
        tags: set[str] = set()
        for roles in (
            ("user", "assistant"),
            ("system", "user"),
            ("user", "assistant", "tool", "tool"),
        ):
            with contextlib.suppress(ConfigError):  # a template may refuse a role
                tags |= {
                    tag for pair in _BESIDE_DATA.findall(self.render(roles)) for tag in pair if tag
                }
        return tags

    def skeleton(
        self, roles: tuple[str, ...], tools: list[dict[str, Any]] | None, continuation: bool = False
    ) -> Skeleton:
        """Return control ids and text runs (with placeholders) for these roles, rendered once and
        cached.

        `continuation` keeps only what follows message 1, the assistant's. The second result is
        every control token or tag spelled in the descriptions of `tools`: data, whose placeholders
        follow those of the messages.
        """
        key = (roles, json.dumps(tools) if tools else None, continuation)
        if key not in self._skeletons:
            spelled: list[str] = []

            def mark(match: re.Match[str]) -> str:
                spelled.append(match[0])
                return f"{_OPEN}{len(roles) + len(spelled) - 1}{_CLOSE}"

            hostile = re.compile(f"{self.guarded.pattern}|{_OPEN}|{_CLOSE}")
            tools = tools and json.loads(hostile.sub(mark, json.dumps(tools, ensure_ascii=False)))
            text = self.render(roles, tools)
            missing = [i for i in range(len(roles)) if f"{_OPEN}{i}{_CLOSE}" not in text]
            if missing:
                raise ConfigError(
                    f"the chat template drops message {missing[0]} (role {roles[missing[0]]!r})",
                    code="template_drops_messages",
                )
            bare = self.render(roles) if tools else ""
            for name in (tool["function"]["name"] for tool in tools or ()):
                if text.count(name) <= bare.count(name):
                    raise ConfigError(
                        f"the chat template of {getattr(self.tokenizer, 'name_or_path', '?')!r} "
                        "does not show the tools to the "
                        "model; use a model whose template does, describe them in the prompt "
                        "(env.name=react), or use none "
                        "(env.tools=[])",
                        code="template_shows_no_tools",
                    )
            if continuation:
                text = text[text.index(f"{_OPEN}1{_CLOSE}") + len(f"{_OPEN}1{_CLOSE}") :]
            self._skeletons[key] = self._split(text), spelled
        return self._skeletons[key]

    def _split(self, text: str) -> list[int | str]:
        parts: list[int | str] = []
        start = 0
        for match in self._control.finditer(text):
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self.control_ids[match[0]])
            start = match.end()
        return parts + ([text[start:]] if start < len(text) else [])
