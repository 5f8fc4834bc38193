"""Show a training sequence token by token: the author of each token, and its credit.

In: a row of a rollout line (`rollouts/*.jsonl`). Out: coloured text for a terminal or a notebook,
spans for the report. Both use `token_cells`.

Colour is the action mask: sampled tokens are coloured, read tokens (prompt, tool results, template)
are grey. Policy loss, entropy, KL and advantages exist on coloured tokens only.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agent_r1.ground.clean import clean
from agent_r1.ground.clean_console import CleanConsole
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import read_jsonl

# Text is encoded so that control tokens never result (chat/format.py), and a tokenizer's
# ordinary pieces do not join brackets and letters. So a single token that reads like a whole tag
# *is* a control token.
_CONTROL = re.compile(r"<\|[^<>|]+\|>|</?[a-z_]+>")


@dataclass(frozen=True)
class TokenCell:
    """Hold one token with its numbers."""

    position: int
    id: int
    text: str
    """Decoded and cleaned, but not yet escaped for HTML."""
    sampled: bool
    """The action mask."""
    control: bool
    step: int
    """The turn that sampled it; -1 if not sampled."""
    logprob: float | None
    """At sampling time; None if not sampled."""
    reward: float
    advantage: float | None
    """None if not sampled, or not computed (evaluation)."""
    process: float
    """The process reward's part of the reward."""


def token_cells(row: Mapping[str, Any]) -> list[TokenCell]:
    """Make the cells of one row of a rollout line.

    Raises AgentR1Error if its lists are missing or differ in length.
    """
    n = len(row.get("input_ids") or ())
    advantages = row.get("advantages") or [None] * n
    process = row.get("process") or [0.0] * n
    names = ("input_ids", "tokens", "action_mask", "logprobs", "rewards", "step_ids")
    lists = [row.get(name) or () for name in names]
    if any(len(values) != n for values in (*lists, advantages, process)):
        raise AgentR1Error(
            f"a rollout row lacks one of {', '.join(names)} for each of its {n} tokens; dump it "
            "again",
            code="bad_rollout",
        )
    cells = []
    for position in range(n):
        text = row["tokens"][position]
        is_sampled = bool(row["action_mask"][position])
        cell = TokenCell(
            position=position,
            id=row["input_ids"][position],
            text=clean(text),
            sampled=is_sampled,
            control=bool(_CONTROL.fullmatch(text)),
            step=row["step_ids"][position],
            logprob=row["logprobs"][position] if is_sampled else None,
            reward=row["rewards"][position],
            advantage=advantages[position] if is_sampled else None,
            process=process[position],
        )
        cells.append(cell)
    return cells


# ------------------------------------------------------------------------------------ for terminals

_SAMPLED_STYLE = "black on bright_cyan"
_CONTEXT_STYLE = "bright_black"


def _style(cell: TokenCell) -> str:
    style = _SAMPLED_STYLE if cell.sampled else _CONTEXT_STYLE
    if cell.control:
        style += " bold reverse"
    return style


def token_text(row: Mapping[str, Any]) -> Text:
    """Format the row as running text, coloured by mask, control tokens reversed."""
    text = Text()
    for cell in token_cells(row):
        text.append(cell.text, style=_style(cell))
    return text


def token_table(row: Mapping[str, Any], start: int = 0) -> Table:
    """Format the tokens of `row` from `start`, one per line, with all numbers.

    It also renders in notebooks. The column names are repeated below, because the header may have
    left the screen.
    """
    table = Table(box=None, header_style="bold", footer_style="bold", show_footer=True)
    for name in ("#", "id", "token", "mask", "step", "log-prob", "reward", "advantage"):
        table.add_column(name, footer=name, justify="left" if name == "token" else "right")
    for cell in token_cells(row)[start:]:
        table.add_row(
            str(cell.position),
            str(cell.id),
            Text(
                cell.text.replace("\n", "↵").replace(" ", "·").replace("\t", "→"),
                style=_style(cell),
            ),
            str(int(cell.sampled)),
            str(cell.step) if cell.sampled else "",
            _with_sign(cell.logprob),
            _with_sign(cell.reward) if cell.reward else "",
            _with_sign(cell.advantage),
        )
    return table


# ----------------------------------------------------------------------------------------- for HTML


def tokens_html(row: Mapping[str, Any], start: int = 0, end: int | None = None) -> str:
    """Make one `<span>` per token: classes for mask and credit, `data-tip` for the numbers.

    TOKEN_CSS styles them.
    """
    return "".join(_span(cell) for cell in token_cells(row)[start:end])


def _span(cell: TokenCell) -> str:
    classes = ["t"]
    if cell.sampled:
        classes.append("s")
    else:
        classes.append("r")
    if cell.control:
        classes.append("c")
    if cell.advantage:
        classes.append("up" if cell.advantage > 0 else "down")
    if cell.reward:
        classes.append("paid")
    # A newline is a token too: show it, then break the line.
    text = html.escape(cell.text).replace("\n", "<i>↵</i>\n")
    return f'<span class="{" ".join(classes)}" data-tip="{html.escape(_tip(cell))}">{text}</span>'


def _tip(cell: TokenCell) -> str:
    parts = [f"token {cell.position}", f"id {cell.id}", repr(cell.text)]
    if not cell.sampled:
        return " · ".join([*parts, "mask 0: not sampled, no loss"])
    parts.append(f"mask 1: sampled in turn {cell.step + 1}")
    if cell.logprob is not None:
        parts.append(f"log-prob {cell.logprob:.3f} (p = {math.exp(min(cell.logprob, 0.0)):.3f})")
    if cell.advantage is not None:
        parts.append(f"advantage {cell.advantage:+.3f}")
    if cell.reward:
        reward = f"reward {cell.reward:+.2f}"
        if cell.process:
            reward += f" ({cell.process:+.2f} of it on the way)"
        parts.append(reward)
    return " · ".join(parts)


