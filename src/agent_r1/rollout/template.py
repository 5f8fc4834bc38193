"""Render a chat template, so that contents stay data.

In: messages and tools. Out: the template's control tokens and the stretches of text between them.
`chat_format.py` encodes both. A template is a program that came with the model, so its time is
limited, and its failures become errors of one line.

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
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes

from agent_r1.core import Message
from agent_r1.ground.errors import ConfigError, first_line

# A placeholder is a number between two private-use characters, which no chat template has.
_OPEN = "\ue0f0"
_CLOSE = "\ue0f1"
_TURN = "\ue0f2"
"""Stands for the agent's turn, in front of what continues it."""
PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_BESIDE_DATA = re.compile(f"(<[^<>\\s]+>)\\s*(?={_OPEN})|(?<=[{_CLOSE}{_TURN}])\\s*(<[^<>\\s]+>)")

Skeleton = tuple[list[int | str], list[str]]
"""Control ids and text runs with placeholders; and the text of each placeholder."""
Tools = Sequence[dict[str, Any]] | None

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


def only_copies(template: str) -> bool:
    """Return whether each use of a message's `content` in the template only copies it.

    Then a placeholder ends up where a content would. False if that is not certain.
    """
    template = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:  # a tag that only `transformers` knows
        return False
    parent = {
        child: node for node in tree.find_all(nodes.Node) for child in node.iter_child_nodes()
    }
    copies = 0
    for read in tree.find_all((nodes.Getattr, nodes.Getitem)):
        name = read.attr if isinstance(read, nodes.Getattr) else read.arg
        if getattr(name, "value", name) != "content":
            continue
        # Up through `'user\n' + content + '\n'` and `content or ''`; a filter or a test ends it.
        above: Any = read
        while isinstance(parent[above], nodes.Add | nodes.Or):
            above = parent[above]
        copies += isinstance(parent[above], nodes.Output)
    # A whole message may be passed on, too: `message | tojson`.
    loops = [
        loop for loop in tree.find_all(nodes.For) if getattr(loop.iter, "name", "") == "messages"
    ]
    whole = {"messages", *(getattr(loop.target, "name", "") for loop in loops)}
    for name in tree.find_all(nodes.Name):
        above = parent[name]
        if name.name in whole and not isinstance(above, nodes.Getattr | nodes.Getitem | nodes.For):
            return False
    return copies == len(re.findall(r"\bcontent\b", template))


