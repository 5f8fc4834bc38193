"""Make the microscopes of the lessons.

In: lessons.yml, and the recorded group of lessons 1 to 3. Out: a step for each name, as
`microscope.py` writes them. Next: docs/site/hooks.py replaces each `<!-- microscope: NAME -->` by
one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from agent_r1_recipes.page.microscope import HERE, read_group


def lesson_steps(group: Path) -> dict[str, dict[str, Any]]:
    """Map each name of lessons.yml to what the microscope draws."""
    steps = {}
    for name, lesson in yaml.safe_load((HERE / "lessons.yml").read_text()).items():
        # A lesson shows attempts of the recorded group ("all", or the number of one), or rows of
        # its own.
        if "attempts" in lesson:
            records = read_group(group)
            if lesson["attempts"] != "all":
                records = [records[lesson["attempts"]]]
        else:
            records = [_record(**row) for row in lesson["rows"]]
        steps[name] = {"records": records, "settings": lesson["settings"]}
    return steps


def _record(name: str, tokens: list[str], **columns: list[Any]) -> dict[str, Any]:
    """Describe an attempt like a line of rollouts/*.jsonl."""
    mask = columns.get("mask", [1] * len(tokens))
    logprobs = [math.log(p) for p in columns.get("probs", [1.0] * len(tokens))]
    row = {
        "tokens": tokens,
        "action_mask": mask,
        "logprobs": logprobs,
        "rewards": columns["rewards"],
    }
    for optional in ("step_ids", "values"):
        if optional in columns:
            row[optional] = columns[optional]
    if "ratios" in columns:
        # The lesson names ratios; the microscope wants the later log-probabilities that give them.
        later = []
        for logprob, ratio in zip(logprobs, columns["ratios"], strict=True):
            later.append(logprob + math.log(ratio))
        row["later"] = [later]
    return {
        "name": name,
        "rows": [row],
        "steps": [{"state": state} for state in columns.get("states", ())],
    }
