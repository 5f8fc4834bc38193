"""Agents for tests of recipes/gateway: coroutines in the test's own event loop that speak HTTP."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from conftest import MicroWorld, clone_steps, question_row, tiny_model

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import byte_chat
from agent_r1.cold_start.demonstrate import Demonstration, sequences
from agent_r1.config import load_config
from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import Action, Observation, Row, Sampling, StepResult, StopReason, Trajectory
from agent_r1.env.hermes import HermesToolEnv
from agent_r1.model.decoder import Decoder
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import Limits, Task
from agent_r1.rollout.rollouts import run_episodes
from agent_r1_recipes.gateway.agents import Ended
from agent_r1_recipes.gateway.demonstrations import DemonstrationFlow
from agent_r1_recipes.gateway.flow import AgentFlow

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for passages about a query.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


PYTHONS: dict[str, str] = json.loads(os.environ.get("AGENT_R1_CLIENTS", "{}"))
"""Package -> the Python that has it: `make long PART=agents` installs them."""


def note(**figures):
    """Add figures for `make long PART=agents`."""
    name = os.environ.get("AGENT_R1_FIGURES")
    if name:
        file = Path(name)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | figures))


class Client:
    """The smallest client of the gateway."""

    def __init__(self, variables: dict[str, str]):
        self.variables = variables
        self.base = variables["OPENAI_BASE_URL"]
        self.http = httpx.AsyncClient(
            trust_env=False,
            timeout=60.0,
            headers={"authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
        )

    async def post(self, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(f"{self.base}/chat/completions", json=body, headers=headers)

    async def ask(self, messages: list[dict], **more: Any) -> dict[str, Any]:
        """Return the first choice."""
        body = {"model": "agent", "messages": messages} | more
        reply = await self.post(body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    async def tool(self, name: str, arguments: dict[str, Any]) -> str:
        reply = await self.http.post(
            f"{self.variables['AGENT_R1_TOOLS_URL']}/{name}", json=arguments
        )
        return reply.json()["content"]

    async def results(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Run the calls of a message."""
        texts = []
        for call in message["tool_calls"]:
            function = call["function"]
            content = await self.tool(function["name"], json.loads(function["arguments"]))
            texts.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return texts


Play = Callable[[Client, dict[str, Any]], Awaitable[str | None]]


class InProcess:
    """Stands in for `Agents`: a coroutine instead of a process for each episode."""

    def __init__(self, play: Play):
        self.function = play

    def start(self) -> None:
        pass

    listen = unlisten = start

    async def play(self, environment: dict, task: dict, timeout_s: float) -> Ended:
        client = Client(environment)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.function(client, task)
        except TimeoutError:
            return Ended(-9, True, "")
        except ZeroDivisionError as error:  # a test's agent dies so
            return Ended(1, False, str(error))
        finally:
            with suppress(Exception):
                await client.http.aclose()
        return Ended(0, False, "", [] if answer is None else [{"answer": answer}])


async def search_agent(client: Client, task: dict[str, Any]) -> str | None:
    """Search until an answer comes, exactly as our loop does in `StrictEnv`."""
    messages: list[dict] = list(task["messages"])
    for _ in range(5):
        choice = await client.ask(messages, tools=[SEARCH], temperature=0.2, seed=42)
        message = choice["message"]
        ended = choice["finish_reason"] == "length" or "<tool_call>" in (message["content"] or "")
        if ended or not message.get("tool_calls"):
            return None
        messages.append(message)
        messages += await client.results(message)
    return None


async def fresh_agent(client: Client, task: dict[str, Any]) -> str | None:
    """Begin a new conversation after each search, with what was found."""
    messages: list[dict] = list(task["messages"])
    for _ in range(5):
        choice = await client.ask(messages, tools=[SEARCH])
        message = choice["message"]
        ended = choice["finish_reason"] == "length" or "<tool_call>" in (message["content"] or "")
        if ended or not message.get("tool_calls"):
            return None
        results = [result["content"] for result in await client.results(message)]
        messages = rewritten(task["messages"], results)
    return None


