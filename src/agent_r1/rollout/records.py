"""A trajectory as one line of JSON: what `rollouts/*.jsonl` holds, and what chat, report and `inspect` read.

In: trajectories and the training sequences made of them. Out: records, with the tokens as text and ids.
Next: `viewer/tokens.py` draws one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.core import Row, Trajectory
from agent_r1.ground.files import RESUME, json_line, whole, writing
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.training_rows import PROCESS, Batch, TrainingRow, trajectory_rows


def question_of(row: Row) -> str:
    """The user's words."""
    return row["prompt"][-1]["content"]


def step_records(trajectory: Trajectory, chat: ChatFormat) -> list[dict[str, Any]]:
    """The turns of a trajectory as text and facts."""
    return [
        {
            "text": chat.decode(s.action_ids),
            "reward": s.reward,
            "finish_reason": s.finish_reason,
            "info": s.info,
            **s.extra,
        }
        for s in trajectory.steps
    ]


def trajectory_record(
    trajectory: Trajectory,
    rows: list[TrainingRow],
    advantages: list[list[float]] | None,
    chat: ChatFormat,
    step: int | None,
    values: list[list[float]] | None = None,
) -> dict[str, Any]:
    """One line of a rollouts file; `viewer/` and the report read it."""
    row = trajectory.row
    return {
        "step": step,
        "group_id": trajectory.group_id,
        "question": question_of(row),
        "ground_truth": list(row["reward_model"]["ground_truth"]),
        "kind": row["extra_info"].get("kind", ""),
        "stop_reason": trajectory.stop_reason.value,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "process": trajectory.process,
        "metrics": trajectory.metrics,
        "score_name": trajectory.score_name,
        "error": trajectory.error,
        "rows": [
            {
                "input_ids": r.input_ids,
                "tokens": [chat.decode([i]) for i in r.input_ids],
                "action_mask": r.action_mask,
                "logprobs": r.logprobs,
                "rewards": r.rewards,
                "process": r.columns[PROCESS.name],
                "advantages": advantages[i] if advantages else None,
                "step_ids": r.step_ids,
                "values": values[i] if values else None,
            }
            for i, r in enumerate(rows)
        ],
        "steps": step_records(trajectory, chat),
    }


def training_records(batch: Batch, chat: ChatFormat, step: int) -> Iterator[dict[str, Any]]:
    """The records of a training step, with advantages."""
    for number, trajectory in enumerate(batch.trajectories):
        mine = (batch.trajectory_B == number).nonzero()[:, 0].tolist()
        advantages, values = (
            None if x_BT is None else [x_BT[i, : batch.lengths_B[i]].tolist() for i in mine]
            for x_BT in (batch.advantages_BT, batch.values_BT)
        )
        yield trajectory_record(
            trajectory, trajectory_rows(trajectory, number, [PROCESS]), advantages, chat, step, values
        )


def evaluation_records(trajectories: list[Trajectory], chat: ChatFormat) -> Iterator[dict[str, Any]]:
    """The records of an evaluation: no advantages there."""
    for number, trajectory in enumerate(trajectories):
        yield trajectory_record(trajectory, trajectory_rows(trajectory, number, [PROCESS]), None, chat, None)


def write_rollouts(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Write a rollouts file, whole or not at all. Raises AgentR1Error when there is no space."""
    # A line at a time: with every token as text, the episodes of a large step would take gigabytes as one string.
    with writing(path, RESUME), whole(path) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(map(json_line, records))
