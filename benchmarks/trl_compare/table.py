"""Format the JSON lines of `compare.sh` as a Markdown table, a column per side."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev

from agent_r1.evaluation.reliability import student_quantile


def main(path: Path) -> None:
    sides: dict[str, list[dict]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        sides.setdefault(line["side"], []).append(line)
    steps = {side: [s for line in lines for s in line["seconds"]] for side, lines in sides.items()}
    threads = ", ".join(
        sorted({str(line["threads"]) for lines in sides.values() for line in lines})
    )
    counts = ", ".join(
        f"{side} {len(s)} steps in {len(sides[side])} rounds" for side, s in steps.items()
    )
    print(f"\n{counts}; {threads} threads\n")
    print_row(["seconds per step: mean (least)", *sides])
    print_row(["---"] * (1 + len(sides)))
    for phase in next(iter(steps.values()))[0]:
        times = ([s[phase] for s in steps[side]] for side in sides)
        print_row([phase, *(f"{fmean(t):.3f} ({min(t):.3f})" for t in times)])
    names = dict.fromkeys(
        name for lines in sides.values() for line in lines for name in line["summary"]
    )
    for name in names:
        print_row([name, *(mean_of(lines, name) for lines in sides.values())])
    if len(sides) == 2:
        print(f"\n{ratio_of_steps(*sides.values())}")


def ratio_of_steps(ours: list[dict], theirs: list[dict]) -> str:
    """Return the ratio of mean seconds per step, with Student's 95 % interval over the rounds.

    A round's two sides ran one after the other, so each round gives one ratio. Their logarithms are
    averaged, since twice as long and half as long are equally far from equal.
    """
    seconds = [
        [fmean(step["step"] for step in line["seconds"]) for line in lines]
        for lines in (ours, theirs)
    ]
    logs = [math.log(their / our) for our, their in zip(*seconds, strict=True)]
    return f"ratio of the means: {ratio_text(logs)}"


def ratio_text(logs: list[float]) -> str:
    """Write the geometric mean of ratios with its interval, from the logarithm of each round's."""
    middle = fmean(logs)
    if len(logs) < 2:
        return f"{math.exp(middle):.2f} (one round, so no interval)"
    half = student_quantile(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(middle - half), math.exp(middle + half)
    return f"{math.exp(middle):.2f} (95 % {low:.2f} to {high:.2f} over {len(logs)} rounds)"


def mean_of(lines: list[dict], name: str) -> str:
    """Return the mean over the rounds, or a dash if there is no figure."""
    values = [line["summary"][name] for line in lines if name in line["summary"]]
    return (
        (f"{fmean(values):.3f}" if fmean(values) < 1000 else f"{fmean(values):.0f}")
        if values
        else "-"
    )


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
