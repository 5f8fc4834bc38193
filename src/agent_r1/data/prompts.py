"""Write all prompts.

In: the name of a data set and a question. Out: the messages of a row's `prompt`. Next: the
environment, whose dialect adds the tools, by the chat template or in its own words. Chat and
evaluation take the leading messages from the rows, so that they match training.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent_r1.config import tables
from agent_r1.core import Message

_THINK = "Think first, between <think> and </think>."
_SHORT = "as short as it can be: a name, a date, a number, yes or no."
_ANSWER = f"When you know the answer, write it between <answer> and </answer>, {_SHORT}"
_SEARCH_HINT = (
    "let what you read tell you what to search for next: most questions take two searches or more."
)
INSTRUCTIONS = (
    f"You answer questions with the help of a search tool. {_THINK} Then search, and "
    f"{_SEARCH_HINT} {_ANSWER}"
)
"""For models that follow instructions; the laptop's tiny model knows its one task without any."""


def messages(
    dataset: str, question: str, system: str | None = None, describes_format: bool = False
) -> list[Message]:
    """Write the prompt for `question`.

    All questions of a published data set have the same system message; user-defined questions have
    their own `system` or none. `describes_format`: the dialect itself explains how to think and
    answer (`Dialect.describes_format`).
    """
    if tables.entry_of("data", dataset, "data.name").get("instructed", True):
        system = system or instructions(["search"], describes_format)
    prompt: list[Message] = []
    if system:
        prompt.append({"role": "system", "content": system})
    prompt.append({"role": "user", "content": question})
    return prompt


def instructions(tools: Iterable[str], describes_format: bool = False) -> str:
    """Write instructions for a model that was not trained here and has no rows."""
    searches = tables.any_entry_has("tool", tools, "index")
    if describes_format and searches:
        task = f"You answer questions with the help of a search tool; {_SEARCH_HINT}"
        return f"{task} Your answer is {_SHORT}"
    if describes_format:
        return f"You answer questions. Your answer is {_SHORT}"
    if searches:
        return INSTRUCTIONS
    return f"You answer questions. {_THINK} {_ANSWER}"
