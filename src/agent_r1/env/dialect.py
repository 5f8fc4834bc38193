"""Define how an agent's turns are written and read.

In: a turn of the agent, or the results of its calls. Out: parts, calls, an answer; messages for the
agent. Next: `base.py` plays an episode in a dialect; screens and demonstrators use it too. Read
`hermes.py` first.

A dialect has no state: one object serves all episodes. Its input is model output, so nothing here
may raise. A call that cannot be parsed becomes a `ToolCall` with an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agent_r1.core import Message, Observation
from agent_r1.tool.base import BaseTool, ToolCall, ToolResult


@dataclass(frozen=True)
class Part:
    """A part of a turn."""

    kind: Literal["text", "think", "tool_call", "answer"]
    text: str
    closed: bool = True
    end: int = 0  # after its closing tag, in characters of the turn


class Dialect:
    """The form of turns. By default plain text: no calls, no marked answer."""

    # ---------------------------------------------------------------------------------- the episode

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        """Return the calls of a turn in order.

        A call that cannot be parsed is included, with its `error` set.
        """
        return []

    def responses(
        self, calls: list[ToolCall], results: list[ToolResult], tools: dict[str, BaseTool]
    ) -> list[Message]:
        """Return messages that show the results.

        By default, the chat template wraps each message of role `tool`.
        """
        return [{"role": "tool", "content": result.content} for result in results]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        """Return the answer in a turn, or None, and whether the turn is well formed."""
        return None, False

    @staticmethod
    def escape(text: str, *words: str) -> str:
        """Insert a blank after the first character of each of `words`.

        A result then cannot forge them. For delimiters that may be ordinary text in a vocabulary.
        Control tokens are left to `chat/format.py`.
        """
        for word in words:
            text = text.replace(word, f"{word[0]} {word[1:]}")
        return text

    # ------------------------------------------------------------------------ the first observation

    describes_format = False
    """Whether the dialect tells the agent how to think and answer (`system_prompt`, or its
    channels). Then the task does not."""

    def system_prompt(self, tools: dict[str, BaseTool]) -> str | None:
        """Return the system message on calls and answers.

        None: the chat template shows the tools.
        """
        return None

    def first_observation(
        self, prompt: Sequence[Message], tools: dict[str, BaseTool]
    ) -> Observation:
        """Make the first observation from `prompt` and `tools`."""
        instructions = self.system_prompt(tools)
        if instructions is None:
            return Observation(list(prompt), tools=[tool.schema() for tool in tools.values()])
        messages = list(prompt)
        if messages and messages[0]["role"] == "system":
            instructions = f"{messages.pop(0)['content']}\n\n{instructions}"
        return Observation([{"role": "system", "content": instructions}, *messages])

    # ----------------------------------------------------------------------------------- the tokens

    control_tokens: Sequence[str] = ()
    """Control tokens of the dialect. A model without them cannot use it."""

    @property
    def tag_words(self) -> frozenset[str]:
        """The dialect's own tags, which a turn may have."""
        return frozenset(self.control_tokens)

    def tag_places(self, turn: str) -> list[tuple[int, int]]:
        """Return begin and end of each tag that gives a turn its form, in characters.

        The same words inside of a call's arguments or of a thought are data.
        """
        return []

    def end_token(self, turn: str) -> str | None:
        """Return the control token that ends this turn; None: the chat template's."""
        return None

    # ---------------------------------------------------------------------------------- a server

    tool_parser: str | None = None
    """vLLM's parser of these calls (`--tool-call-parser`).

    None: a served model leaves its calls in the text.
    """
    tool_parser_needs: Sequence[str] = ()
    """Control tokens without which vLLM refuses that parser."""
    reasoning_parser: str | None = None
    """vLLM's parser of these thoughts (`--reasoning-parser`), so that it runs no call in them."""

    # ----------------------------------------------------------------------- screens, demonstrators

    partial_tag = re.compile(r"<[/|]?[a-z_]*\|?\Z")
    """The end of a streaming turn that may be the start of a tag: hidden until complete."""

    def parts(self, text: str) -> list[Part]:
        """Split a turn, possibly incomplete, for display. Text before `partial_tag` only grows."""
        return [Part("text", text)]

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str | None:
        """Write a turn with this call or answer; None if the dialect cannot."""
        return message if isinstance(message, str) else None
