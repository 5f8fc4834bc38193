"""Planted faults stop the run, and losses need a setting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from agents import (
    SEARCH,
    StrictEnv,
    agent_rollout,
    gateway_flow,
    lenient,
    sampler,
    search_agent,
)
from conftest import fails_with

from agent_r1 import Sampling, Task, TrainingRow, derive_seed, run_episodes
from agent_r1_recipes.gateway import flow as gateway
from agent_r1_recipes.gateway.books import Audited, runs
from agent_r1_recipes.gateway.episode import GatewayEpisode
from agent_r1_recipes.gateway.matching import Conversations


def step(micro, chat, model, agent=search_agent, *overrides, episodes=24):
    """Play the episodes of a step as the training loop does."""
    policy = sampler(model, chat)
    config = lenient(micro.config.env)
    flow = gateway_flow(policy, chat, agent, lambda row: StrictEnv(micro.tools, config), *overrides)
    tasks = []
    for number, row in enumerate(micro.rows("train")[: episodes // 2]):
        for sample in range(2):
            seed = derive_seed(3, number, sample)
            tasks.append(Task(row, str(number), f"{number}-{sample}", seed))

    def play(_):
        trajectories = asyncio.run(run_episodes(flow, tasks, Sampling(48), max_concurrent=8))
        return SimpleNamespace(played=trajectories, metrics={})

    inner = SimpleNamespace(play=play, episodes=None, policy=policy, flow=flow)
    return Audited(inner, agent_rollout(*overrides)).play(1), policy


def test_every_sampled_token_is_trained(micro, chat, cloned_model):
    played, policy = step(micro, chat, cloned_model)
    metrics = played.metrics
    assert metrics["gateway/trained_tokens"] == policy.stats.decode_tokens > 0
    lost = [metrics[f"gateway/{name}_tokens"] for name in ("undelivered", "edited", "failed")]
    assert lost == [0, 0, 0]


def drop_each_50th_step(patch):
    numbers = iter(range(10**6))
    steps = Conversations.steps

    def fewer(self):
        made, last = steps(self)
        return [one for one in made if next(numbers) % 20 != 9], last

    patch.setattr(Conversations, "steps", fewer)


def forget_each_20th_answer(patch):
    """Forget an answer in the gateway itself, so that only the sampler knows of it."""
    finish = GatewayEpisode.finish
    numbers = iter(range(10**6))

    async def forgets(self):
        await finish(self)
        if next(numbers) % 20 == 9:
            self.conversations.answers.pop()
            self.generations.pop()

    patch.setattr(GatewayEpisode, "finish", forgets)


def shift_the_mask(patch):
    def add(row, ids, logprobs, number):
        row.input_ids += ids
        row.action_mask += [0] + [1] * (len(ids) - 1)
        row.logprobs += logprobs
        row.rewards += [0.0] * len(ids)
        row.step_ids += [number] * len(ids)

    patch.setattr(TrainingRow, "_add_action", add)


def swap_two_episodes(patch):
    enter = gateway.AgentFlow._enter
    before = []

    def swaps(self, trajectory, episode, ended):
        if before:
            trajectory.steps, before[0].steps = before[0].steps, trajectory.steps
        before.append(trajectory)
        enter(self, trajectory, episode, ended)

    patch.setattr(gateway.AgentFlow, "_enter", swaps)


FAULTS = {
    drop_each_50th_step: "rows_differ_from_samples",
    forget_each_20th_answer: "tokens_unaccounted",
    shift_the_mask: "rows_differ_from_samples",
    swap_two_episodes: "rows_differ_from_samples",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_stops_the_first_step(fault, micro, chat, cloned_model, monkeypatch):
    """With all losses allowed, too: a fault of ours is no named loss."""
    fault(monkeypatch)
    with fails_with(FAULTS[fault]):
        step(micro, chat, cloned_model, search_agent, "rollout.agent_losses=1")


async def editing_agent(client, task):
    messages = list(task["messages"])
    message = (await client.ask(messages, tools=[SEARCH]))["message"]
    changed = {"role": "assistant", "content": "I never said that"}
    await client.ask([*messages, changed, {"role": "user", "content": "go on"}], tools=[SEARCH])
    assert message["content"] != changed["content"]


async def dying_agent(client, task):
    await client.ask(task["messages"], tools=[SEARCH])
    if task["index"] == dying_agent.unlucky:
        raise ZeroDivisionError("it divided by zero")


async def slow_agent(client, task):
    await client.ask(task["messages"], tools=[SEARCH])
    if task["index"] == dying_agent.unlucky:
        raise TimeoutError  # as its deadline does, but at this very place on any machine


@pytest.mark.parametrize("agent", [editing_agent, dying_agent], ids=lambda one: one.__name__)
def test_a_loss_needs_a_setting(agent, micro, chat, cloned_model, capsys):
    dying_agent.unlucky = micro.rows("train")[0]["extra_info"]["index"]
    with fails_with("tokens_lost", match="rollout.agent_losses"):
        step(micro, chat, cloned_model, agent)
    played, policy = step(micro, chat, cloned_model, agent, "rollout.agent_losses=0.95")
    metrics = played.metrics
    names = ("trained", "undelivered", "edited", "failed")
    tokens = [metrics[f"gateway/{name}_tokens"] for name in names]
    assert sum(tokens) == policy.stats.decode_tokens and sum(tokens[1:]) > 0
    assert "are not trained" in capsys.readouterr().out


def test_an_agent_that_calls_another_model_fails(micro, chat, cloned_model):
    async def agent(client, task):
        return "an answer from elsewhere"

    with fails_with("episodes_failed", match="no call that the gateway captured"):
        step(micro, chat, cloned_model, agent)


def test_a_time_out_loses_no_token(micro, chat, cloned_model):
    """Check that the sampler finishes what it began, and that the books have it."""
    dying_agent.unlucky = micro.rows("train")[0]["extra_info"]["index"]
    played, policy = step(micro, chat, cloned_model, slow_agent, "rollout.agent_losses=0.9")
    assert played.metrics["gateway/time_outs"] == 2
    assert played.metrics["gateway/failed_tokens"] > 0


def test_runs_are_within_a_step():
    assert runs([0, 1, 1, 1, 0, 1], [-1, 0, 0, 1, -1, 2]) == [(1, 3), (3, 4), (5, 6)]
    assert runs([], []) == []
