"""The proofs at full size, and the gateway's own time: run by `make long PART=agents`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from agents import gateway_flow, model_of_two_calls
from conftest import ScriptedPolicy, question_row
from hostile_client import play_hostile
from same_episodes import KINDS, both, numbers

from agent_r1 import HermesToolEnv, Sampling, Task, run_episodes

FIGURES = os.environ.get("AGENT_R1_FIGURES")
pytestmark = pytest.mark.skipif(not FIGURES, reason="takes minutes: make long PART=agents")

EPISODES = {"search": 400, "fresh": 50, "long-winded": 50}
CALLS = 1000
CLIENT = """
import http.client, json, os, sys
address = os.environ["OPENAI_BASE_URL"].split("/", 3)
connection = http.client.HTTPConnection(address[2])
body = json.dumps({"messages": [{"role": "user", "content": "Who founded Vexlor?"}]})
for number in range(int(sys.argv[1])):
    connection.request("POST", "/" + address[3] + "/chat/completions", body)
    assert connection.getresponse().read()
"""


def note(**figures):
    """Add figures for the rehearsal."""
    file = Path(FIGURES)
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | figures))


def test_500_episodes_are_equal_to_the_bit(micro, chat, cloned_weights):
    model = model_of_two_calls(micro, chat, cloned_weights)
    rows = micro.rows("train")
    played = 0
    parallel = 0
    for kind in KINDS:
        for begin in range(0, EPISODES[kind] // 2, len(rows)):
            some = rows[: min(len(rows), EPISODES[kind] // 2 - begin)]
            ours, theirs, flow = both(kind, micro, chat, model, some, seed=begin)
            assert numbers(ours) == numbers(theirs)
            counts, _ = flow.take_counts()
            assert counts["gateway/trained_tokens"] == flow.policy.stats.decode_tokens
            played += len(ours)
            for trajectory in theirs:
                calls = [len(step.info["tool_calls"]) for step in trajectory.steps]
                parallel += max(calls, default=0) > 1
    assert played == 500
    note(episodes=played, with_parallel_calls=parallel)


def test_1000_hostile_conversations(micro, chat):
    figures = play_hostile(micro, chat, 1000, seed=100)
    assert figures["cuts"] == figures["cuts_expected"] > 0, figures
    assert figures["sampled"] == figures["accounted"] > 0
    note(**{name: value for name, value in figures.items() if isinstance(value, int)})


def test_the_time_of_a_call(micro, chat):
    """Measure the gateway's CPU time alone: the policy is scripted, the client another process."""
    policy = ScriptedPolicy(chat, lambda session, turn, ids: "<answer>Marn</answer>")

    async def agent(client, task):
        environment = os.environ | client.variables
        words = [sys.executable, "-c", CLIENT, str(CALLS)]
        process = await asyncio.create_subprocess_exec(*words, env=environment)
        begin = time.process_time()
        assert await process.wait() == 0
        agent.seconds = time.process_time() - begin

    def make_env(row):
        return HermesToolEnv(micro.tools, micro.config.env)

    flow = gateway_flow(policy, chat, agent, make_env, timeout_s=300.0)
    tasks = [Task(question_row(), "0", "s", 5)]
    asyncio.run(run_episodes(flow, tasks, Sampling(40)))
    milliseconds = 1000 * agent.seconds / CALLS
    assert milliseconds < 5
    note(gateway_ms_per_call=round(milliseconds, 2))
