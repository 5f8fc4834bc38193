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
        if calls:
            return None
        return StopReason.NO_ANSWER

    def outcome(self, stop_reason: StopReason) -> Outcome | Awaitable[Outcome]:
        targets = list(self.row["reward_model"]["ground_truth"])
        last = ""
        if stop_reason is StopReason.ANSWERED:
            last = self.final_turn or ""
        answer, well_formed = self.dialect.answer_in(last)
        if self.config.reward:
            return self._outcome_of_reward(answer, well_formed)
        penalty = self.config.format_penalty
        reward, parts, metrics = qa_outcome(answer, well_formed, targets, penalty)
        metrics |= self.calls_by_tool() | {"malformed": float(not well_formed)}
        evidence = self.evidence()
        if evidence is not None:
            metrics["evidence"] = evidence
            if self.config.evidence_reward:
                parts["evidence_reward"] = self.config.evidence_reward * evidence
                reward += parts["evidence_reward"]
        return Outcome(reward, parts, metrics)

    async def _outcome_of_reward(self, answer: str | None, well_formed: bool) -> Outcome:
        # Imported only when needed: it brings user-defined rewards, judges and sandboxes.
        from agent_r1.reward.named import Episode, score_by_name

        episode = Episode(self.turns, self.calls)
        return Outcome(
            *await score_by_name(answer, well_formed, self.row, self.config, episode),
            self.calls_by_tool(),
        )

    def evidence(self) -> float | None:
        """Return the share of supporting titles that were found; None if the question has none."""
        supporting = (self.row.get("extra_info") or {}).get("supporting")
        if supporting is None or not len(supporting):
            return None
        targets = {title_key(title) for title in supporting}
        return len(targets & {title_key(title) for title in self.titles}) / len(targets)


@cache
def in_dialect(dialect: type[Dialect]) -> type[QuestionEnv]:
    """Make the question-answering environment of a dialect."""
    return type(
        f"{dialect.__name__}ToolEnv",
        (QuestionEnv,),
        {"dialect": dialect(), "__doc__": dialect.__doc__},
    )
