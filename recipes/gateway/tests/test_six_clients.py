"""Six published clients, each in its own environment, play one scripted episode and train whole.

`make long PART=agents` installs them, and names their Pythons in AGENT_R1_CLIENTS. The same run
writes recorded/*.json, which tests/test_recorded_clients.py replays without them, if
AGENT_R1_RECORDINGS names a folder.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import subprocess
from pathlib import Path

import pytest
from agents import PYTHONS, gateway_flow, lenient, note
from conftest import ScriptedPolicy, call, question_row

from agent_r1 import HermesToolEnv, Sampling, Task, run_episodes
from agent_r1_recipes.gateway import episode as gateway_episode
from agent_r1_recipes.gateway.agents import Agents

FOLDER = Path(__file__).parent / "clients"
BOTH = f"<think>a</think>{call(query='Vexlor')}{call(query='Marn')}"
ANSWER = "<answer>Marn</answer>"
TYPED = '<tool_call>\n{"name": "final_result", "arguments": {"name": "Marn"}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "Marn"}}\n</tool_call>'
PLAYS = {
    "openai": ("openai", "openai_agent.py", {}, [BOTH, ANSWER]),
    "openai_stream": ("openai", "openai_agent.py", {"STREAM": "1"}, [BOTH, ANSWER]),
    "openai_agents": ("openai-agents", "sdk_agent.py", {}, [BOTH, ANSWER]),
    "openai_agents_stream": ("openai-agents", "sdk_agent.py", {"STREAM": "1"}, [BOTH, ANSWER]),
    "langgraph": ("langgraph", "langgraph_agent.py", {}, [BOTH, ANSWER]),
    "langgraph_stream": ("langgraph", "langgraph_agent.py", {"STREAM": "1"}, [BOTH, ANSWER]),
    "litellm": ("litellm", "litellm_agent.py", {}, [BOTH, ANSWER]),
    "litellm_stream": ("litellm", "litellm_agent.py", {"STREAM": "1"}, [BOTH, ANSWER]),
    "pydantic_ai": ("pydantic-ai-slim", "pydantic_agent.py", {}, [BOTH, ANSWER]),
    "pydantic_ai_typed": (
        "pydantic-ai-slim", "pydantic_agent.py", {"TYPED": "1"}, [BOTH, "I think so", TYPED],
    ),
    "smolagents": ("smolagents", "smol_agent.py", {}, [BOTH, FINAL]),
}  # fmt: skip
"""Name of a play -> package, agent, its variables, the model's turns."""


@pytest.mark.skipif(not PYTHONS, reason="make long PART=agents installs them")
@pytest.mark.parametrize("name", PLAYS)
def test_a_published_client_is_trained_on_all_that_was_sampled(name, micro, chat, monkeypatch):
    package, file, variables, turns = PLAYS[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    policy = ScriptedPolicy(chat, turns)
    requests: list[str] = []
    ids: list[str] = []
    sampled = count_sampled(policy)
    record_exchanges(monkeypatch, requests, ids)
    env = lenient(micro.config.env)
    flow = gateway_flow(
        policy, chat, None, lambda row: HermesToolEnv(micro.tools, env), max_context=100_000
    )
    flow.agents = Agents(f"{FOLDER / file}:answer", PYTHONS[package], [])
    try:
        tasks = [Task(question_row(), "0", "s", 5)]
        [trajectory] = asyncio.run(run_episodes(flow, tasks, Sampling(400)))
    finally:
        flow.agents.stop()
    assert trajectory.error is None, trajectory.error
    counts, causes = flow.take_counts()
    trained = counts["gateway/trained_tokens"]
    assert trained == sum(sampled) > 0 and len(sampled) == len(turns), causes
    assert not [key for key in counts if key.startswith("gateway/cuts")], (counts, causes)
    assert trajectory.reward == 1.0
    version = version_of(package)
    figures = {"client": f"{package} {version}", "trained": trained, "sampled": sum(sampled)}
    note(**{f"six_{name}": figures})
    if "AGENT_R1_RECORDINGS" in os.environ:
        record = {
            "client": figures["client"],
            "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "turns": turns,
            "answer": "Marn",
            "unmet_tool_choice": counts["gateway/unmet_tool_choice"],
            "tokens": trained,
            "requests": [json.loads(hide(request, ids)) for request in requests],
        }
        place = Path(os.environ["AGENT_R1_RECORDINGS"]) / f"{name}.json"
        place.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def count_sampled(policy: ScriptedPolicy) -> list[int]:
    """Return a list that gets the number of tokens of each turn."""
    sampled: list[int] = []
    generate = policy.generate

    async def counted(*words, **keys):
        generation = await generate(*words, **keys)
        sampled.append(len(generation.token_ids))
        return generation

    policy.generate = counted
    return sampled


def record_exchanges(monkeypatch, requests: list[str], ids: list[str]) -> None:
    """Keep the bodies of requests, and the ids of calls in the order in which we issue them."""
    read, write = gateway_episode.read_call, gateway_episode.answer_body

    def read_and_keep(body):
        requests.append(body.decode())
        return read(body)

    def write_and_keep(turn, *words):
        ids.extend(key for key, _ in turn.calls)
        return write(turn, *words)

    monkeypatch.setattr(gateway_episode, "read_call", read_and_keep)
    monkeypatch.setattr(gateway_episode, "answer_body", write_and_keep)


def hide(request: str, ids: list[str]) -> str:
    for number, key in enumerate(ids):
        request = request.replace(key, f"ID{number}")
    return request


def version_of(package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    words = [PYTHONS[package], "-c", code]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
