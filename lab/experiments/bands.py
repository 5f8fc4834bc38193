"""Write the figures of healthy runs into lesson 9 and docs/lab/bands.md.

    python lab/experiments/bands.py "small, grpo=runs/small-grpo" ...   # record runs in
                                                                        # docs/lessons/bands.json
    python lab/experiments/bands.py                                     # write both tables from it

bands.json has the first 4 and the last 8 lines of `metrics.jsonl` and both eval cards.
tests/test_lessons.py compares the tables with it. Every metric of the local loop in docs/metrics.md
must have a line.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
LESSON, LAB, BANDS = (
    DOCS / "lessons" / "09-curves.md",
    DOCS / "lab" / "bands.md",
    DOCS / "lessons" / "bands.json",
)
CARD = ("em", "mean_tool_calls", "invalid_call_rate", "search_rate")


def read_run(run: Path) -> dict[str, Any]:
    """Read the figures of the tables from a run's folder, in four digits."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    cards = {
        name: json.loads((run / f"{name}.json").read_text()) for name in ("eval_before", "eval")
    }
    short = [{k: float(f"{v:.4g}") for k, v in line.items()} for line in lines]
    seconds = math.fsum(line["timing_s/step"] for line in lines) / len(lines)
    return {
        "steps": len(lines), "seconds": round(seconds, 2), "first": short[:4], "last": short[-8:],
        **{name: {key: card[key] for key in CARD} for name, card in cards.items()},
    }  # fmt: skip


def read_metrics_page() -> list[tuple[list[str], str, str]]:
    """Read docs/metrics.md: names or patterns, the engines that write them, healthy values."""
    lines = re.findall(
        r"^\| (`.+?) \| ([LV][^|]*?) \| [^|]* \|([^|]*)\|$",
        (DOCS / "metrics.md").read_text(),
        re.MULTILINE,
    )
    return [
        (re.findall(r"`([^`]+)`", names), where, healthy.strip()) for names, where, healthy in lines
    ]


def run_table(bands: dict[str, dict[str, Any]]) -> str:
    """Return the lesson's table, in Markdown: one line per run, from its eval cards."""
    out = [
        "| preset, algorithm | exact match | calls per question | invalid share | search rate | "
        "seconds per step |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in bands.items():
        cells = [f"{run['eval_before'][key]:.3g} → {run['eval'][key]:.3g}" for key in CARD]
        out.append(f"| {name} | {' | '.join(cells)} | {run['seconds']:.1f} |")
    return "\n".join(out)


def metric_table(bands: dict[str, dict[str, Any]]) -> str:
    """Return the lab's table: one line per metric of the local loop."""
    out = [f"| metric | healthy | {' | '.join(bands)} |", "|---|---|" + "---|" * len(bands)]
    for names, where, healthy in read_metrics_page():
        if "L" not in where.split():
            continue
        keys = dict.fromkeys(
            k for run in bands.values() for line in run["first"] + run["last"] for k in line
        )
        for key in dict.fromkeys(
            key for name in names for key in (fnmatch.filter(keys, name) or [name])
        ):
            cells = (_band(run, key) for run in bands.values())
            line = f"| `{key}` | {healthy} | {' | '.join(cells)} |"
            out += [line] * (not any(row.startswith(f"| `{key}` ") for row in out))
    return "\n".join(out)


def _band(run: dict[str, Any], key: str) -> str:
    """Format the means over the first and last steps; a missing stop reason is 0."""
    parts = [run["first"], run["last"]]
    if not any(key in line for part in parts for line in part):
        return ""
    values_of_part = [
        [line.get(key, 0.0) for line in part if key in line or key.startswith("stop/")]
        for part in parts
    ]
    return " → ".join(
        _short(math.fsum(values) / len(values)) if values else "–" for values in values_of_part
    )


def _short(value: float) -> str:
    """Format a number with three significant digits, so that 3e-05 is not 0."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(*runs: str) -> None:
    bands = json.loads(BANDS.read_text()) if BANDS.exists() else {}
    bands |= {name: read_run(Path(folder)) for name, folder in (run.split("=") for run in runs)}
    parts = ",\n".join(f'"{name}": {json.dumps(run)}' for name, run in bands.items())
    BANDS.write_text("{\n" + parts + "\n}\n")
    for page, table in ((LESSON, run_table(bands)), (LAB, metric_table(bands))):
        text, begin, end = page.read_text(), "<!-- bands -->\n", "<!-- end of bands -->"
        before, after = text.split(begin)[0], text.split(end)[1]
        page.write_text(f"{before}{begin}\n{table}\n\n{end}{after}")


if __name__ == "__main__":
    main(*sys.argv[1:])