def _with_sign(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:+.3f}"


TOKEN_CSS = """
.tokens { white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.75 ui-monospace, Menlo, Consolas, monospace; }
.t { border-radius: 3px; padding: 1px 0; }
.t i { font-style: normal; opacity: .35; }
.t.r { color: var(--read); }
.t.s { background: var(--sampled); color: var(--ink); }
.t.c { font-weight: 600; box-shadow: inset 0 0 0 1px currentColor; padding: 1px 3px;
  margin: 0 1px; }
.t.up { border-bottom: 3px solid var(--up); }
.t.down { border-bottom: 3px solid var(--down); }
.t.paid::before { content: "★"; color: var(--star); }
.t:hover { outline: 2px solid var(--accent); }
.t:hover::after { content: attr(data-tip); position: fixed; z-index: 9; left: 50%; bottom: 16px;
  transform: translateX(-50%); width: max-content; max-width: 92vw;
  padding: 8px 14px; border-radius: 8px; background: var(--ink);
  color: var(--page); font: 13px/1.4 ui-monospace, Menlo, Consolas, monospace;
  white-space: pre-wrap; }
"""
"""Styles of the spans.

The page sets the colours: --ink --page --read --sampled --up --down --star --accent.
"""


ROW_COLUMNS: dict[str, type | tuple[type, ...]] = {
    "input_ids": int,
    "tokens": str,
    "action_mask": int,
    "step_ids": int,
    "logprobs": (int, float),
    "rewards": (int, float),
    "advantages": (int, float),
    "values": (int, float),
}
"""Columns of a row in rollouts/, and the type of their values, which are null for some tokens."""
NEEDED_COLUMNS = ("tokens", "action_mask")


def episode_fault(record: Any) -> str:
    """Return what a record lacks of an episode's form in rollouts/, or ""."""
    if not isinstance(record, dict):
        return "no object"
    forms: dict[str, type | tuple[type, ...]] = {
        "question": str,
        "ground_truth": list,
        "stop_reason": str,
        "group_id": str,
        "reward": (int, float),
        "rows": list,
        "steps": list,
    }
    for name, form in forms.items():
        if not isinstance(record.get(name), form):
            return f"its {name} is {str(record.get(name))[:40]!r}"
    for step in record["steps"]:
        if not isinstance(step, dict):
            return "a step is no object"
    for row in record["rows"]:
        if not isinstance(row, dict):
            return "a row is no object"
        fault = _row_fault(row)
        if fault:
            return fault
    return ""


def _row_fault(row: dict[str, Any]) -> str:
    """Return what a row's columns lack: lists of one length, of texts or numbers."""
    mask = row.get("action_mask")
    if not isinstance(mask, list):
        return "a row has no action_mask"
    for name, form in ROW_COLUMNS.items():
        column = row.get(name)
        if column is None and name not in NEEDED_COLUMNS:
            continue
        if not isinstance(column, list) or len(column) != len(mask):
            return f"the {name} of a row are no list of {len(mask)}"
        if not all(value is None or isinstance(value, form) for value in column):
            return f"the {name} of a row have a value of another type"
        if name in NEEDED_COLUMNS and None in column:
            return f"the {name} of a row have gaps"
    return ""


def _read_trajectory(file: Path, index: int) -> dict[str, Any]:
    """Read trajectory `index` of a rollouts file. Raises AgentR1Error if there is none."""
    if not file.is_file():
        raise AgentR1Error(
            f"{file} does not exist; runs/<name>/rollouts/ has the trajectories of a run",
            code="missing_rollouts",
        )
    records = read_jsonl(file)
    if not records:
        raise AgentR1Error(
            f"{file} has no trajectories; give a file of runs/<name>/rollouts/", code="bad_rollout"
        )
    if not 0 <= index < len(records):
        raise AgentR1Error(
            f"{file} has trajectories 0 to {len(records) - 1}; there is no {index}",
            code="index_out_of_range",
        )
    fault = episode_fault(records[index])
    if fault:
        raise AgentR1Error(
            f"{file}, trajectory {index} is not an episode ({fault}); give a file of "
            "runs/<name>/rollouts/",
            code="bad_rollout",
        )
    return records[index]


def rollouts_file(path: Path) -> Path:
    """Return the file to inspect: `path`, or of a run's folder its newest trajectories.

    The final evaluation comes first, then the last recorded training step. Raises AgentR1Error for
    a folder without any.
    """
    if not path.is_dir():
        return path
    files = sorted(path.glob("rollouts/*.jsonl*"))
    files = files or sorted(path.glob("*.jsonl*"))
    if not files:
        raise AgentR1Error(
            f"{path} is a folder without rollouts/*.jsonl; name a run's folder, or a file of its "
            "rollouts/",
            code="no_records",
        )
    finals = [file for file in files if file.name.startswith("eval.jsonl")]
    steps = [file for file in files if file.name.startswith("step_")]
    return [*files, *steps, *finals][-1]


def print_trajectory(file: Path, index: int, table: bool) -> None:
    """Print one trajectory of a rollouts file, as coloured text or one token per line.

    Raises AgentR1Error if there is none.
    """
    record = _read_trajectory(file, index)
    console = CleanConsole()
    facts = (
        f"{record['question']}  expected {record['ground_truth']}  {record['stop_reason']}  "
        f"reward {record['reward']:.2f}"
    )
    if record.get("process"):
        facts += f" ({record['process']:+.2f} of it on the way)"
    console.print(clean(facts), markup=False)
    for row in record["rows"]:
        console.print(token_table(row) if table else token_text(row))
