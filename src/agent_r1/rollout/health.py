"""Count tool calls, and stop if tools or episodes fail without the agent's fault.

In: finished episodes. Out: three counts, or an AgentR1Error. Next: back to `episode.py`; verl's trainer calls it too.
"""

from __future__ import annotations

from agent_r1.core import INVALID, Step, Trajectory
from agent_r1.ground.errors import AgentR1Error

MAX_LOST_SHARE = 0.05
"""Share of an evaluation's episodes that may lose their connection. They count as wrong, so this bounds the error."""


def count_calls(steps: list[Step]) -> dict[str, int]:
    """Count all tool calls, the agent's invalid ones, and those that a tool failed."""
    errors = [call["error"] for step in steps for call in step.info.get("tool_calls", ())]
    invalid = sum(error in INVALID for error in errors)
    failed = sum(error is not None for error in errors) - invalid
    return {"tool_calls": len(errors), "invalid_calls": invalid, "failed_calls": failed}


def refuse_failures(trajectories: list[Trajectory]) -> None:
    """Raise AgentR1Error if more than half of the episodes or tool calls failed.

    Then a tool, a service or a deadline is wrong, and the remaining episodes are a biased sample.
    """
    broken = [t for t in trajectories if t.stop_reason.failed]
    if len(broken) * 2 > len(trajectories):
        cause = broken[0].error or broken[0].stop_reason
        raise AgentR1Error(
            f"{len(broken)} of {len(trajectories)} episodes were broken off, the first: {cause}", code="episodes_failed"
        )
    calls = sum(t.metrics.get("tool_calls", 0) for t in trajectories)
    failed = sum(t.metrics.get("failed_calls", 0) for t in trajectories)
    refuse_broken_tools(calls, failed, next(filter(None, map(first_failed_call, trajectories)), ""))


def refuse_lost(causes: list[str], episodes: int) -> None:
    """Raise AgentR1Error if more than MAX_LOST_SHARE of the episodes lost their model server."""
    if len(causes) > max(1, MAX_LOST_SHARE * episodes):
        raise AgentR1Error(
            f"{len(causes)} of {episodes} episodes lost the model server, the first: {causes[0]}", code="server_gone"
        )


def refuse_broken_tools(calls: float, failed: float, example: str) -> None:
    """Raise AgentR1Error if most of many tool calls failed through no fault of the agent."""
    if failed > max(4, calls / 2):  # a few may always fail
        raise AgentR1Error(
            f"{failed:.0f} of {calls:.0f} tool calls failed, the first with {example!r}; fix the tool",
            code="tools_failed",
        )


def first_failed_call(trajectory: Trajectory) -> str | None:
    """Return the message of the first tool failure, or None. An invalid call is the agent's fault and not counted."""
    calls = (call for step in trajectory.steps for call in step.info.get("tool_calls", ()))
    failed = next((call for call in calls if call["error"] and call["error"] not in INVALID), None)
    return failed and failed["content"] + (f" ({failed['at']})" if failed.get("at") else "")
