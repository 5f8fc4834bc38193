"""Find out what a chat template needs, by reading and rendering it once.

In: a tokenizer. Out: a `StudiedTemplate`, the one answer to what this template is. `load_chat`
makes it once, and the chat format holds it. Next: the training loop renders with it; `probe.py` and
`fit.py` write turns as the template wants them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

from agent_r1.chat.guard import GuardedTemplate
from agent_r1.chat.renderer import renderer_of
from agent_r1.chat.template import NOW, OUR_SOURCES, TURN, Template, placeholder
from agent_r1.core import Message
from agent_r1.ground.errors import ConfigError

QUESTION: Message = {"role": "user", "content": "?"}


def check_tools(template: Template) -> None:
    """Raise ConfigError if the template does not show tools to the model."""
    name = "probe_shown"
    parameters = {"type": "object", "properties": {}}
    tool = {"name": name, "description": "A tool.", "parameters": parameters}
    if name not in template.render([QUESTION], [{"type": "function", "function": tool}]):
        raise ConfigError(
            f"the chat template of {template.model} does not show the tools to the model; use a "
            "model whose template does, describe them in the prompt (env.name=react), or use none "
            "(env.tools=[])",
            code="template_shows_no_tools",
        )


class StudiedTemplate(GuardedTemplate):
    """A template of which is known how it writes turns with calls, and their results."""

    def __init__(self, tokenizer: Any):
        """Study the template. Raises ConfigError if it reads no texts."""
        super().__init__(tokenizer)
        self._turn_ends: dict[tuple[str, ...], str] = {}
        self._refuse_parts()
        if isinstance(self.source, str) and self.source not in OUR_SOURCES:
            self.copies = renderer_of(self.source, NOW).only_copies()
        self._form = self._find_form()
        self.lacks_end_token = self.control.search(self._alone(())) is None
        """Whether no token of its own ends a turn, only the next role's token (GLM)."""
        self.needs_call = self._is_changed_by_call()
        """Whether a result looks another way after a call in structured form than after text.

        Some templates refuse a result without such a call, others write the tool's name from it.
        """
        if self.needs_call:
            self.record = self._write_record

    # ------------------------------------------------------------------------------- what it needs

    def _is_changed_by_call(self) -> bool:
        """Render a result after text and after a call, and compare."""
        result = [{"role": "tool", "content": placeholder(0)}]
        turn = {"role": "assistant", "content": TURN}
        plain = self._after([QUESTION, turn, *result], "")
        conversation, turn_end = self._write_record(result, ["probe"])
        after_record = self._after(conversation, turn_end)
        return after_record is not None and after_record != plain

    def _after(self, conversation: list[Message], turn_end: str) -> str | None:
        """Render what follows the turn; None if the template refuses or drops the result."""
        text = ""
        with contextlib.suppress(ConfigError):
            text = self.render(conversation).rpartition(TURN)[2]
        return text.removeprefix(turn_end) if placeholder(0) in text else None

    def _refuse_parts(self) -> None:
        """Raise ConfigError if contents are lists of texts and images for this template."""
        if not self._reads(TURN) and self._reads([{"type": "text", "text": TURN}]):
            raise ConfigError(
                f"the chat template of {self.model} reads a content as a list of texts "
                "and images, and the contents here are texts; use a model for text",
                code="template_needs_parts",
            )

    def _reads(self, content: Any) -> bool:
        messages = [{"role": role, "content": content} for role in ("user", "assistant")]
        with contextlib.suppress(ConfigError):
            return self.render(messages, opens=False).count(TURN) == 2
        return False

    # ---------------------------------------------------------------------------- a turn with calls

    def _write_record(
        self, messages: list[Message], names: Sequence[str]
    ) -> tuple[list[Message], str]:
        """Make a conversation of a turn with these calls and their results: `record`."""
        conversation = [
            QUESTION,
            self.turn_with_calls(names),
            *self.results_of_calls(messages, names),
        ]
        # After a call's arguments come brackets and tags; the turn ends with the last control token
        # that is there, whatever follows.
        alone = self._alone(tuple(names))
        with_reply = ""
        with contextlib.suppress(ConfigError):
            with_reply = self.render(conversation).rpartition(TURN)[2]
        common_prefix = os.path.commonprefix([alone, with_reply])
        ends = [match.start() for match in self.control.finditer(common_prefix)]
        if self.lacks_end_token or not ends:
            return conversation, alone
        return conversation, alone[: max(ends)]

    def _alone(self, names: tuple[str, ...]) -> str:
        """Render the end of a turn that nothing follows."""
        if names not in self._turn_ends:
            turn = self.turn_with_calls(names) if names else {"role": "assistant", "content": TURN}
            text = ""
            with contextlib.suppress(ConfigError):
                text = self.render([QUESTION, turn], opens=False)
            self._turn_ends[names] = text.rpartition(TURN)[2]
        return self._turn_ends[names]

    def turn_with_calls(
        self, names: Sequence[str], arguments: dict[str, Any] | None = None
    ) -> Message:
        """Write the agent's turn with calls of these names.

        The sampled ids stay: only what follows the turn is used. So stand-ins serve as arguments,
        because a template may fail at odd ones.
        """
        names = [self.hidden.sub("", name) for name in names]
        arguments = arguments or {"value": TURN}
        content, as_text = self._form
        if content:  # a template that writes no calls: the content stands for the turn
            content = str(next(iter(arguments.values())))
        return _write_turn(names, arguments, content, as_text)

    def _find_form(self) -> tuple[str | None, bool]:
        """Find the content next to a call, and whether its arguments are JSON text."""
        # The first is what the documentation of `transformers` shows. DeepSeek's templates need
        # text, and no content. The last is for templates that ask for a call and do not write it.
        for form in (("", False), (None, False), ("", True), (None, True), (TURN, False)):
            turn = _write_turn(["probe"], {"value": TURN}, *form)
            with contextlib.suppress(ConfigError):
                if TURN in self.render([QUESTION, turn], opens=False):
                    return form
        return "", False

    def results_of_calls(self, messages: list[Message], names: Sequence[str]) -> list[Message]:
        """Write messages as the results of structured calls of these names, in order."""
        result_messages = []
        for number, message in enumerate(messages):
            if number < len(names) and message["role"] not in ("system", "user", "assistant"):
                mine = {"role": "tool", "name": names[number], "tool_call_id": _call_id(number)}
                message = message | mine
            result_messages.append(message)
        return result_messages


def _write_turn(
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


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # nine letters and digits, as Mistral's templates require
