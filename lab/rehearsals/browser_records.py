"""Run each record of recipes/browser again, and compare hashes, scores and costs.

A record of twenty steps takes about five CPU minutes. A record of another binary must be refused.
"""

from __future__ import annotations

from typing import Any

from agent_r1 import AgentR1Error
from agent_r1_recipes.browser import board, record, world


def run() -> dict[str, Any]:
    header = world.header()
    figures: dict[str, Any] = {}
    for file in sorted(record.RECORDS.glob("*.json")):
        own_record = record.read_record(file)
        try:
            figures[own_record["name"]] = record.check(own_record, header)
        except AgentR1Error as error:
            assert board.is_old(own_record), error
            figures[own_record["name"]] = str(error)
        print(f"  {own_record['name']}: {figures[own_record['name']]}", flush=True)
    assert figures, "there is no record"
    return figures
