"""Count tool calls, and refuse batches in which the world failed and not the agent.

In: finished episodes. Out: three counts, or an AgentR1Error. Next: back to `episode.py`; verl's trainer asks for the same.
"""

from __future__ import annotations

from agent_r1.core import INVALID, Step, Trajectory
from agent_r1.ground.errors import AgentR1Error

LOST = 0.05
"""Share of an evaluation's episodes that may lose their connection. They count as wrong: the score is so much too low at most."""


def count_calls(steps: list[Step]) -> dict[str, int]:
    """Count tool calls: all, invalid ones, and those in which the tool failed."""
    errors = [call["error"] for step in steps for call in step.info.get("tool_calls", ())]
    invalid = sum(error in INVALID for error in errors)
    failed = sum(error is not None for error in errors) - invalid
    return {"tool_calls": len(errors), "invalid_calls": invalid, "failed_calls": failed}


def refuse_failures(trajectories: list[Trajectory]) -> None:
    """Raise AgentR1Error if more than half of the episodes or of the tool calls failed.

    Then the tool, the service or a deadline is wrong, and training on the remains would teach nonsense.
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
    """Raise AgentR1Error if more than LOST of the episodes lost the model server."""
    if len(causes) > max(1, LOST * episodes):
        raise AgentR1Error(
            f"{len(causes)} of {episodes} episodes lost the model server, the first: {causes[0]}", code="server_gone"
        )


def refuse_broken_tools(calls: float, failed: float, example: str) -> None:
    """Raise AgentR1Error if most tool calls failed without a mistake of the agent."""
    if failed > max(4, calls / 2):  # a handful may fail anywhere
        raise AgentR1Error(
            f"{failed:.0f} of {calls:.0f} tool calls failed, the first with {example!r}; mend the tool",
            code="tools_failed",
        )


def first_failed_call(trajectory: Trajectory) -> str | None:
    """Return the message of the first failed tool, or None. An invalid call is the agent's mistake and does not count."""
    calls = (call for step in trajectory.steps for call in step.info.get("tool_calls", ()))
    failed = next((call for call in calls if call["error"] and call["error"] not in INVALID), None)
    return failed and failed["content"] + (f" ({failed['at']})" if failed.get("at") else "")
