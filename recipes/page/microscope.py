"""Write a recorded group for the microscope, alone (`agent-r1 microscope FILE`) or for export.py.

In: a file of rollouts/ (a step of the local loop or of verl, which write the same lines). Out: the
lines of one group, with the log-probabilities of later checkpoints. Next: js/microscope.js draws
them, js/quantities.js computes credit and losses.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1 import AgentR1Error, command, episode_fault, json_records, option, say, write_whole

if TYPE_CHECKING:
    from agent_r1 import Decoder  # PyTorch comes with it, and `agent-r1 --help` imports this file

Record = dict[str, Any]
HERE = Path(__file__).parent
FIELDS = ("question", "ground_truth", "stop_reason", "group_id")
"""What the microscope draws of an episode ..."""
COLUMNS = ("tokens", "action_mask", "step_ids", "logprobs", "rewards", "values")
"""... and of each of its rows."""


def read_group(file: Path, later: Sequence[Decoder] = (), group: str | None = None) -> list[Record]:
    """Read a group of a rollouts file. By default the first with unequal rewards, or the first.

    `later` has the models of later checkpoints. Raises AgentR1Error for another file or an unknown
    group.
    """
    groups: dict[str, list[Record]] = {}
    for place, record in json_records(file):
        fault = episode_fault(record)
        if fault:
            raise AgentR1Error(
                f"{place} is not an episode ({fault}); name a file of runs/NAME/rollouts/",
                code="bad_rollout",
            )
        groups.setdefault(record["group_id"], []).append(record)
    name = group or _first_unequal_group(groups)
    if name not in groups:
        raise AgentR1Error(
            f"{file} has no group {name!r}; its groups are {', '.join(groups) or 'none'}",
            code="unknown_group",
        )
    return [_select_fields(record, later) for record in groups[name]]


def _first_unequal_group(groups: dict[str, list[Record]]) -> str:
    """Return the name of the first group that teaches something, else of the first group.

    With equal rewards all advantages are 0.
    """
    for name, records in groups.items():
        rewards = {record["reward"] for record in records}
        if len(rewards) > 1:
            return name
    return next(iter(groups), "")


def _select_fields(record: Record, later: Sequence[Decoder]) -> Record:
    """Keep what the microscope draws, and compute the log-probabilities of `later`."""
    from agent_r1 import token_logprobs

    rows = []
    for row in record["rows"]:
        columns: dict[str, Any] = {}
        for name in COLUMNS:
            if row.get(name):
                columns[name] = _shorten(row[name])
        if {len(column) for column in columns.values()} != {len(row["action_mask"])}:
            raise AgentR1Error(
                "a row of the group has columns of unequal lengths; dump it again",
                code="bad_rollout",
            )
        if later:
            logprobs = [token_logprobs(model, row["input_ids"]).tolist() for model in later]
            columns["later"] = [_shorten(column) for column in logprobs]
        rows.append(columns)
    steps = []
    for step in record["steps"]:
        steps.append({key: step[key] for key in ("state", "greedy_score") if key in step})
    fields = {key: record[key] for key in FIELDS}
    return fields | {"rows": rows, "steps": steps}


def _shorten(column: Sequence[Any]) -> list[Any]:
    """Round to six decimals, which is finer than anything that the page shows."""
    return [round(value, 6) if isinstance(value, float) else value for value in column]


def title_of(records: Sequence[Record]) -> str:
    answers = " or ".join(str(answer) for answer in records[0]["ground_truth"])
    title = f"{records[0]['question']} Expected: {answers}."
    return title.encode(errors="replace").decode()  # half an emoji has no place in a page


# ------------------------------------------------------------------------------------------- a page


def script(*names: str) -> str:
    """Join scripts of js/."""
    return "".join((HERE / "js" / f"{name}.js").read_text() for name in names)


def write_html(
    file: Path,
    template: str | Path,
    program: str,
    facts: dict[str, Any],
    blocks: dict[str, str] | None = None,
    policy: str = "",
) -> int:
    """Fill the `@NAME@` of a template, and write the page. Return its length.

    Its content policy allows `program` alone, by its hash: no text of an episode can run as a
    script. `policy` extends `script-src` and adds what follows it. `facts` are texts; `blocks` are
    contents of script elements that do not run, and keep their characters.
    """
    blocks = blocks or {}
    for name, block in blocks.items():
        # These two end a script element, or hide its end, wherever they stand.
        if "</script" in block.lower() or "<!--" in block:
            raise ValueError(f"{name} would end its script element")
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    parts = {name: html.escape(str(value)) for name, value in facts.items()}
    parts |= blocks | {
        "SCRIPT": program,
        "STYLE": (HERE / "microscope.css").read_text(),
        "MICROSCOPE": _markup(file),
    }
    own_script = f"script-src 'sha256-{digest}'{policy}"
    parts["POLICY"] = f"default-src 'none'; style-src 'unsafe-inline'; {own_script}"
    page = re.sub("@([A-Z]+)@", lambda name: parts[name[1]], (HERE / template).read_text())
    write_whole(file, page)
    return len(page)


def _markup(file: Path) -> str:
    """Return layers and dials.

    If the page lies in a checkout, their links lead to its lessons; otherwise they have none.
    """
    text = (HERE / "microscope.html").read_text()
    checkout = HERE.resolve().parents[1]
    if file.resolve().is_relative_to(checkout) and (checkout / "docs" / "lessons").is_dir():
        lessons = os.path.relpath(checkout / "docs" / "lessons", file.resolve().parent)
        return re.sub(r'href="([\w-]+)\.html"', rf'href="{lessons}/\1.md"', text)
    return re.sub(r"<a [^>]*>(.*?)</a>", r"\1", text)


@command(
    "microscope", "write one HTML page with a recorded group, token by token, with dials",
    ["runs/small-grpo/rollouts/step_000001.jsonl --page group.html"],
    option("file", type=Path, metavar="FILE", help="a file of runs/NAME/rollouts/, of the local "
        "loop or of verl"),
    option("--group", metavar="ID", help="group_id (default: the first group with unequal "
        "rewards)"),
    option("--page", type=Path, metavar="PAGE", default=Path("microscope.html"), help="default: "
        "microscope.html"),
)  # fmt: skip
def write_microscope(a: Namespace) -> None:
    records = read_group(a.file, group=a.group)
    facts = {
        "TITLE": title_of(records),
        "FILE": a.file.name,
        "DATA": json.dumps({"records": records}),
    }
    write_html(a.page, "group.html", script("quantities", "microscope", "group"), facts)
    group = records[0]["group_id"]
    say(f"microscope: group {group}, {len(records)} attempts, in {a.page}")
