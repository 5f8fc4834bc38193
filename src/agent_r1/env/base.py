"""Run an environment in which the agent calls tools until it answers.

In: the agent's turns. Out: observations and rewards. Next: `hermes.py` reads and writes the turns.

A call may earn a reward here (`process_reward`), an answer in `questions.py`. `rollout/episode.py`
drives the environment.

The loop asks for the outcome exactly once, however the episode ended: also after a tool result or
at a full context. So a failed episode never looks like a good one, and the outcome always has an
action to be paid to.
"""

from __future__ import annotations

import asyncio
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agent_r1.config.settings import EnvConfig
from agent_r1.core import (
    INVALID,
    Action,
    AgentEnv,
    Message,
    Observation,
    Row,
    StepResult,
    StopReason,
)
from agent_r1.env.dialect import Dialect
from agent_r1.tool.base import BaseTool, ToolCall, ToolResult, call_tool

CALL_NAME = re.compile(r"[\w.-]{1,64}")
"""Names of calls that a chat template gets to see; others are shown as unknown."""


class BaseToolEnv(AgentEnv):
    """An `AgentEnv` (core.py) with tools."""

    stateful = False
    """Whether calls change a world. If so, the calls of a turn run one after the other, also in the
    last allowed turn. The episode ends when a call sets `over`."""
    over = False
    dialect = Dialect()
    """The form of turns."""

    def __init__(self, tools: dict[str, BaseTool], config: EnvConfig):
        self.tools, self.config = tools, config
        self.turns = self.tool_calls = self.invalid_in_a_row = 0
        self.final_turn: str | None = (
            None  # text of the turn with which the agent ended the episode
        )
        self.calls: list[dict] = []  # all calls so far, as recorded in rollouts
        self._paid: set[str] = set()  # calls already rewarded

    # ---------------------------------------------------------------------- what a subclass decides

    def extract_tool_calls(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn in order. A call that cannot be parsed is included, with its
        `error` set."""
        return self.dialect.calls(text, self.tools)

    def format_tool_response(
        self, calls: list[ToolCall], results: list[ToolResult]
    ) -> list[Message]:
        """Return the messages that show the results to the agent."""
        return self.dialect.responses(calls, results, self.tools)

    def stop(self, text: str, calls: list[ToolCall]) -> StopReason | None:
        """Return why this turn ends the episode, or None. By default a turn without a call is the
        answer."""
        return None if calls else StopReason.ANSWERED

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        """Return the reward of one call.

        By default a successful call earns `env.call_reward`, an invalid call loses it, and a failed
        call earns 0.
        """
        if result.error in INVALID:
            return -self.config.call_reward
        if not result.ok:
            return 0.0
        asked = json.dumps([call.name, _plain(call.arguments)], sort_keys=True)
        if asked in self._paid:  # a repeated call finds nothing new and must not pay
            return 0.0
        self._paid.add(asked)
        return self.config.call_reward

    # ---------------------------------------------------------------------------------- the episode

    def reset(self, row: Row) -> Observation:
        self.row = row
        return self.dialect.first_observation(row["prompt"], self.tools)

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        if action.finish_reason == "length":
            # A call in a cut-off turn may look complete and still lack what the agent meant to add.
            return _done(StopReason.MAX_TOKENS)
        calls = self.extract_tool_calls(action.text)
        if (reason := self.stop(action.text, calls)) is not None:
            self.final_turn = action.text
            return _done(reason)
        last = self.turns >= self.config.max_turns
        if last and not self.stateful:
            # No turn is left in which the agent could use the result.
            return _done(StopReason.MAX_TURNS)
        if self.tool_calls + len(calls) > self.config.max_tool_calls:
            return _done(StopReason.TOOL_BUDGET)
        self.tool_calls += len(calls)
        results = await self.execute(calls)
        call_rewards = [
            (len(action.text) if c.end is None else c.end, self.process_reward(c, r))
            for c, r in zip(calls, results, strict=True)
        ]
        info = {"tool_calls": [_record(c, r) for c, r in zip(calls, results, strict=True)]}
        self.calls += info["tool_calls"]
        longest = 0
        for result in results:
            invalid = result.error in INVALID
            self.invalid_in_a_row = self.invalid_in_a_row + 1 if invalid else 0
            longest = max(longest, self.invalid_in_a_row)
        ends = {
            StopReason.ANSWERED: self.over,
            StopReason.INVALID_CALLS: longest >= self.config.max_invalid_calls,
            StopReason.MAX_TURNS: last,
        }
        if reason := next((reason for reason, true in ends.items() if true), None):
            return _done(reason, call_rewards, info)
        # A name that the agent invented may be anything: a template writes it into a header.
        names = [call.name if CALL_NAME.fullmatch(call.name) else "" for call in calls]
        observation = Observation(self.format_tool_response(calls, results), calls=names)
        return StepResult(
            observation,
            sum(reward for _, reward in call_rewards),
            info=info,
            call_rewards=call_rewards,
        )

    async def execute(self, calls: list[ToolCall]) -> list[ToolResult]:
        """Run the calls of one turn: concurrently, or in order if `stateful`."""
        limits = self.config.tool_timeout_s, self.config.tool_max_chars
        if not self.stateful:
            return await asyncio.gather(*(call_tool(self.tools, call, *limits) for call in calls))
        unheard = ToolResult(
            "error: not run, because the call before it ended the episode", ok=False
        )
        return [
            unheard if self.over else await call_tool(self.tools, call, *limits) for call in calls
        ]

    def calls_by_tool(self) -> dict[str, float]:
        """Count the successful calls of each tool, if there are several tools."""
        called = Counter(call["name"] for call in self.calls if call["ok"])
        return (
            {f"calls/{name}": float(called[name]) for name in self.tools}
            if len(self.tools) > 1
            else {}
        )


def _done(
    reason: StopReason, call_rewards: Sequence[tuple[int, float]] = (), info: dict | None = None
) -> StepResult:
    reward = sum(reward for _, reward in call_rewards)
    return StepResult(
        None,
        reward,
        done=True,
        stop_reason=reason,
        info=info or {},
        call_rewards=list(call_rewards),
    )


def _record(call: ToolCall, result: ToolResult) -> dict:
    return {
        "name": call.name,
        "arguments": call.arguments,
        "ok": result.ok,
        "error": result.error,
        "seconds": round(result.seconds, 6),
        "content": result.content,
        **(
            {"at": result.data["at"]} if result.data.get("at") else {}
        ),  # where the tool's code failed
    }


def _plain(value: Any) -> Any:
    """Normalise arguments: case, blanks, invisible characters and surrounding punctuation make no
    new call."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    text = unicodedata.normalize("NFKC", value).casefold()
    return "".join(c for c in text if unicodedata.category(c)[0] not in "ZC").strip(
        string.punctuation
    )
