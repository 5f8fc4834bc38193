"""The cold start plays through the gateway: it clones the ids of training."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from agents import SEARCH, demonstration, gateway_flow, lenient, sequences
from building import demonstrated, row_of
from conftest import ScriptedPolicy, question_row

from agent_r1 import HermesToolEnv, Sampling, Task, load_config, run_episodes, trajectory_rows
from agent_r1_recipes.support.tasks import POLICY, questions

pytestmark = pytest.mark.cluster  # the package openai comes with vLLM

SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "Who founded Vexlor?"}


def write(row, history, rng):
    """Search, then answer with what was found; an agent sees no thought."""
    turns = [message["content"] for message in history if message["role"] == "assistant"]
    if not turns:
        call = '{"name": "search", "arguments": {"query": "Vexlor"}}'
        return f"<think>look</think><tool_call>\n{call}\n</tool_call>"
    assert turns[-1].startswith("<think>look</think>") or turns[-1] == "a summary"
    return "<think>found</think><answer>Marn</answer>"


async def plain(client, task):
    messages = [SYSTEM, USER]
    message = (await client.ask(messages, tools=[SEARCH]))["message"]
    messages += [message, *await client.results(message)]
    await client.ask(messages, tools=[SEARCH])


async def summarising(client, task):
    message = (await client.ask([SYSTEM, USER], tools=[SEARCH]))["message"]
    await client.results(message)
    own = {"role": "assistant", "content": "a summary"}
    await client.ask([SYSTEM, USER, own, USER], tools=[SEARCH])


@pytest.mark.parametrize("agent", [plain, summarising])
def test_the_cold_start_clones_the_ids_of_training(agent, micro, chat):
    played, trajectory = demonstration(micro, agent, write)
    assert trajectory.reward == 1.0
    cloned = sequences(played, chat, 500, HermesToolEnv.dialect)
    script = [write(None, [], None), "<think>found</think><answer>Marn</answer>"]
    env = lenient(micro.config.env)
    flow = gateway_flow(
        ScriptedPolicy(chat, script),
        chat,
        agent,
        lambda row: HermesToolEnv(micro.tools, env),
        "rollout.agent_losses=1",
    )
    tasks = [Task(question_row(), "0", "s", 5)]
    [trained] = asyncio.run(run_episodes(flow, tasks, Sampling(200)))
    expected = trajectory_rows(trained, 0)
    assert chat.decode(expected[-1].input_ids).startswith("<|im_start|>system\nBe short.")
    assert [row.input_ids for row in cloned] == [row.input_ids for row in expected]
    assert [row.action_mask for row in cloned] == [row.action_mask for row in expected]
    if agent is summarising:  # the agent's own words are no turn of the model
        [row] = cloned
        pairs = zip(row.input_ids, row.action_mask, strict=True)
        assert "a summary" in chat.decode(row.input_ids)
        assert "a summary" not in chat.decode([token for token, mask in pairs if mask])


def test_a_fault_of_the_demonstrator_is_named(micro):
    def broken(row, history, rng):
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        demonstration(micro, plain, broken)


@pytest.mark.slow
def test_a_demonstrator_of_a_preset_plays_with_an_agent(tmp_path):
    """The whole way of the cold start, with the file of recipes/support in its own processes."""
    agent = Path(__file__).parents[2] / "support" / "agent.py"
    config = load_config("support", [f"rollout.agent={agent}:answer"], algorithm="grpo")
    rows = [row_of(task, config.env.name) for task in questions("train", 6, random.Random(0))]
    played = demonstrated(config, rows)
    assert len(played) == 6
    for episode in played:
        assert episode.messages[0] == {"role": "system", "content": POLICY}
        names = [tool["function"]["name"] for tool in episode.tools]
        assert names == ["look_up", "refund", "replace"]
        assert episode.messages[-1]["content"].endswith("</answer>")
