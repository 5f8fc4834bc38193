"""What the agent is told: the one place where prompts are written.

In: the name of a data set and a question. Out: the messages of a row's `prompt`. Next: the chat template, which puts the
tools' descriptions beside them. Chat and evaluation take the leading messages from the rows, so that a trained agent is
spoken to as in training.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_r1.types import Message

_THINK = "Think first, between <think> and </think>."
_ANSWER = (
    "When you know the answer, write it between <answer> and </answer>, as short as it can be: a name, a date, a number, "
    "yes or no."
)
INSTRUCTIONS = (
    f"You answer questions with the help of a search tool. {_THINK} Then search, and let what you read tell you what to "
    f"search for next: most questions take two searches or more. {_ANSWER}"
)
"""A model that has seen instructions before takes them; the laptop's tiny model knows its one task without any."""


def messages(dataset: str, question: str, system: str | None = None) -> list[Message]:
    """The prompt for `question`. Those of a published data set are all told the same; questions of one's own bring their
    `system` message, or none."""
    if dataset not in ("tinyhop", "rows"):
        system = INSTRUCTIONS
    lead = [{"role": "system", "content": system}] if system else []
    return [*lead, {"role": "user", "content": question}]


def instructions(tools: Iterable[str]) -> str:
    """For a model that has not been trained here, and brings no data set whose rows tell it what to do."""
    return INSTRUCTIONS if "search" in tools else f"You answer questions. {_THINK} {_ANSWER}"
