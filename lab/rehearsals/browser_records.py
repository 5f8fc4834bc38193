"""Run each record of recipes/browser again, and compare hashes, scores and costs.

A record of twenty steps takes about five CPU minutes.
"""

from __future__ import annotations

from typing import Any

from agent_r1_recipes.browser import record, world


def run() -> dict[str, Any]:
    header = world.header()
    figures: dict[str, Any] = {}
    for file in sorted(record.RECORDS.glob("*.json")):
        own_record = record.read_record(file)
        figures[own_record["name"]] = record.check(own_record, header)
        print(f"  {own_record['name']}: {figures[own_record['name']]}", flush=True)
    assert figures, "there is no record"
    return figures
