"""Requests that published clients sent, replayed: each turn is continued, and trained.

recorded/NAME.json has the client's version, the model's turns, and the requests that followed. In
the requests, ID0, ID1 ... stand for the ids of calls in the order in which we issue them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from agents import gateway_flow, lenient
from conftest import ScriptedPolicy, question_row

from agent_r1 import HermesToolEnv, Sampling, Task, trajectory_rows

RECORDS = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_a_recorded_client_is_trained_on_all_that_was_sampled(file, micro, chat):
    record = json.loads(file.read_text())
    ids: list[str] = []

    async def agent(client, task):
        for request in record["requests"]:
            text = json.dumps(request)
            for number, key in enumerate(ids):
                text = text.replace(f"ID{number}", key)
            reply = await client.post(json.loads(text))
            assert reply.status_code == 200, reply.text
            if request.get("stream"):
                events = reply.text.split("data: ")[1:-1]
                deltas = [json.loads(one)["choices"] for one in events]
                parts = [choices[0]["delta"] for choices in deltas if choices]
            else:
                parts = [reply.json()["choices"][0]["message"]]
            ids.extend(call["id"] for part in parts for call in part.get("tool_calls") or ())
        return record["answer"]

    env = lenient(micro.config.env)
    flow = gateway_flow(
        ScriptedPolicy(chat, record["turns"]), chat, agent,
        lambda row: HermesToolEnv(micro.tools, env), max_context=100_000,
    )  # fmt: skip
    trajectory = asyncio.run(flow.run(Task(question_row(), "0", "s", 5), Sampling(400)))
    assert trajectory.error is None, trajectory.error
    counts = flow.counts
    sampled = sum(len(step.action_ids) for step in trajectory.steps)
    assert counts["gateway/trained_tokens"] == sampled and len(trajectory.steps) == len(
        record["turns"]
    )
    assert not [name for name in counts if name.startswith("gateway/cuts")], counts
    assert len(trajectory_rows(trajectory, 0)) == 1 and trajectory.reward == 1.0
    assert counts["gateway/unmet_tool_choice"] == record.get("unmet_tool_choice", 0)


def test_the_table_of_the_page_is_that_of_the_records():
    page = (Path(__file__).parents[1] / "README.md").read_text()
    packages = set()
    for file in RECORDS:
        record = json.loads(file.read_text())
        package, version = record["client"].split()
        packages.add(package)
        tokens = f"{record['tokens']} of {record['tokens']}"
        row = f"| `{file.stem}` | {package} | {version} | {record['recorded']} | {tokens} |"
        assert row in page
    assert packages == {
        "openai", "openai-agents", "langgraph", "litellm", "pydantic-ai-slim", "smolagents",
    }  # fmt: skip
    assert len([line for line in page.splitlines() if " of " in line and "2026" in line]) == len(
        RECORDS
    )
