"""Write a trajectory as one line of JSON.

In: trajectories and their training sequences. Out: records for `rollouts/*.jsonl`, with tokens as
text and ids. Next: `watch/tokens.py` draws one; chat, report and `inspect` read them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from agent_r1.chat.format import ChatFormat
from agent_r1.core import Row, Trajectory
from agent_r1.ground.files import RESUME, json_line, whole, writing
from agent_r1.rollout.columns import PROCESS
from agent_r1.rollout.training_rows import Batch, TrainingRow, trajectory_rows


def question_of(row: Row) -> str:
    """Return the text of the last message of the prompt."""
    return row["prompt"][-1]["content"]


def step_records(trajectory: Trajectory, chat: ChatFormat) -> list[dict[str, Any]]:
    """Describe each turn of a trajectory: its text, reward and facts."""
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
    """Make one line of a rollouts file."""
    row_records = []
    for i, training_row in enumerate(rows):
        record = {
            "input_ids": training_row.input_ids,
            "tokens": [chat.decode([token]) for token in training_row.input_ids],
            "action_mask": training_row.action_mask,
            "logprobs": training_row.logprobs,
            "rewards": training_row.rewards,
            "process": training_row.columns[PROCESS.name],
            "advantages": advantages[i] if advantages else None,
            "step_ids": training_row.step_ids,
            "values": values[i] if values else None,
        }
        row_records.append(record)
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
        "rows": row_records,
        "steps": step_records(trajectory, chat),
    }


def training_records(batch: Batch, chat: ChatFormat, step: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a training step, with advantages."""
    for number, trajectory in enumerate(batch.trajectories):
        yield trajectory_record(
            trajectory,
            trajectory_rows(trajectory, number, [PROCESS]),
            _numbers_of_rows(batch, batch.advantages_BT, number),
            chat,
            step,
            _numbers_of_rows(batch, batch.values_BT, number),
        )


def _numbers_of_rows(
    batch: Batch, numbers_BT: Tensor | None, trajectory: int
) -> list[list[float]] | None:
    """Return one number per token of each row of a trajectory, without padding."""
    if numbers_BT is None:
        return None
    rows = (batch.trajectory_B == trajectory).nonzero()[:, 0].tolist()
    return [numbers_BT[row, : batch.lengths_B[row]].tolist() for row in rows]


def evaluation_records(
    trajectories: list[Trajectory], chat: ChatFormat
) -> Iterator[dict[str, Any]]:
    """Yield the records of an evaluation, without advantages."""
    for number, trajectory in enumerate(trajectories):
        yield trajectory_record(
            trajectory, trajectory_rows(trajectory, number, [PROCESS]), None, chat, None
        )


def write_rollouts(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Write a rollouts file atomically. Raise AgentR1Error if the disk is full."""
    # One line at a time: as a single string, a large step's episodes would take gigabytes.
    with writing(path, RESUME), whole(path) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(map(json_line, records))
