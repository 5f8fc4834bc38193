"""Write the board of records into README.md: `python -m agent_r1_recipes.browser.board`.

In: the files of records/, whose names begin with a date. Out: the table of README.md. A record that
has the track and the recipe of an earlier one is listed as its copy. A record of another binary can
no longer be run again. It is listed as such, after the others: its start may have been another one.

Run it after a record was merged. CI ran the record again before that, and
`make long PART=browser_records` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

from agent_r1 import write_whole
from agent_r1_recipes.browser.build import hashes
from agent_r1_recipes.browser.record import (
    RECORDS,
    RUNS,
    TRACKS,
    Record,
    lower_bound,
    read_record,
    same_recipe,
)

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- board -->", "<!-- end of board -->"
UNITS = {"episodes": "episodes", "flops": "FLOPs"}


def board(folder: Path = RECORDS) -> str:
    """Return the table, the lowest cost of each track first.

    Records that can be run again come before the others.
    """
    records = [read_record(file) for file in sorted(folder.glob("*.json"))]
    lines = [
        "| track | cost | score (lower bound) | name | recipe | recipes tried |",
        "|---|---|---|---|---|---|",
    ]
    for track in TRACKS:
        members = [record for record in records if record["track"] == track]
        # Equal costs: the earlier one.
        for record in sorted(members, key=lambda one: (is_old(one), one["cost"])):
            lines.append(row(record, records))
    return "\n".join(lines)


def is_old(record: Record) -> bool:
    """Return whether a record was made with another binary than today's."""
    return record["binary"] != hashes()["binary"]


def row(record: Record, records: list[Record]) -> str:
    """Return a record's line of the table."""
    track = record["track"]
    right = sum(run["right"] for run in record["runs"])
    questions = RUNS * TRACKS[track]
    score = f"{right / questions:.3f} ({lower_bound(right, questions):.3f})"
    cost = f"{record['cost']:.3g}" if track == "flops" else str(record["cost"])
    original = next(other for other in records if same_recipe(other, record))
    name = (
        record["name"] if original is record else f"{record['name']}, a copy of {original['name']}"
    )
    if is_old(record):
        name += " (made with another binary)"
    settings = ", ".join(f"{key} {value:g}" for key, value in record["recipe"].items())
    tuning = record.get("tried", "not told")
    return f"| {track} | {cost} {UNITS[track]} | {score} | {name} | {settings} | {tuning} |"


def main() -> None:
    before, rest = README.read_text().split(BEGIN)
    write_whole(README, f"{before}{BEGIN}\n\n{board()}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
