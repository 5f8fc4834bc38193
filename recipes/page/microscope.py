"""Turn recorded attempts into what the microscope draws.

In: lines of a training step's rollouts file (local or verl), as `agent-r1 inspect` reads them. Out: JSON with the author
and the numbers of each token. Next: js/microscope.js draws it, js/quantities.js computes credit and losses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1 import Decoder, read_trajectories, token_cells, token_logprobs

TEMPLATE, USER, POLICY, TOOL = "template", "user", "policy", "tool"
_OPENS = re.compile(r"<\|.*start.*\|>")
"""The control token before the name of a role."""


def read_step(file: Path, index: int = 0, later: Sequence[Decoder] = ()) -> dict[str, Any]:
    """Read the group of trajectory `index` of a rollouts file.

    Raises AgentR1Error for another file.
    """
    records = read_trajectories(file, index)
    group = [record for record in records if record["group_id"] == records[index]["group_id"]]
    return step_of(group, later)


def recorded_step(checkpoint: Path, models: dict[int, Decoder]) -> dict[str, Any] | None:
    """Read a group with unequal scores from a run's first training step, or None.

    `models` maps steps to checkpoints; the later ones give the trainer's log-probabilities.
    """
    files = sorted(checkpoint.parent.parent.glob("rollouts/step_*.jsonl"))
    if not files:
        return None
    records, at = read_trajectories(files[0], 0), int(files[0].stem.removeprefix("step_"))
    groups: dict[str, set[float]] = {}
    for record in records:
        groups.setdefault(record["group_id"], set()).add(record["reward"])
    chosen = next((group for group, rewards in groups.items() if len(rewards) > 1), records[0]["group_id"])
    later = {step: model for step, model in models.items() if step >= at}
    return step_of([r for r in records if r["group_id"] == chosen], list(later.values())) | {"ages": list(later)}


def step_of(records: list[dict[str, Any]], later: Sequence[Decoder] = ()) -> dict[str, Any]:
    """Describe the attempts at one question.

    `later` has the model after each further training step, so that staleness has its real log-probabilities.
    """
    states: dict[Any, int] = {}
    rows = [row for number, record in enumerate(records) for row in _rows(number, record, later, states)]
    answers = " or ".join(map(str, records[0]["ground_truth"]))
    return {"title": f"{records[0]['question']} Expected: {answers}", "rows": rows}


def _rows(
    number: int, record: dict[str, Any], later: Sequence[Decoder], states: dict[Any, int]
) -> Iterator[dict[str, Any]]:
    for row in record["rows"]:
        cells = token_cells(row)
        trainer = [token_logprobs(model, row["input_ids"]).tolist() for model in later]
        yield {
            "name": f"attempt {number + 1}, {record['stop_reason']}",
            "group": record["group_id"],
            "trajectory": number,
            "baseline": record["steps"][0].get("greedy_score"),
            "tokens": [cell.text for cell in cells],
            "authors": authors(cells),
            "mask": [int(cell.sampled) for cell in cells],
            "steps": [cell.step for cell in cells],
            "states": [_state(record, row, cell.step, states) if cell.sampled else -1 for cell in cells],
            "logprobs": _short(row["logprobs"]),
            "later": [_short(logprobs) for logprobs in trainer],
            "rewards": _short(row["rewards"]),
            "values": row.get("values") and _short(row["values"]),
        }


def _state(record: dict[str, Any], row: dict[str, Any], step: int, states: dict[Any, int]) -> int:
    """Number the state in which a step began.

    It is what the environment recorded, or else all tokens before the step.
    """
    before = tuple(row["input_ids"][: row["step_ids"].index(step)])
    return states.setdefault(record["steps"][step].get("state", before), len(states))


def authors(cells: Sequence[Any]) -> list[str]:
    """Name the author of each token of a row.

    Read text before the first action is the prompt: the system message is the template's, the rest the user's. Text after
    it came from the environment. Control tokens, role names and line breaks next to them are the template's.
    """
    found: list[str] = []
    role, acted = "", False
    for place, cell in enumerate(cells):
        before = cells[place - 1] if place else None
        acted = acted or cell.sampled
        if before and _OPENS.fullmatch(before.text):
            role = cell.text.strip()
        framed = cell.control or role == "system" or (before and before.control and cell.text.isspace())
        if cell.sampled:
            found.append(POLICY)
        elif framed or (before and _OPENS.fullmatch(before.text)) or _ends_role(cells, place):
            found.append(TEMPLATE)
        else:
            found.append(TOOL if acted else USER)
    return found


def _ends_role(cells: Sequence[Any], place: int) -> bool:
    """Return whether a token is the line break after the name of a role."""
    return cells[place].text.isspace() and place > 1 and bool(_OPENS.fullmatch(cells[place - 2].text))


def _short(numbers: list[float]) -> list[float]:
    """Round to six decimals, which is finer than anything that the page shows."""
    return [round(number, 6) for number in numbers]
