"""Real clients, in environments of their own: nothing is cut, and every token is trained.

`make long PART=agents` installs them and names their Pythons in AGENT_R1_CLIENTS. Here, too, what
the agent reads when it is served: the ids of training.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from agents import (
    PYTHONS,
    SEARCH,
    Client,
    gateway_flow,
    lenient,
    model_of_two_calls,
    note,
    sampler,
)
from api_servers import served_model

from agent_r1 import HermesToolEnv, Sampling, Task, run_episodes, trajectory_rows
from agent_r1_recipes.gateway.agents import Agents

pytestmark = pytest.mark.cluster  # the package openai comes with vLLM

FOLDER = Path(__file__).parent / "clients"
needs_clients = pytest.mark.skipif(not PYTHONS, reason="make long PART=agents installs them")


@pytest.fixture(scope="module")
def model(micro, chat, cloned_weights):
    return model_of_two_calls(micro, chat, cloned_weights)


def play(
    micro,
    chat,
    model,
    agent,
    python,
    rows,
    timeout_s=120.0,
    prepare=None,
    on_start=None,
    on_end=None,
):
    config = lenient(micro.config.env)
    policy = sampler(model, chat)
    if prepare is not None:
        prepare(policy)
    flow = gateway_flow(
        policy,
        chat,
        None,
        lambda row: HermesToolEnv(micro.tools, config),
        max_tokens_per_turn=80,
        timeout_s=timeout_s,
    )
    flow.agents = Agents(agent, python, [])
    tasks = [Task(row, str(n), f"s{n}", n) for n, row in enumerate(rows)]
    try:
        if on_start is not None:
            on_start(flow)
        trajectories = asyncio.run(run_episodes(flow, tasks, Sampling(80), max_concurrent=4))
        if on_end is not None:
            on_end(flow)
        return trajectories, flow
    finally:
        flow.agents.stop()


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


@needs_clients
@pytest.mark.parametrize(
    ("client", "history", "cuts"),
    [
        ("langgraph", "trimmed", {"gateway/cuts_rewritten"}),
        ("langgraph", "summarised", set()),
        ("openai-agents", "trimmed", {"gateway/cuts_rewritten"}),
    ],
)
def test_a_shortened_history_loses_nothing(micro, chat, model, client, history, cuts, monkeypatch):
    """A new beginning is a row of its own, and the turns before it are trained in theirs."""
    monkeypatch.setenv("HISTORY", history)
    file = {"langgraph": "langgraph_agent.py", "openai-agents": "sdk_agent.py"}[client]
    rows = micro.rows("train")[:8]
    agent = f"{FOLDER / file}:answer"
    trajectories, flow = play(micro, chat, model, agent, PYTHONS[client], rows)
    counts, causes = flow.take_counts()
    assert not [t.error for t in trajectories if t.error], causes
    assert counts["gateway/trained_tokens"] == flow.policy.stats.decode_tokens > 0
    found = {name for name in counts if name.startswith("gateway/cuts")}
    assert found == cuts, counts
    row_counts = [len(trajectory_rows(t, 0)) for t in trajectories]
    assert max(row_counts) > 1
    note(**{f"{client.replace('-', '_')}_{history}_rows": sum(row_counts)})


def slow_down(policy, seconds):
    """Let the first turn of every second episode take longer than its client waits."""
    generate = policy.generate
    seen = []

    async def slow(prompt_ids, sampling, session=None):
        generation = await generate(prompt_ids, sampling, session)
        if session not in seen:
            seen.append(session)
            if len(seen) % 2:
                await asyncio.sleep(seconds)
        return generation

    policy.generate = slow


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["0", pytest.param("1", marks=needs_clients)])
def test_an_impatient_client_loses_nothing(micro, chat, model, streams, monkeypatch):
    """It hangs up, asks again, and gets the turn that was sampled meanwhile."""
    monkeypatch.setenv("PATIENCE", "0.8")
    monkeypatch.setenv("STREAM", streams)
    agent = f"{FOLDER / 'openai_agent.py'}:answer"
    rows = micro.rows("train")[:6]
    trajectories, flow = play(
        micro,
        chat,
        model,
        agent,
        PYTHONS.get("openai"),
        rows,
        prepare=lambda policy: slow_down(policy, 1.5),
    )
    counts, causes = flow.take_counts()
    assert not [t.error for t in trajectories if t.error], causes
    assert counts["gateway/retries"] >= 3
    assert counts["gateway/trained_tokens"] == flow.policy.stats.decode_tokens > 0
    assert not [name for name in counts if name.startswith("gateway/cuts")], counts
    assert {len(trajectory_rows(t, 0)) for t in trajectories} == {1}
    note(**{f"retries_{'stream' if streams == '1' else 'plain'}": counts["gateway/retries"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["kill", pytest.param("exit", marks=needs_clients), pytest.param("raise", marks=needs_clients)],
)
def test_a_client_that_dies_loses_its_own_episode_only(micro, chat, model, how, monkeypatch):
    monkeypatch.setenv("DIES", how)
    agent = f"{FOLDER / 'openai_agent.py'}:answer"
    rows = micro.rows("train")[:9]
    dying = [row for row in rows if row["extra_info"]["index"] % 3 == 0]
    trajectories, flow = play(micro, chat, model, agent, PYTHONS.get("openai"), rows)
    counts, _ = flow.take_counts()
    errors = [t.error for t in trajectories if t.error]
    assert len(errors) == counts["gateway/failures"] == len(dying) > 0
    words = {"kill": "exit code -9", "exit": "exit code 7", "raise": "no luck"}[how]
    assert all(words in error for error in errors)
    lost = counts["gateway/failed_tokens"]
    assert counts["gateway/trained_tokens"] + lost == flow.policy.stats.decode_tokens
    assert lost > 0 and not counts["gateway/undelivered_tokens"]


def cpu_of(process: int) -> float:
    """Return the CPU seconds of a process and of its ended children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


