"""Compare the cost of our episode loop with verl's `tool_agent` on the same sampled tokens.

    .venv/bin/python benchmarks/agent_loop_cost.py --preset small --model
    runs/small-grpo/checkpoints/step_000032/model

In: data and index of a preset, and a model folder. The model plays the questions once, with our
sampler. Then both loops replay these tokens with a server that answers at once, so only the loops'
own time remains. Both search the same index through the same (batched, uncached) searcher. Out: a
table and a JSON line.

Our loop also parses the answer, computes rewards and cuts the trajectory into training sequences.
With `tool_agent`, verl does that elsewhere, in its reward loop, so it is timed for our loop only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import load_chat
from agent_r1.cluster import agent_loop
from agent_r1.cluster.compose import Sources, compose, overrides
from agent_r1.config import Config, load_config
from agent_r1.core import Sampling, StopReason, Trajectory
from agent_r1.data.storage import read_rows
from agent_r1.model import files as model_files
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.rollout.setup import make_loop
from agent_r1.search.index import PassageIndex
from agent_r1.search.searcher import Searcher
from agent_r1.tool import BaseTool, make_tools
from agent_r1.workspace import Workspace

SAMPLING = {"temperature": 1.0, "top_p": 1.0}


class Replay:
    """Replay recorded turns as a rollout server, one turn per request."""

    def __init__(self, trajectory: Trajectory):
        self.turns = iter(trajectory.steps)

    async def generate(self, request_id, **_) -> TokenOutput:
        await asyncio.sleep(0)  # like every request, it yields to the other episodes
        turn = next(self.turns)
        return TokenOutput(
            token_ids=turn.action_ids, log_probs=turn.action_logprobs, stop_reason="completed",
            extra_fields={"global_steps": 1},
        )  # fmt: skip


@dataclass(frozen=True)
class World:
    """Hold what both loops share."""

    config: Config
    workspace: Workspace
    chat: ChatFormat
    tools: dict[str, BaseTool]
    model: Path

    @property
    def run(self) -> Path:
        return Path(self.workspace.root) / "runs" / "agent-loop-cost"


Kept = list[tuple[dict, Trajectory]]
"""Rows and their recorded episodes."""
Play = Callable[[], Coroutine[Any, Any, list[list[int]]]]
"""Replay all episodes; return their token ids."""


def open_world(preset: str, model: Path) -> World:
    config = load_config(preset, ["engine=verl", "trainer.threads=1"], algorithm="grpo")
    workspace = Workspace(config)
    index = PassageIndex.load(workspace.index, workspace.data / "corpus.jsonl")
    searcher = Searcher(index, cache_size=0)
    tools = make_tools(config.env.tools, searcher=searcher, top_k=config.search.top_k)
    return World(config, workspace, load_chat(model), tools, model)


def record(world: World, questions: int) -> Kept:
    """Play the questions once, with our sampler."""
    r = world.config.rollout
    rows = read_rows(world.workspace.data / "train.parquet")[:questions]
    policy = LocalPolicy(
        model_files.load_model(world.model),
        world.chat.stop_ids,
        slots=r.max_concurrent_episodes,
        max_context=r.max_context,
    )
    tasks = [Task(row, str(i), str(i), derive_seed(0, "cost", i)) for i, row in enumerate(rows)]
    loop = make_loop(policy, world.chat, world.tools, r, world.config.env)
    played = asyncio.run(run_episodes(loop, tasks, Sampling(r.max_tokens_per_turn)))
    # `tool_agent` answers broken calls in other words, and ends episodes elsewhere at a limit.
    return [
        (row, t)
        for row, t in zip(rows, played, strict=True)
        if t.stop_reason is StopReason.ANSWERED and not t.metrics.get("invalid_calls")
    ]


def verl_config(world: World) -> DictConfig:
    data, config = world.workspace.data, world.config
    sources = Sources(world.model, data / "train.parquet", data / "val.parquet", world.run)
    whole = compose(overrides(config, sources, "cpu"))
    rollout = whole.actor_rollout_ref.rollout
    rollout.response_length = config.rollout.max_context
    rollout.multi_turn.format = "hermes"
    rollout.multi_turn.max_assistant_turns = config.env.max_turns
    rollout.multi_turn.max_tool_response_length = config.env.tool_max_chars
    return whole


def our_loop(world: World, trainer: DictConfigWrap, kept: Kept) -> Play:
    agent_loop._open_shared = lambda *_: (world.config, world.chat, world.tools)  # no run folder

    async def episode(i: int, row: dict, t: Trajectory) -> list[int]:
        loop = agent_loop.AgentR1Loop(
            trainer, Replay(t), env_name=world.config.env.name, run=str(world.run)
        )
        place = {
            "raw_prompt": row["prompt"],
            "uid": str(i),
            "session_id": 0,
            "global_steps": 2,
            "index": i,
        }
        (out,) = await loop.run(SAMPLING, **{**row, **place})
        return out.prompt_ids + out.response_ids

    async def play() -> list[list[int]]:
        return await asyncio.gather(*(episode(i, *pair) for i, pair in enumerate(kept)))

    return play


def tool_agent(world: World, trainer: DictConfigWrap, data: DictConfigWrap, kept: Kept) -> Play:
    search_tool = world.tools["search"]

    async def search(**arguments) -> str:
        return (await search_tool.execute(arguments)).content

    schema = OpenAIFunctionToolSchema.model_validate(search_tool.schema())
    verl_tools = ToolListWrap([FunctionTool("search", search, schema, is_async=True)])

    async def episode(row: dict, t: Trajectory) -> list[int]:
        tokenizer = world.chat.tokenizer
        loop = ToolAgentLoop(
            trainer, Replay(t), tokenizer, None, None, data, "qwen2", tools=verl_tools
        )
        out = await loop.run(SAMPLING, raw_prompt=row["prompt"])
        return out.prompt_ids + out.response_ids

    async def play() -> list[list[int]]:
        return await asyncio.gather(*(episode(*pair) for pair in kept))

    return play


def measure(players: dict[str, Play], repeats: int, episodes: int) -> dict[str, Any]:
    """Return medians in milliseconds per episode, without the first round, and equal episodes."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in players}
    ids: dict[str, list[list[int]]] = {}
    for _ in range(repeats + 1):
        for name, play in players.items():
            wall, cpu = time.perf_counter(), time.process_time()
            ids[name] = asyncio.run(play())
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    result: dict[str, Any] = {
        "same_tokens": sum(a == b for a, b in zip(*ids.values(), strict=True))
    }
    for name, taken in times.items():
        for column, kind in enumerate(("wall", "cpu")):
            seconds = median(t[column] for t in taken[1:])
            result[f"{name}_{kind}_ms"] = seconds / episodes * 1e3
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    world = open_world(arguments.preset, arguments.model)
    kept = record(world, arguments.questions)
    config = verl_config(world)
    trainer = DictConfigWrap(config)
    players = {
        "ours": our_loop(world, trainer, kept),
        "tool_agent": tool_agent(world, trainer, DictConfigWrap(config.data), kept),
    }
    turns = sum(len(t.steps) for _, t in kept)
    result = {"episodes": len(kept), "turns": turns}
    result |= measure(players, arguments.repeats, len(kept))
    same = result["same_tokens"]
    print(f"{len(kept)} episodes, {turns} turns; the same tokens in both loops: {same}")
    print(f"{'ms per episode':16}{'wall':>8}{'cpu':>8}")
    for name in players:
        print(f"{name:16}{result[f'{name}_wall_ms']:8.2f}{result[f'{name}_cpu_ms']:8.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
