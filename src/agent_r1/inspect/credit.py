"""One recorded group, and what each estimator would have credited its turns and tokens with, side by side.

In: a file of rollouts/ of a training step (whitening needs the whole batch). Out: a table in a terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1.errors import AgentR1Error
from agent_r1.inspect.tokens import read_trajectories, token_cells
from agent_r1.rollout.rows import Batch, TrainingRow, collate
from agent_r1.settings import AdvantageConfig
from agent_r1.training.estimators import balance, get_estimator
from agent_r1.ui import clean

LISTS = ("input_ids", "action_mask", "logprobs", "rewards", "step_ids")


def print_credit(file: Path, index: int, names: list[str], by_token: bool) -> None:
    """The group of trajectory `index`, a line a turn; or that trajectory alone, a line a sampled token.

    Settings are those of the run. A run without a critic has recorded no values: there V is 0. Raises AgentR1Error for a
    file that is no training step's, and for an unknown name.
    """
    records = read_trajectories(file, index)
    batch = batch_of(records, file)
    config = file.parent.parent / "config.yaml"
    section = (
        AdvantageConfig(**yaml.safe_load(config.read_text())["advantage"]) if config.is_file() else AdvantageConfig()
    )
    if section.process_weight is not None:
        batch.rewards_BT, _ = balance(batch.rewards_BT, batch.process_BT, section.process_weight)
    credit = {name: get_estimator(name)(batch, section)[0] for name in names}
    console, group = Console(), records[index]["group_id"]
    console.print(clean(f"{records[index]['question']}  expected {records[index]['ground_truth']}"), markup=False)
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


def batch_of(records: list[dict[str, Any]], file: Path) -> Batch:
    """The batch of a training step, as the estimators took it."""
    rows, values = [], []
    for number, record in enumerate(records):
        for row in record["rows"]:
            steps = record["steps"]
            if not all(row.get(name) for name in LISTS) or not all("state" in step for step in steps):
                raise AgentR1Error(
                    f"{file} lacks what estimators need; give a step_*.jsonl that this version has written"
                )
            states = [steps[step]["state"] if step >= 0 else 0 for step in row["step_ids"]]
            lists = {name: row[name] for name in LISTS} | {"process": row.get("process", [])}
            rows.append(TrainingRow(number, record["group_id"], **lists, states=states))
            values.append(torch.tensor(row.get("values") or [0.0] * len(row["input_ids"])))
    batch = collate(rows)
    batch.values_BT = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    return batch


def _lines(
    recorded: dict, record: dict, batch: Batch, credit: dict[str, torch.Tensor], row: int, by_token: bool
) -> list[list]:
    """Of one training sequence: what was sampled, what it was paid, and each estimator's advantage."""
    cells = [cell for cell in token_cells(recorded) if cell.sampled]
    spans = [[cell] for cell in cells] if by_token else [
        [cell for cell in cells if cell.step == step] for step in dict.fromkeys(cell.step for cell in cells)
    ]  # fmt: skip
    lines = []
    for span in spans:
        said = span[0].text if by_token else record["steps"][span[0].step]["text"]
        places = [cell.position for cell in span]
        paid = float(batch.rewards_BT[row, places].sum())
        means = [float(x_BT[row, places].mean()) for x_BT in credit.values()]
        shown = Text(" ".join(clean(said).split())[:60] or "↵")
        lines.append(
            [str(span[0].step + 1), shown, f"{paid:+.2f}" if paid else "", *(f"{mean:+.3f}" for mean in means)]
        )
    return lines