@needs_clients
@pytest.mark.parametrize("client", ["openai", "langgraph", "openai-agents"])
def test_where_the_cpu_time_of_a_call_goes(micro, chat, model, client):
    """Time the sampler, the gateway with the environment, and the agents' processes apart."""
    file = {"langgraph": "langgraph_agent.py", "openai-agents": "sdk_agent.py"}.get(client)
    agent = f"{FOLDER / file if file else FOLDER.parents[1] / 'example_agent.py'}:answer"
    seconds = {"sampler": 0.0}
    before = {}

    def prepare(policy):
        for name in ("_prefill", "_decode"):
            setattr(policy, name, timed(getattr(policy, name)))

    def timed(work):
        def run(*words):
            begin = time.process_time()
            work(*words)
            seconds["sampler"] += time.process_time() - begin

        return run

    def on_start(flow):
        flow.agents.start()
        before["agents"] = cpu_of(flow.agents._process.pid)
        before["here"] = time.process_time()

    def on_end(flow):
        seconds["agents"] = cpu_of(flow.agents._process.pid) - before["agents"]
        seconds["here"] = time.process_time() - before["here"]

    rows = micro.rows("train")[:12] * 4
    trajectories, flow = play(
        micro, chat, model, agent, PYTHONS.get(client), rows, 120.0, prepare, on_start, on_end
    )
    calls = flow.take_counts()[0]["gateway/calls"]
    gateway = 1000 * (seconds["here"] - seconds["sampler"]) / calls
    assert gateway < 5
    name = client.replace("-", "_")
    note(
        **{
            f"{name}_ms_per_call_sampler": round(1000 * seconds["sampler"] / calls, 1),
            f"{name}_ms_per_call_gateway": round(gateway, 1),
            f"{name}_ms_per_call_agent": round(1000 * seconds["agents"] / calls, 1),
            f"{name}_ms_per_episode_agent": round(1000 * seconds["agents"] / len(rows), 1),
        }
    )


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
