"""Real clients, in environments of their own: nothing is cut, and every token is trained.

`make long PART=agents` installs them and names their Pythons in AGENT_R1_CLIENTS. Here, too, what
the agent reads when it is served: the ids of training.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from agents import SEARCH, Client, gateway_flow, lenient, model_of_two_calls, sampler
from api_servers import served_model

from agent_r1 import HermesToolEnv, Sampling, Task, run_episodes, trajectory_rows
from agent_r1_recipes.gateway.agents import Agents

PYTHONS = json.loads(os.environ.get("AGENT_R1_CLIENTS", "{}"))
FOLDER = Path(__file__).parent / "clients"
needs_clients = pytest.mark.skipif(not PYTHONS, reason="make long PART=agents installs them")


@pytest.fixture(scope="module")
def model(micro, chat, cloned_weights):
    return model_of_two_calls(micro, chat, cloned_weights)


def play(micro, chat, model, agent, python, rows, timeout_s=120.0):
    config = lenient(micro.config.env)
    flow = gateway_flow(
        sampler(model, chat),
        chat,
        None,
        lambda row: HermesToolEnv(micro.tools, config),
        max_tokens_per_turn=80,
        timeout_s=timeout_s,
    )
    flow.agents = Agents(agent, python, [])
    tasks = [Task(row, str(n), f"s{n}", n) for n, row in enumerate(rows)]
    try:
        return asyncio.run(run_episodes(flow, tasks, Sampling(80), max_concurrent=4)), flow
    finally:
        flow.agents.stop()


def note(**figures):
    """Add figures for the rehearsal."""
    name = os.environ.get("AGENT_R1_FIGURES")
    if name:
        file = Path(name)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | figures))


@needs_clients
@pytest.mark.parametrize("streams", ["0", "1"])
@pytest.mark.parametrize("client", ["langgraph", "openai-agents", "curl"])
def test_a_real_client_loses_nothing(micro, chat, model, client, streams, monkeypatch):
    monkeypatch.setenv("STREAM", streams)
    agent = {
        "langgraph": f"{FOLDER / 'langgraph_agent.py'}:answer",
        "openai-agents": f"{FOLDER / 'sdk_agent.py'}:answer",
        "curl": f"bash {FOLDER / 'curl_agent.sh'}",
    }[client]
    rows = micro.rows("train")[:8]
    trajectories, flow = play(micro, chat, model, agent, PYTHONS.get(client), rows)
    counts, causes = flow.take_counts()
    assert not [t.error for t in trajectories if t.error]
    assert counts["gateway/trained_tokens"] == flow.policy.stats.decode_tokens > 0
    assert not [name for name in counts if name.startswith("gateway/cuts")], (counts, causes)
    # One conversation is one row: nothing was cut, and everything was continued.
    assert {len(trajectory_rows(t, 0)) for t in trajectories} == {1}
    calls = [len(step.info["tool_calls"]) for t in trajectories for step in t.steps]
    if client != "curl":
        assert max(calls) > 1 and max(len(t.steps) for t in trajectories) > 1
    name = f"{client.replace('-', '_')}_{'stream' if streams == '1' else 'plain'}_turns"
    note(**{name: len(calls)})


async def greedy_agent(client: Client, task: dict) -> None:
    """Search until an answer comes, greedily, in three turns at most."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        choice = await client.ask(messages, tools=[SEARCH], temperature=0)
        message = choice["message"]
        if choice["finish_reason"] == "length" or not message.get("tool_calls"):
            return
        messages.append({"role": "assistant", "tool_calls": message["tool_calls"]})
        messages += await client.results(message)


def test_a_served_model_reads_the_ids_of_training(micro, chat, model):
    """Play an agent in training and on the server: equal prompts, equal answers."""
    rows = micro.rows("test")[:6]
    config = lenient(micro.config.env)
    trained = gateway_flow(
        sampler(model, chat),
        chat,
        greedy_agent,
        lambda row: HermesToolEnv(micro.tools, config),
        max_tokens_per_turn=80,
    )
    tasks = [Task(row, str(n), f"s{n}", n) for n, row in enumerate(rows)]
    trajectories = asyncio.run(run_episodes(trained, tasks, Sampling(80, 0.0), max_concurrent=1))
    in_training = []
    for trajectory in trajectories:
        in_training += [(step.observation_ids, step.action_ids) for step in trajectory.steps]

    policy = sampler(model, chat)
    in_serving = []
    generate = policy.generate

    async def recorded(prompt_ids, sampling, session=None):
        generation = await generate(prompt_ids, sampling, session)
        if session is None:  # `LocalPolicy` calls itself with a session of its own
            in_serving.append((list(prompt_ids), generation.token_ids))
        return generation

    policy.generate = recorded
    sizes = {"max_tokens_per_turn": 80, "max_context": 500}
    rollout = micro.config.rollout.model_copy(update=sizes)
    served = micro.config.model_copy(update={"rollout": rollout, "env": config})

    async def play_all(url, key):
        base = url.removesuffix("/v1")
        for row in rows:
            client = Client(
                {
                    "OPENAI_BASE_URL": url,
                    "OPENAI_API_KEY": key,
                    "AGENT_R1_TOOLS_URL": f"{base}/key/{key}/tools",
                }
            )
            await greedy_agent(client, {"question": row["prompt"][-1]["content"]})
            await client.http.aclose()

    with served_model(policy, chat, micro.tools, served) as (url, server):
        asyncio.run(play_all(url, server.key))
    assert in_serving == in_training and len(in_serving) > len(rows)
