"""Compare the credit that estimators give to the turns and tokens of one recorded group.

In: a rollouts/ file of a training step (whitening needs the whole batch). Out: a table in a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1 import (
    AgentR1Error,
    Batch,
    Column,
    Config,
    Step,
    StopReason,
    Trajectory,
    collate,
    make_estimator,
    trajectory_rows,
)

LISTS = ("input_ids", "tokens", "action_mask", "logprobs", "rewards", "step_ids")


def print_credit(records: list[dict[str, Any]], file: Path, index: int, names: list[str], by_token: bool) -> None:
    """Print the group of trajectory `index` by turn, or that trajectory by sampled token.

    `records` are those of `file`.

    Settings are those of the run. A run without a critic has recorded no values: there V is 0. Raises AgentR1Error
    for a file that is not a training step's, and for an unknown name.
    """
    run = file.parent.parent / "config.yaml"
    config = Config(advantage=yaml.safe_load(run.read_text())["advantage"] if run.is_file() else {})
    credit = {}
    for name in names:
        estimate = make_estimator(config.model_copy(update={"algorithm": name}))
        batch = batch_of(records, file, estimate.columns)
        credit[name] = estimate(batch, config.advantage)[0]
    console, group = Console(), records[index]["group_id"]
    console.print(f"{records[index]['question']!r}  expected {records[index]['ground_truth']}", markup=False)
    table = Table(box=None, header_style="bold")
    for name in ("episode", "turn", "token" if by_token else "said", "reward", *names):
        table.add_column(name, justify="left" if name in ("token", "said") else "right", no_wrap=True)
    row = 0
    for number, record in enumerate(records):
        for recorded in record["rows"]:
            shown = number == index if by_token else record["group_id"] == group
            for line in _lines(recorded, record, batch, credit, row, by_token) if shown else ():
                table.add_row(str(number), *line)
            row += 1
    console.print(table)


def batch_of(records: list[dict[str, Any]], file: Path, columns: Sequence[Column] = ()) -> Batch:
    """Rebuild the batch of a training step, with an estimator's columns."""
    rows, values = [], []
    for number, record in enumerate(records):
        steps = record["steps"]
        if not all(row.get(name) for row in record["rows"] for name in LISTS) or not all("state" in s for s in steps):
            raise AgentR1Error(
                f"{file} lacks what estimators need; give a step_*.jsonl that this version has written",
                code="bad_rollout",
            )
        played = [step for row in record["rows"] for step in _steps(row, steps)]
        trajectory = Trajectory(played, record["group_id"], StopReason(record["stop_reason"]), {})
        rows += trajectory_rows(trajectory, number, columns)
        values += [torch.tensor(row.get("values") or [0.0] * len(row["input_ids"])) for row in record["rows"]]
    batch = collate(rows, columns=columns)
    batch.values_BT = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    return batch


def _steps(row: dict[str, Any], steps: list[dict[str, Any]]) -> Iterator[Step]:
    """Yield the steps of a recorded row."""
    process = row.get("process") or [0.0] * len(row["input_ids"])
    for number in dict.fromkeys(step for step in row["step_ids"] if step >= 0):
        places = [place for place, step in enumerate(row["step_ids"]) if step == number]
        ids, logprobs, rewards, paid = ([values[p] for p in places] for values in
                                        (row["input_ids"], row["logprobs"], row["rewards"], process))  # fmt: skip
        yield Step(
            row["input_ids"][: places[0]], ids, logprobs, sum(rewards), extra={"state": steps[number]["state"]},
            token_rewards=[(token, reward) for token, reward in enumerate(paid) if reward],
        )  # fmt: skip


def _lines(
    recorded: dict[str, Any],
    record: dict[str, Any],
    batch: Batch,
    credit: dict[str, torch.Tensor],
    row: int,
    by_token: bool,
) -> list[list[str]]:
    """List what was sampled, its rewards, and each estimator's advantage, for one sequence."""
    spans: dict[int, list[int]] = {}
    for place, step in enumerate(recorded["step_ids"]):
        if step >= 0:
            spans.setdefault(place if by_token else step, []).append(place)
    lines = []
    for places in spans.values():
        step = recorded["step_ids"][places[0]]
        said = recorded["tokens"][places[0]] if by_token else record["steps"][step]["text"]
        paid = float(batch.rewards_BT[row, places].sum())
        means = [float(x_BT[row, places].mean()) for x_BT in credit.values()]
        shown = Text(
            "".join(c for c in " ".join(said.split())[:60] if c.isprintable()) or "↵"
        )  # a model may write any character
        lines.append([str(step + 1), shown, f"{paid:+.2f}" if paid else "", *(f"{mean:+.3f}" for mean in means)])
    return lines
