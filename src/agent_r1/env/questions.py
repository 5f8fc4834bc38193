"""Pay for the answer to a question, in any dialect.

In: the answer that the dialect reads from the last turn, and the row. Out: the outcome. By default
exact match (`reward/qa.py`) minus a penalty for a malformed last turn, or the reward that
`env.reward` names (`reward/named.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import cache

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Outcome, StopReason
from agent_r1.data.spellings import title_key
from agent_r1.env.base import BaseToolEnv
from agent_r1.env.dialect import Dialect
from agent_r1.reward.qa import qa_outcome
from agent_r1.tool.base import BaseTool, ToolCall, ToolResult


class QuestionEnv(BaseToolEnv):
    """Question answering with tools. `in_dialect` gives it a dialect."""

    def __init__(self, tools: dict[str, BaseTool], config: EnvConfig):
        super().__init__(tools, config)
        self.titles: set[str] = set()  # of all passages found

    async def execute(self, calls: list[ToolCall]) -> list[ToolResult]:
        results = await super().execute(calls)
        for result in results:
            self.titles.update(result.data.get("titles", ()))
        return results

    def stop(self, text: str, calls: list[ToolCall]) -> StopReason | None:
        # An answer ends the episode even with a call in the same turn: the agent must not answer
        # and search at once.
        if self.dialect.answer_in(text)[0] is not None:
            return StopReason.ANSWERED
        return None if calls else StopReason.NO_ANSWER

    def outcome(self, stop_reason: StopReason) -> Outcome | Awaitable[Outcome]:
        targets = list(self.row["reward_model"]["ground_truth"])
        last = (self.final_turn or "") if stop_reason is StopReason.ANSWERED else ""
        answer, closed = self.dialect.answer_in(last)
        if self.config.reward:
            return self._named(answer, closed)
        reward, parts, metrics = qa_outcome(answer, closed, targets, self.config.format_penalty)
        metrics |= self.calls_by_tool() | {"malformed": float(not closed)}
        if (found := self.evidence()) is not None:
            metrics["evidence"] = found
            if self.config.evidence_reward:
                parts["evidence_reward"] = self.config.evidence_reward * found
                reward += parts["evidence_reward"]
        return Outcome(reward, parts, metrics)

    async def _named(self, answer: str | None, closed: bool) -> Outcome:
        # Imported only when needed: it brings user-defined rewards, judges and sandboxes.
        from agent_r1.reward.named import Episode, named_outcome

        episode = Episode(self.turns, self.calls)
        return Outcome(
            *await named_outcome(answer, closed, self.row, self.config, episode),
            self.calls_by_tool(),
        )

    def evidence(self) -> float | None:
        """Return the share of supporting titles that were found; None if the question has none."""
        supporting = (self.row.get("extra_info") or {}).get("supporting")
        if supporting is None or not len(supporting):
            return None
        wanted = {title_key(title) for title in supporting}
        return len(wanted & {title_key(title) for title in self.titles}) / len(wanted)


@cache
def in_dialect(spoken: type[Dialect]) -> type[QuestionEnv]:
    """Make the question-answering environment of a dialect."""
    return type(
        f"{spoken.__name__}ToolEnv",
        (QuestionEnv,),
        {"dialect": spoken(), "__doc__": spoken.__doc__},
    )
