"""Run user-defined worlds: the base of plain classes (`class_env.py`) and of recipes/openenv.

In: the agent's turns, with calls as in `hermes.py`. Out: observations and the world's rewards.
Calls change the world, and the world decides when it is over. A turn without a call ends the
episode, and so does an answer.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Awaitable, Iterable
from typing import Any

from agent_r1.core import Action, Observation, Outcome, Row, StepResult, StopReason
from agent_r1.env.base import BaseToolEnv
from agent_r1.env.hermes import HERMES
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.tool.base import BaseTool, ToolCall, valid_unicode


class WorldEnv(BaseToolEnv):
    """Tools that act on one world. A subclass adds the tools and the rewards."""

    dialect = HERMES
    stateful = True
    broken: str | None = None
    """Why the world's state is unknown: a method or server did not return.

    The episode then fails.
    """

    def add_tools(self, tools: Iterable[BaseTool], owner: str) -> None:
        """Add `tools` of this episode to the configured ones.

        Raise ConfigError for two of one name.
        """
        for tool in map(copy.copy, tools):  # copies share the schema, which is slow to compile
            if tool.name in self.tools:
                raise ConfigError(
                    f"{owner} and env.tools both have a tool {tool.name!r}; rename or remove one "
                    "of them",
                    code="tool_name_taken",
                )
            tool.env = self
            self.tools = self.tools | {tool.name: tool}

    def first(self, row: Row, text: str | None) -> Observation:
        """Make the first observation: the row's prompt, the world's text, and all tools."""
        self.row = row
        prompt = [dict(message) for message in row["prompt"]]
        text = valid_unicode(text or "")
        if text:
            most = self.config.tool_max_chars
            if len(text) > most:
                text = f"{text[:most]} [cut off: {len(text)} characters]"
            *before, last = prompt or [{"role": "user", "content": ""}]
            prompt = [*before, last | {"content": f"{last['content']}\n{text}".lstrip("\n")}]
        return self.dialect.first_observation(prompt, self.tools)

    def stop(self, text: str, calls: list[ToolCall]) -> StopReason | None:
        if not calls or self.dialect.answer_in(text)[0] is not None:
            return StopReason.ANSWERED
        return None

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        if self.broken:
            raise AgentR1Error(self.broken, code="broken_world")
        return result

    def outcome(self, stop_reason: StopReason) -> Outcome | Awaitable[Outcome]:
        return Outcome(metrics=self.calls_by_tool())  # no exact match: a world pays for actions

    def answer(self) -> str:
        """Return the agent's last answer: the text in <answer> tags, or the plain text."""
        last = self.final_turn or ""
        plain = "".join(
            part.text for part in self.dialect.parts(last) if part.kind == "text"
        ).strip()
        return self.dialect.answer_in(last)[0] or plain

    @staticmethod
    def facts(row: Row) -> dict[str, Any]:
        """Collect what a world may know of its task.

        `question`, `answer`, `answers`, `seed`, and all keys of `extra_info`, its `metadata` and
        `env_kwargs`. The seed is the question's, so that all samples of a group start in the same
        state and can be compared.
        """
        extra = row.get("extra_info") or {}
        own = row.get("env_kwargs") or {}
        question = ""
        if len(row["prompt"]):
            question = row["prompt"][-1]["content"]
        answers = list((row.get("reward_model") or {}).get("ground_truth") or [])
        facts = {
            "question": question,
            "answer": answers[0] if answers else None,
            "answers": answers,
            "seed": zlib.crc32(f"{extra.get('index')}/{question}".encode()),
        }
        facts |= extra | (extra.get("metadata") or {}) | own
        return {
            name: value
            for name, value in facts.items()
            if value is not None and name not in ("metadata", "tools")
        }
