"""Make the microscopes of the lessons.

In: lessons.yml, and the recorded group of lessons 1 to 3. Out: a step for each name, as
`microscope.py` writes them.
Next: docs/site/hooks.py replaces each `<!-- microscope: NAME -->` by one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from agent_r1_recipes.page.microscope import HERE, read_group


def lesson_steps(group: Path) -> dict[str, dict[str, Any]]:
    """Map each name of lessons.yml to what the microscope draws."""
    made = {}
    for name, told in yaml.safe_load((HERE / "lessons.yml").read_text()).items():
        recorded = (
            read_group(group) if "attempts" in told else [_record(**row) for row in told["rows"]]
        )
        only = told.get("attempts", "all")
        made[name] = {
            "records": recorded if only == "all" else [recorded[only]],
            "settings": told["settings"],
        }
    return made


def _record(name: str, tokens: list[str], **told: list[Any]) -> dict[str, Any]:
    """Describe an attempt like a line of rollouts/*.jsonl."""
    mask = told.get("mask", [1] * len(tokens))
    logprobs = [math.log(p) for p in told.get("probs", [1.0] * len(tokens))]
    row = {"tokens": tokens, "action_mask": mask, "logprobs": logprobs, "rewards": told["rewards"]}
    row |= {name: told[name] for name in ("step_ids", "values") if name in told}
    if "ratios" in told:
        row["later"] = [
            [old + math.log(ratio) for old, ratio in zip(logprobs, told["ratios"], strict=True)]
        ]
    return {
        "name": name,
        "rows": [row],
        "steps": [{"state": state} for state in told.get("states", ())],
    }