async def long_winded_agent(client: Client, task: dict[str, Any]) -> str | None:
    """Ask to go on after each turn that was cut off."""
    messages: list[dict] = list(task["messages"])
    for _ in range(5):
        choice = await client.ask(messages, tools=[SEARCH])
        message = choice["message"]
        messages.append(message)
        if choice["finish_reason"] == "length":
            messages.append({"role": "user", "content": "go on"})
            continue
        if "<tool_call>" in (message["content"] or "") or not message.get("tool_calls"):
            return None
        messages += await client.results(message)
    return None


def rewritten(first: list[dict], results: list[str]) -> list[dict]:
    found = " ".join(results)
    return [*first[:-1], {"role": "user", "content": f"{first[-1]['content']} {found}"}]


class StrictEnv(HermesToolEnv):
    """A call that cannot be parsed ends the episode, because no client can answer it."""

    def stop(self, text: str, calls: list) -> StopReason | None:
        reason = super().stop(text, calls)
        if reason is None and any(call.error for call in calls):
            return StopReason.NO_ANSWER
        return reason


class FreshEnv(StrictEnv):
    """Each result begins a new context."""

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        if result.observation is not None:
            texts = [message["content"] for message in result.observation.messages]
            messages = rewritten(list(self.row["prompt"]), texts)
            tools = [tool.schema() for tool in self.tools.values()]
            result.observation = Observation(messages, tools=tools, rewrite=True)
        return result


class LongWindedEnv(StrictEnv):
    """A turn that was cut off may go on."""

    async def step(self, action: Action) -> StepResult:
        if action.finish_reason == "length" and self.turns < 4:
            self.turns += 1
            return StepResult(Observation([{"role": "user", "content": "go on"}]))
        return await super().step(action)


def agent_rollout(*overrides: str) -> RolloutConfig:
    return load_config("small", ["rollout.agent=tests", *overrides], algorithm="grpo").rollout


def gateway_flow(
    policy: Any,
    chat: ChatFormat,
    play: Play,
    make_env: Callable[[Row], Any],
    *overrides: str,
    **limits: Any,
) -> AgentFlow:
    """Make an `AgentFlow` with a coroutine as its agent."""
    values = {"max_tokens_per_turn": 48, "max_context": 500, "timeout_s": 60.0} | limits
    flow = AgentFlow(policy, chat, Limits(**values), make_env, agent_rollout(*overrides))
    flow.agents = InProcess(play)
    return flow


def demonstration(
    micro: MicroWorld, play: Play, write_turn: Callable[..., str]
) -> tuple[list[Demonstration], Trajectory]:
    """Play one episode with a function in the model's place, as the cold start does."""
    env = lenient(micro.config.env)
    flow = DemonstrationFlow(
        write_turn,
        byte_chat(),
        Limits(10**6, 10**7, 60.0),
        lambda row: HermesToolEnv(micro.tools, env),
        agent_rollout(),
        seed=0,
    )
    flow.agents = InProcess(play)
    tasks = [Task(question_row(), "0", "s", None)]
    [trajectory] = asyncio.run(run_episodes(flow, tasks, Sampling(10**6)))
    said = flow.plays["s"]
    return [Demonstration(messages, said.tools) for messages in said.contexts], trajectory


def sampler(
    model: Decoder, chat: ChatFormat, slots: int = 8, max_context: int = 500
) -> LocalPolicy:
    return LocalPolicy(model, chat.stop_ids, slots=slots, max_context=max_context)


def lenient(config: EnvConfig) -> EnvConfig:
    """Lift the limits of calls, which an agent of its own does not know."""
    return config.model_copy(update={"max_tool_calls": 99, "max_invalid_calls": 99})


def model_of_two_calls(micro: MicroWorld, chat: ChatFormat, weights: dict) -> Decoder:
    """Teach the cloned model to search for two things in one turn."""
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    model.load_state_dict(weights)
    plays = []
    for row in micro.rows("train"):
        calls = ""
        for word in row["prompt"][-1]["content"].split()[-2:]:
            call = {"name": "search", "arguments": {"query": word}}
            calls += f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        turn = {"role": "assistant", "content": f"<think>both</think>{calls}"}
        result = {"role": "tool", "content": "nothing"}
        end = {"role": "assistant", "content": "<think>answer</think><answer>no</answer>"}
        plays.append(Demonstration([*row["prompt"], turn, result, result, end], [SEARCH]))
    rows = sequences(plays, chat, 384, StrictEnv.dialect)
    clone_steps(model, rows, steps=120, lr=4e-3)
    return model
