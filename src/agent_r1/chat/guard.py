"""Keep the words next to the contents from becoming control tokens: roles, names, tools' schemas.

In: what `template.py` renders. Out: the same, or a refusal. Next: `study.py` studies
each model's template with this guard.

`template.py` hides control tokens in contents. A template prints more than those: the role of a
message, the name of a call, the keys of a schema. Rows, models and servers of others fill them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1.chat.template import Calls, Skeleton, Template, Tools, placeholder
from agent_r1.core import Message
from agent_r1.ground.errors import AgentR1Error, ConfigError

SCHEMA_WORDS = {
    "type", "function", "name", "description", "parameters", "properties", "required", "items",
    "enum", "default", "title", "format", "string", "number", "integer", "boolean", "object",
    "array", "null", "anyOf", "allOf", "oneOf", "additionalProperties", "nullable", "const",
    "return", "strict",
}  # fmt: skip
"""Words of a tool's schema by which templates decide what to write."""


class GuardedTemplate(Template):
    """A chat template whose roles, names and tools come from others."""

    def continuation(
        self, messages: list[Message], tools: Tools = None, calls: Sequence[str] = ()
    ) -> Skeleton:
        """Return the skeleton as `Template` does, with plain names of calls."""
        copies: list[Message] = []
        for message in messages:
            has_name = "name" in message
            copies.append(message | {"name": self._plain(message["name"])} if has_name else message)
        return super().continuation(copies, tools, [self._plain(name) for name in calls])

    def _plain(self, name: Any) -> str:
        """Return a call's name without control tokens: a model may have made it up."""
        name = str(name)
        if self.hidden.search(name):
            # To cut a token out could join the rest to another token.
            name = re.sub(r"[^\w.-]", "-", name)
        return "unknown" if self.hidden.search(name) else name

    def _fill_skeleton(self, messages: list[Message], tools: Tools, calls: Calls) -> Skeleton:
        """Refuse a role that spells a control token; pass on no other key.

        What a template prints of such a key would be the template's own text.
        """
        for role in [message["role"] for message in messages]:
            if self.hidden.search(role):
                raise ConfigError(
                    f"a message has the role {role[:40]!r}, which spells a control token of "
                    f"{self.model}; use a role such as system, user, assistant or tool",
                    code="template_role",
                )
        bare: list[Message] = [{"role": m["role"], "content": m["content"]} for m in messages]
        return super()._fill_skeleton(bare, tools, calls)

    def _hide_tools(self, tools: Tools) -> tuple[Tools, list[str]]:
        """Hide what a tool says about itself, in the decoded texts.

        As JSON, `<|"|>` has backslashes, and would not be found.
        """
        texts: list[str] = []
        if not tools:
            return None, texts
        return map_texts(tools, lambda text: self._hide(text, texts)), texts

    def _shape(self, messages: list[Message], tools: Tools, calls: Calls) -> Skeleton:
        """Return the skeleton, and refuse tools whose words become control tokens in it."""
        parts, texts = super()._shape(messages, tools, calls)
        if tools:
            copies: list[Message] = []
            for number, message in enumerate(messages, len(texts)):
                copies.append(message | {"content": placeholder(number)})
            self._check_tools(copies, tools, calls, parts)
        return parts, texts

    def _check_tools(
        self, messages: list[Message], tools: Tools, calls: Calls, parts: list[int | str]
    ) -> None:
        """Raise AgentR1Error if a tool's words become a control token or a tag, or could.

        Templates write `<` and `>` around the name of a parameter, or a type in capitals. So
        `parts` are compared with those of a twin, in which numbers stand for all words but those
        of JSON schemas.
        """
        numbers: dict[str, str] = {}

        def number_of(text: str) -> str:
            is_ours = not text or text in SCHEMA_WORDS
            return text if is_ours else numbers.setdefault(text, f"-{len(numbers)}-")

        # A template may need a parameter's name: then only its other words are numbers.
        for keys in (True, False):
            try:
                twin = self._parts(messages, map_texts(tools, number_of, keys), calls)
            except ConfigError:
                continue
            if self._signs(twin) == self._signs(parts):
                return
            break
        raise AgentR1Error(
            f"the chat template of {self.model} makes a control token or a tag of its own of a "
            "tool's words, or takes no other words for a comparison; rename the tool and its "
            "parameters, or leave it out of env.tools",
            code="template_reads_tool",
        )

    def _signs(self, parts: list[int | str]) -> list[int | str]:
        """Return the control tokens of rendered parts, and the tags of the template."""
        signs: list[int | str] = []
        for part in parts:
            signs += [part] if isinstance(part, int) else self.guard_pattern.findall(part)
        return signs


def map_texts(value: Any, change: Callable[[str], str], keys: bool = True) -> Any:
    """Change all texts of a JSON value, `keys` included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        result: dict[str, Any] = {}
        for key, entry in value.items():
            result[change(str(key)) if keys else str(key)] = map_texts(entry, change, keys)
        return result
    if isinstance(value, list | tuple):
        return [map_texts(entry, change, keys) for entry in value]
    return value