class Template:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, control_ids: dict[str, int]):
        self.tokenizer = tokenizer
        self.control_ids = control_ids
        self._control = _any_of(control_ids)
        # One date for the whole process: the prompt of a long run must not change at midnight.
        self._now = datetime.datetime.now()
        source = tokenizer.chat_template
        self.purposes = set(source) if isinstance(source, dict) else set()
        """Names of several templates, such as `default` and `tool_use`; empty for one template."""
        self.copies = isinstance(source, str) and only_copies(source)
        """Whether the first way of the module's docstring is right."""
        self.guarded = _any_of({*control_ids, *self._tags_beside_data()})
        """What data must not spell: control tokens, and the tags in which the template encloses
        data."""
        self._hidden = re.compile(f"{self.guarded.pattern}|[{_OPEN}{_CLOSE}{_TURN}]")
        self._skeletons: dict[tuple[Any, ...], Skeleton] = {}
        self._ends: dict[tuple[str, ...], str] = {}

    # ---------------------------------------------------------------------------------- one render

    def render(self, messages: list[Message], tools: Tools = None, opens: bool = True) -> str:
        """Render a conversation. `opens`: up to the point where the agent speaks."""
        # A tool's result belongs to a conversation with tools, also where they are not at hand.
        results = any(m["role"] not in ("system", "user", "assistant") for m in messages)
        purpose = "tool_use" if results and "tool_use" in self.purposes else None
        before = sys.gettrace()
        sys.settrace(_in_time())
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=purpose,
                tools=tools,
                add_generation_prompt=opens,
                tokenize=False,
                # Qwen3's template then opens each turn with an empty thought. Thinking would use up
                # a turn of a few hundred tokens. Other templates ignore the argument.
                enable_thinking=False,
                strftime_now=self._now.strftime,
            )
        except Exception as error:  # a template is a program that came with the model
            raise ConfigError(
                f"the chat template of {self.model} cannot be rendered "
                f"({type(error).__name__}: {first_line(error)}); use an instruct model with "
                "another template",
                code="broken_template",
            ) from None
        finally:
            sys.settrace(before)

    @property
    def model(self) -> str:
        """The model's name, for messages."""
        return repr(getattr(self.tokenizer, "name_or_path", "?"))

    def _tags_beside_data(self) -> set[str]:
        """Find each literal `<...>` that the template puts directly before or after a content."""
        tags: set[str] = set()
        for roles in (
            ("user", "assistant"),
            ("system", "user"),
            ("user", "assistant", "tool", "tool"),
        ):
            messages = [{"role": role, "content": _placeholder(i)} for i, role in enumerate(roles)]
            with contextlib.suppress(ConfigError):  # a template may refuse a role
                for pair in _BESIDE_DATA.findall(self.render(messages)):
                    tags.update(tag for tag in pair if tag)
        return tags

    # ----------------------------------------------------------------------------------- skeletons

    def prompt(self, messages: list[Message], tools: Tools = None) -> Skeleton:
        """Return the skeleton of a conversation up to the point where the agent speaks."""
        return self._filled(messages, tools, None)

    def continuation(
        self, messages: list[Message], tools: Tools = None, calls: Sequence[str] = ()
    ) -> Skeleton:
        """Return the skeleton of what follows an agent's turn, from the token that ends the turn.

        `calls`: names of the calls that `messages` answer.
        """
        answers = any(m["role"] not in ("system", "user", "assistant") for m in messages)
        if not (answers and self.needs_call):
            return self._filled(messages, tools, ())
        names = [name or "unknown" for name in calls] or [m.get("name", "tool") for m in messages]
        return self._filled(messages, tools, tuple(names))

    def _filled(
        self, messages: list[Message], tools: Tools, calls: tuple[str, ...] | None
    ) -> Skeleton:
        """Return a skeleton. `calls`: of the turn that the messages answer; None for a prompt."""
        contents = [str(message["content"]) for message in messages]
        roles = tuple(message["role"] for message in messages)
        key = (roles, json.dumps(tools) if tools else None, calls)
        if key not in self._skeletons:
            self._skeletons[key] = self._shape(messages, tools, calls)
        parts, spelled = self._skeletons[key]
        copied = parts, [*spelled, *contents]
        # Not if a content is empty: `content or ''` is a copy, `if content` is not.
        if self.copies and all(contents):
            return copied
        shown, texts = self._hide_tools(tools)
        marked = [self._hide(content, texts) for content in contents]
        try:
            rendered = self._render_parts(messages, marked, shown, calls)
        except ConfigError:  # a template may refuse a text, and a page must not end an episode
            return copied
        # Changed by the template, a content could become a control token: `<|IM_END|>` in lower case.
        # A twin without letters cannot; it only shows which turns the template leaves out.
        if _controls(rendered) != _controls(parts):
            twins = [re.sub(r"\S", "-", content) for content in contents]
            try:
                twin = self._render_parts(messages, twins, shown, calls)
            except ConfigError:
                return copied
            if _controls(rendered) != _controls(twin):
                return copied
        return rendered, texts

    def _hide(self, text: str, texts: list[str]) -> str:
        """Put a placeholder for each control token or tag in `text`, and append it to `texts`."""

        def mark(match: re.Match[str]) -> str:
            texts.append(match[0])
            return _placeholder(len(texts) - 1)

        return self._hidden.sub(mark, text)

    def _hide_tools(self, tools: Tools) -> tuple[Tools, list[str]]:
        """Hide what a tool says about itself: it may be somebody else's."""
        texts: list[str] = []
        if not tools:
            return None, texts
        return json.loads(self._hide(json.dumps(tools, ensure_ascii=False), texts)), texts

    def _shape(
        self, messages: list[Message], tools: Tools, calls: tuple[str, ...] | None
    ) -> Skeleton:
        """Return the skeleton with a placeholder for each content. The tools' come first.

        Raises ConfigError for a template that drops a message or the tools.
        """
        shown, texts = self._hide_tools(tools)
        marks = [_placeholder(len(texts) + i) for i in range(len(messages))]
        parts = self._render_parts(messages, marks, shown, calls)
        text = "".join(part for part in parts if isinstance(part, str))
        for i, mark in enumerate(marks):
            if mark not in text:
                raise ConfigError(
                    f"the chat template drops message {i} (role {messages[i]['role']!r})",
                    code="template_drops_messages",
                )
        if shown and calls is None:
            bare = self.render(
                [m | {"content": mark} for m, mark in zip(messages, marks, strict=True)]
            )
            for tool in shown:
                name = tool["function"]["name"]
                if text.count(name) <= bare.count(name):
                    raise ConfigError(
                        f"the chat template of {self.model} does not show the tools to the model; "
                        "use a model whose template does, describe them in the prompt "
                        "(env.name=react), or use none (env.tools=[])",
                        code="template_shows_no_tools",
                    )
        return parts, texts

    def _render_parts(
        self,
        messages: list[Message],
        contents: list[str],
        tools: Tools,
        calls: tuple[str, ...] | None,
    ) -> list[int | str]:
        """Render messages with these contents, and split the text at its control tokens."""
        messages = [m | {"content": text} for m, text in zip(messages, contents, strict=True)]
        if calls is None:
            return self._split(self.render(messages, tools))
        return self._split(self.tail(messages, tools, calls))

    def _split(self, text: str) -> list[int | str]:
        parts: list[int | str] = []
        start = 0
        for match in self._control.finditer(text):
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self.control_ids[match[0]])
            start = match.end()
        return parts + ([text[start:]] if start < len(text) else [])

    # --------------------------------------------------------------------------- after a turn

    def tail(self, messages: list[Message], tools: Tools, calls: Sequence[str] = ()) -> str:
        """Render what follows an agent's turn, from the token that ends the turn.

        With `calls`, the turn has these calls in structured form, and the messages are their
        results. Raises ConfigError if the template cannot be cut there.
        """
        # The turn is rendered in a conversation of one question; `template_probe.py` compares with
        # longer ones.
        turn = self.recorded(calls) if calls else {"role": "assistant", "content": _TURN}
        asked = [{"role": "user", "content": "?"}, turn]
        whole = asked + _results_of(calls, messages)
        try:
            _, mark, after = self.render(whole, tools).rpartition(_TURN)
        except ConfigError:
            self._refuse_parts()
            raise
        if not mark:
            self._refuse_parts()
            raise ConfigError(
                f"the chat template of {self.model} drops the agent's turn; use an instruct model "
                "with another template",
                code="template_drops_messages",
            )
        if not calls:
            return after
        # After a call's arguments come brackets and tags; the turn ends with the last control token
        # that is there, whatever follows.
        alone = self._alone(tuple(calls))
        shared = os.path.commonprefix([alone, after])
        ends = [match.start() for match in self._control.finditer(shared)]
        start = len(alone) if self.left_open else max(ends, default=len(alone))
        return after[start:]

    def _refuse_parts(self) -> None:
        """Raise ConfigError if contents are lists of texts and images for this template."""
        part = {"type": "text", "text": _TURN}
        parts = [{"role": role, "content": [part]} for role in ("user", "assistant")]
        text = ""
        with contextlib.suppress(ConfigError):
            text = self.render(parts, opens=False)
        if text.count(_TURN) == 2:
            raise ConfigError(
                f"the chat template of {self.model} reads a content as a list of texts and images, "
                "and the contents here are texts; use a model for text",
                code="template_needs_parts",
            )

    def _alone(self, calls: tuple[str, ...]) -> str:
        """Render the end of a turn that nothing follows."""
        if calls not in self._ends:
            turn = self.recorded(calls) if calls else {"role": "assistant", "content": _TURN}
            asked = [{"role": "user", "content": "?"}, turn]
            self._ends[calls] = self.render(asked, opens=False).rpartition(_TURN)[2]
        return self._ends[calls]

    @cached_property
    def left_open(self) -> bool:
        """Whether no token of its own ends a turn, only the next role's token (GLM)."""
        return self._control.search(self._alone(())) is None

    @cached_property
    def needs_call(self) -> bool:
        """Whether a result looks another way after a call in structured form than after text.

        Some templates refuse a result without such a call, others write the tool's name from it.
        """
        result = [{"role": "tool", "content": _placeholder(0)}]
        tails: list[str | None] = []
        for calls in ((), ("probe",)):
            try:
                text = self.tail(result, None, calls)
            except ConfigError:
                text = ""
            tails.append(text if _placeholder(0) in text else None)
        plain, recorded = tails
        return recorded is not None and recorded != plain

    def results(self, messages: list[Message], calls: Sequence[str]) -> list[Message]:
        """Return `messages` in the form in which the template reads the results of `calls`."""
        return _results_of(calls if self.needs_call else (), messages)

    def recorded(self, names: Sequence[str], arguments: Any = None) -> Message:
        """Return the agent's turn with calls of these names, in the form that the template reads.

        The sampled ids stay: only what follows the turn is used. So stand-ins serve as arguments,
        because a template may fail at odd ones.
        """
        names = [self._hidden.sub("", name) for name in names]
        return _turn_with_calls(names, arguments or {"value": _TURN}, *self._call_form)

    @cached_property
    def _call_form(self) -> tuple[str | None, bool]:
        """The content next to a call, and whether its arguments are JSON text."""
        # The first is what the documentation of `transformers` shows. DeepSeek's templates need
        # text, and no content.
        for form in (("", False), (None, False), ("", True), (None, True)):
            turn = _turn_with_calls(["probe"], {"value": _TURN}, *form)
            with contextlib.suppress(ConfigError):
                if _TURN in self.render([{"role": "user", "content": "?"}, turn], opens=False):
                    return form
        return "", False


def _turn_with_calls(
    names: Sequence[str], arguments: dict[str, Any], content: str | None, as_text: bool
) -> Message:
    """Write an agent's turn in OpenAI's form."""
    calls = []
    for number, name in enumerate(names):
        function = {
            "name": name,
            "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
        }
        calls.append({"id": _call_id(number), "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _controls(parts: list[int | str]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


def _placeholder(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # nine letters and digits, as Mistral's templates require


def _results_of(calls: Sequence[str], messages: list[Message]) -> list[Message]:
    """Write messages as the results of structured calls of these names, in order."""
    results = []
    for number, message in enumerate(messages):
        if number < len(calls) and message["role"] not in ("system", "user", "assistant"):
            mine = {"role": "tool", "name": calls[number], "tool_call_id": _call_id(number)}
            message = message | mine
        results.append(message)
    return results
