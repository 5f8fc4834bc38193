"""Run an environment in which the agent calls tools until it answers.

In: the agent's turns. Out: observations and rewards. Next: `hermes.py` reads and writes the turns.

A call may earn a reward here (`process_reward`), an answer in `questions.py`. `rollout/episode.py`
drives the environment.

The loop asks for the outcome exactly once, however the episode ended: also after a tool result or
at a full context. So a failed episode never looks like a good one, and the outcome always has an
action that gets it.
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
    """Whether a call ended the episode, as reaching the goal of a game does."""
    dialect = Dialect()
    """The form of turns."""

    def __init__(self, tools: dict[str, BaseTool], config: EnvConfig):
        self.tools = tools
        self.config = config
        self.turns = 0
        self.tool_calls = 0
        self.invalid_in_a_row = 0
        """Consecutive calls that could not be parsed or validated, also across turns."""
        self.final_turn: str | None = None
        """Text of the turn with which the agent ended the episode."""
        self.calls: list[dict] = []
        """All calls so far, as recorded in rollouts."""
        self._rewarded_calls: set[str] = set()

    # ---------------------------------------------------------------------- what a subclass decides

    def extract_tool_calls(self, text: str) -> list[ToolCall]:
        """Return the calls of a turn in order.

        A call that cannot be parsed is included, with its `error` set.
        """
        return self.dialect.calls(text, self.tools)

    def format_tool_response(
        self, calls: list[ToolCall], results: list[ToolResult]
    ) -> list[Message]:
        """Return the messages that show the results to the agent."""
        return self.dialect.responses(calls, results, self.tools)

    def stop(self, text: str, calls: list[ToolCall]) -> StopReason | None:
        """Return why this turn ends the episode, or None.

        By default a turn without a call is the answer.
        """
        return None if calls else StopReason.ANSWERED

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        """Return the reward of one call.

        By default a successful call earns `env.call_reward`, an invalid call loses it, and a failed
        call earns 0.
        """
        # An invalid call is the agent's fault, a failed one the tool's (a time-out, a lost server).
        if result.error in INVALID:
            return -self.config.call_reward
        if not result.ok:
            return 0.0
        # A repeated call finds nothing new. If it earned a reward, an agent would learn to repeat
        # its first search until its turns end (lesson 4).
        request = json.dumps([call.name, _normalize(call.arguments)], sort_keys=True)
        if request in self._rewarded_calls:
            return 0.0
        self._rewarded_calls.add(request)
        return self.config.call_reward

    # ---------------------------------------------------------------------------------- the episode

    def reset(self, row: Row) -> Observation:
        # Kept for the outcome, which compares the answer with the row's targets.
        self.row = row
        return self.dialect.first_observation(row["prompt"], self.tools)

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        # The order of these checks decides which reason an episode gets, and so what the report
        # and the metrics `stop/...` say about it.
        if action.finish_reason == "length":
            # A call in a cut-off turn may look complete and still lack what the agent meant to add.
            return _last_step(StopReason.MAX_TOKENS)
        calls = self.extract_tool_calls(action.text)
        reason = self.stop(action.text, calls)
        if reason is not None:
            self.final_turn = action.text
            return _last_step(reason)
        last_turn = self.turns >= self.config.max_turns
        if last_turn and not self.stateful:
            # No turn is left in which the agent could use the result.
            return _last_step(StopReason.MAX_TURNS)
        if self.tool_calls + len(calls) > self.config.max_tool_calls:
            # None of the turn's calls runs: which of them are too many would depend on their order.
            return _last_step(StopReason.TOOL_BUDGET)
        self.tool_calls += len(calls)
        results = await self.execute(calls)
        call_rewards: list[tuple[int, float]] = []
        records: list[dict] = []
        for call, result in zip(calls, results, strict=True):
            # A call's reward is located by where the call ends in the turn, in characters.
            end = len(action.text) if call.end is None else call.end
            call_rewards.append((end, self.process_reward(call, result)))
            records.append(_record(call, result))
        self.calls += records
        info = {"tool_calls": records}
        # The longest run of invalid calls may lie inside the turn, before a valid one.
        longest = 0
        for result in results:
            invalid = result.error in INVALID
            self.invalid_in_a_row = self.invalid_in_a_row + 1 if invalid else 0
            longest = max(longest, self.invalid_in_a_row)
        reason = None
        if self.over:
            reason = StopReason.ANSWERED
        elif longest >= self.config.max_invalid_calls:
            reason = StopReason.INVALID_CALLS
        elif last_turn:
            reason = StopReason.MAX_TURNS
        if reason is not None:
            return _last_step(reason, call_rewards, info)
        # A name that the agent invented may be anything: a template writes it into a header.
        names = [call.name if CALL_NAME.fullmatch(call.name) else "" for call in calls]
        observation = Observation(self.format_tool_response(calls, results), calls=names)
        return StepResult(
            observation,
            reward=sum(reward for _, reward in call_rewards),
            info=info,
            call_rewards=call_rewards,
        )

    async def execute(self, calls: list[ToolCall]) -> list[ToolResult]:
        """Run the calls of one turn: concurrently, or in order if `stateful`."""
        if not self.stateful:
            # Searches of one turn do not depend on each other: three take as long as the slowest.
            return await asyncio.gather(*(self._execute_one(call) for call in calls))
        # Calls that change a world have an order: the second one acts on what the first one left.
        results: list[ToolResult] = []
        for call in calls:
            if self.over:
                message = "error: not run, because the call before it ended the episode"
                results.append(ToolResult(message, ok=False))
            else:
                results.append(await self._execute_one(call))
        return results

    async def _execute_one(self, call: ToolCall) -> ToolResult:
        return await call_tool(
            self.tools,
            call,
            timeout_s=self.config.tool_timeout_s,
            max_chars=self.config.tool_max_chars,
        )

    def calls_by_tool(self) -> dict[str, float]:
        """Count the successful calls of each tool, if there are several tools."""
        if len(self.tools) < 2:
            return {}
        # With one tool the number is `tool_calls` already.
        counts = Counter(call["name"] for call in self.calls if call["ok"])
        return {f"calls/{name}": float(counts[name]) for name in self.tools}


def _last_step(
    reason: StopReason, call_rewards: Sequence[tuple[int, float]] = (), info: dict | None = None
) -> StepResult:
    return StepResult(
        None,
        reward=sum(reward for _, reward in call_rewards),
        done=True,
        stop_reason=reason,
        info=info or {},
        call_rewards=list(call_rewards),
    )


def _record(call: ToolCall, result: ToolResult) -> dict:
    record = {
        "name": call.name,
        "arguments": call.arguments,
        "ok": result.ok,
        "error": result.error,
        "seconds": round(result.seconds, 6),
        "content": result.content,
    }
    if result.data.get("at"):
        record["at"] = result.data["at"]  # file and line where the tool's code failed
    return record


def _normalize(value: Any) -> Any:
    """Normalise arguments: case, blanks and invisible characters make no new call.

    Nor does surrounding punctuation.
    """
    # "Paris?" and "paris " are one search: the index would return the same passages.
    if isinstance(value, dict):
        return {key: _normalize(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_normalize(element) for element in value]
    if not isinstance(value, str):
        return value
    # NFKC makes look-alikes one form (full-width letters, ligatures); Z and C are the categories of
    # separators and of invisible characters.
    text = unicodedata.normalize("NFKC", value).casefold()
    return "".join(c for c in text if unicodedata.category(c)[0] not in "ZC").strip(
        string.punctuation
    )
