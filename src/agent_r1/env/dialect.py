"""How an agent's turns are written and read, whatever they are worth.

In: a turn of the agent, or the results of its calls. Out: parts, calls, an answer; messages for the agent. Next: `calls.py`
plays an episode in a dialect, and screens and demonstrators speak it.

A dialect has no state: one object serves all episodes. `hermes.py` is the first to read. Everything here reads what a model
wrote, so nothing may raise: a call that cannot be read becomes a `ToolCall` with an error.
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
    """A stretch of a turn."""

    kind: Literal["text", "think", "tool_call", "answer"]
    text: str
    closed: bool = True
    end: int = 0
    """After its closing tag, in characters of the turn."""


class Dialect:
    """The form of turns. By default plain text: no calls, no marked answer."""

    # ------------------------------------------------------------------------------------------- the episode

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        """The calls in a turn, in order. A call that cannot be parsed is returned too, with its `error` set."""
        return []

    def responses(self, calls: list[ToolCall], results: list[ToolResult], tools: dict[str, BaseTool]) -> list[Message]:
        """What the agent sees of the results. By default the chat template wraps each message of role `tool`."""
        return [{"role": "tool", "content": result.content} for result in results]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        """The answer in a turn (None: there is none), and whether all of the turn is as a last one should be."""
        return None, False

    @staticmethod
    def escape(text: str, *words: str) -> str:
        """`text` with a blank after the first character of each of `words`, so that a result cannot spell the end of results.

        For words that a dialect writes next to data and a vocabulary may have as ordinary text; control tokens are the business of
        `rollout/chat_format.py`.
        """
        for word in words:
            text = text.replace(word, f"{word[0]} {word[1:]}")
        return text

    # -------------------------------------------------------------------------------------- the first observation

    describes_format = False
    """Whether the dialect itself tells the agent how to think and answer (`system_prompt`, or its channels). Then the task
    does not."""

    def system_prompt(self, tools: dict[str, BaseTool]) -> str | None:
        """The system message on calls to `tools` and on the answer. None: the chat template shows the tools."""
        return None

    def first_observation(self, prompt: Sequence[Message], tools: dict[str, BaseTool]) -> Observation:
        """The first observation: `prompt` and `tools`, as this dialect shows them."""
        if (added := self.system_prompt(tools)) is None:
            return Observation(list(prompt), tools=[tool.schema() for tool in tools.values()])
        system = [message["content"] for message in prompt[:1] if message["role"] == "system"]
        return Observation([{"role": "system", "content": "\n\n".join([*system, added])}, *prompt[len(system) :]])

    # ------------------------------------------------------------------------------------------------- the tokens

    control_tokens: Sequence[str] = ()
    """Control tokens in which the dialect is spoken: a model without them cannot speak it."""

    def end_token(self, turn: str) -> str | None:
        """The control token that ends this turn; None: the one that the chat template writes."""
        return None

    # ------------------------------------------------------------------------------------- screens, demonstrators

    partial_tag = re.compile(r"<[/|]?[a-z_]*\|?\Z")
    """The end of a turn that still streams, where it may yet become a mark of the dialect: hidden until complete."""

    def parts(self, text: str) -> list[Part]:
        """A turn, or as much of it as came, as a person is shown it. Text before `partial_tag` only grows."""
        return [Part("text", text)]

    def write_turn(self, said: ToolCall | str, thought: str = "") -> str | None:
        """A turn that makes this call, or answers so; None where the dialect has no form for it."""
        return said if isinstance(said, str) else None


HOOKS = (
    "answer_in",
    "describes_format",
    "system_prompt",
    "control_tokens",
    "end_token",
    "partial_tag",
    "parts",
    "write_turn",
)
"""What an environment may define itself instead of in a dialect (`BaseToolEnv`)."""
