"""Proof: our own model on our own server plays as it does in this process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from agents import StrictEnv, model_of_two_calls, sampler
from api_servers import api_flow, served_model
from conftest import make_env_loop

from agent_r1 import HermesToolEnv, Sampling, Task, run_episodes
from agent_r1_recipes.gateway.serving import Server

FIGURES = os.environ.get("AGENT_R1_FIGURES")
KEY = "k" * 20


class Recording:
    """A policy that keeps what it read and sampled."""

    def __init__(self, policy):
        self.policy = policy
        self.calls = []

    async def generate(self, prompt_ids, sampling, session=None):
        generation = await self.policy.generate(prompt_ids, sampling, session)
        self.calls.append((list(prompt_ids), generation.token_ids, generation.finish_reason))
        return generation

    def release(self, session):
        self.policy.release(session)


def transcript(trajectory, chat):
    """What the model wrote and read, and what it earned."""
    turns = []
    for step in trajectory.steps:
        results = [call["content"] for call in step.info.get("tool_calls", ())]
        turns.append((chat.turn_text(step.action_ids), step.finish_reason, results))
    return turns, trajectory.stop_reason, trajectory.reward, trajectory.metrics


def without_blanks(trajectory):
    """A server returns no blanks at the ends of a text."""
    turns, *rest = trajectory
    return [(text.replace("\n", "").strip(), *others) for text, *others in turns], *rest


def compare(micro, chat, model, rows, world, tmp_path, monkeypatch):
    """Play rows greedily, one at a time, here and through the API; return both."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def make_env(row):
        return world(micro.tools, micro.config.env)

    def play(flow):
        tasks = [Task(row, str(n), f"eval-0-{n}") for n, row in enumerate(rows)]
        return asyncio.run(run_episodes(flow, tasks, Sampling(64, 0.0), max_concurrent=1))

    ours = Recording(sampler(model, chat))
    loop = make_env_loop(ours, make_env, chat, max_tokens_per_turn=64, max_context=500)
    local = play(loop)
    theirs = Recording(sampler(model, chat))
    sizes = {"max_tokens_per_turn": 64, "max_context": 500}
    rollout = micro.config.rollout.model_copy(update=sizes)
    config = micro.config.model_copy(update={"rollout": rollout})
    with (
        served_model(theirs, chat, micro.tools, config, KEY) as (url, _),
        api_flow(url, tmp_path, chat, make_env) as flow,
    ):
        remote = play(flow)
    return local, remote, ours.calls, theirs.calls


def test_greedy_transcripts_are_equal(micro, chat, cloned_model, tmp_path, monkeypatch):
    rows = micro.rows("test")
    rows += micro.rows("train")[:8]
    local, remote, ours, theirs = compare(
        micro, chat, cloned_model, rows, HermesToolEnv, tmp_path, monkeypatch
    )
    assert ours == theirs, "the same prompts, and the same sampled ids"
    left = [without_blanks(transcript(t, chat)) for t in local]
    right = [without_blanks(transcript(t, chat)) for t in remote]
    assert left == right
    calls = [call for t in local for step in t.steps for call in step.info.get("tool_calls", ())]
    assert sum(call["ok"] for call in calls) > 3


@pytest.mark.skipif(not FIGURES, reason="takes a minute: make long PART=agents")
def test_200_greedy_transcripts_are_equal(micro, chat, cloned_weights, tmp_path, monkeypatch):
    from conftest import tiny_model

    rows = [row for split in ("cold", "train", "val", "test") for row in micro.rows(split)]
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    model.load_state_dict(cloned_weights)
    two = model_of_two_calls(micro, chat, cloned_weights)
    played = 0
    calls = 0
    for number, (network, some) in enumerate(((model, rows[:150]), (two, rows[-50:]))):
        local, remote, ours, theirs = compare(
            micro, chat, network, some, StrictEnv, tmp_path / str(number), monkeypatch
        )
        assert ours == theirs
        for left, right in zip(local, remote, strict=True):
            both = [without_blanks(transcript(t, chat)) for t in (left, right)]
            assert both[0] == both[1]
        played += len(local)
        calls += len(theirs)
    assert played == 200
    file = Path(FIGURES)
    known = json.loads(file.read_text()) if file.exists() else {}
    figures = {"equal_transcripts_of_an_api": played, "calls_of_an_api": calls}
    file.write_text(json.dumps(known | figures))


def test_a_server_forgets_old_conversations_and_answers_all_the_same(
    micro, chat, cloned_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("agent_r1_recipes.gateway.serving.MOST_CONVERSATIONS", 0)
    rows = micro.rows("test")[:3]
    _, remote, ours, theirs = compare(
        micro, chat, cloned_model, rows, HermesToolEnv, tmp_path, monkeypatch
    )
    # Each later turn has the model's own words as data, and no longer as its ids.
    assert len(remote) == 3 and ours != theirs


def test_who_has_no_key_gets_nothing(micro, chat, cloned_model):
    import httpx

    with served_model(sampler(cloned_model, chat), chat, micro.tools, micro.config) as (url, here):
        assert isinstance(here, Server)
        body = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "seed": 3}
        with httpx.Client(trust_env=False, base_url=url) as client:
            assert client.post("/chat/completions", json=body).status_code == 401
            mine = {"authorization": f"Bearer {here.key}"}
            first = client.post("/chat/completions", json=body, headers=mine).json()
            again = client.post("/chat/completions", json=body, headers=mine).json()
            names = [reply["choices"][0]["message"]["tool_calls"][0] for reply in (first, again)]
            assert names[0]["function"] == names[1]["function"] and names[0] != names[1]
            hot = body | {"temperature": "hot"}
            assert client.post("/chat/completions", json=hot, headers=mine).status_code == 400
            assert client.get("/models", headers=mine).json()["data"][0]["id"] == "agent"
            root = url.removesuffix("/v1")
            tool = client.post(f"{root}/key/{here.key}/tools/search", json={"query": "x"})
            assert tool.json()["ok"] in (True, False)
            wrong = client.post(f"{root}/key/wrong/tools/search", json={})
            assert wrong.status_code == 401
            assert client.post("/responses", json={}, headers=mine).status_code == 404
