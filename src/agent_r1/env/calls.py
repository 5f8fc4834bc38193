"""Run tool calls in a dialect.

In: the agent's turns. Out: calls, results as messages, and the reward of each call (`env.call_reward`). Next:
`questions.py` pays for answers, `stateful_env.py` for actions.
"""

from __future__ import annotations

import json
import string
import unicodedata
from typing import Any

from agent_r1.config.settings import EnvConfig
from agent_r1.core import INVALID, Message
from agent_r1.env.base import BaseToolEnv
from agent_r1.tool.base import BaseTool, ToolCall, ToolResult


class ToolEnv(BaseToolEnv):
    """An environment whose calls and results are in `dialect`."""

    def __init__(self, tools: dict[str, BaseTool], config: EnvConfig):
        super().__init__(tools, config)
        self._paid: set[str] = set()  # calls already rewarded

    def extract_tool_calls(self, text: str) -> list[ToolCall]:
        return self.dialect.calls(text, self.tools)

    def format_tool_response(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        return self.dialect.responses(calls, results, self.tools)

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        if result.error in INVALID:
            return -self.config.call_reward
        asked = json.dumps([call.name, _plain(call.arguments)], sort_keys=True) if result.ok else ""
        if not result.ok or asked in self._paid:  # a repeated call finds nothing new and must not pay
            return 0.0
        self._paid.add(asked)
        return self.config.call_reward


def _plain(value: Any) -> Any:
    """Normalise arguments: case, blanks, invisible characters and surrounding punctuation make no new call."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    text = unicodedata.normalize("NFKC", value).casefold()
    return "".join(c for c in text if unicodedata.category(c)[0] not in "ZC").strip(string.punctuation)
