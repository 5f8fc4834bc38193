"""Compare the cost of our episode loop with verl's `tool_agent` on the same sampled tokens.

    .venv/bin/python benchmarks/agent_loop_cost.py --preset smoke --model
    runs/smoke-grpo/checkpoints/step_000032/model

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
from pathlib import Path
from statistics import median

from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from agent_r1.config import load_config
from agent_r1.core import Sampling, StopReason, Trajectory
from agent_r1.data.storage import read_rows
from agent_r1.rollout import model_files
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.rollout.sampler import LocalPolicy
from agent_r1.rollout.setup import make_loop
from agent_r1.search.index import PassageIndex
from agent_r1.search.searcher import Searcher
from agent_r1.tool import make_tools
from agent_r1.training.tiny_model import load_chat
from agent_r1.verl_engine import agent_loop
from agent_r1.verl_engine.compose import Sources, compose, overrides
from agent_r1.workspace import Workspace


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="smoke")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    config = load_config(arguments.preset, ["engine=verl", "trainer.threads=1"], algorithm="grpo")
    workspace = Workspace(config)
    chat, rows = load_chat(arguments.model), read_rows(workspace.data / "train.parquet")
    rows = rows[: arguments.questions]
    searcher = Searcher(
        PassageIndex.load(workspace.index, workspace.data / "corpus.jsonl"), cache_size=0
    )
    tools = make_tools(config.env.tools, searcher=searcher, top_k=config.search.top_k)
    r = config.rollout
    policy = LocalPolicy(
        model_files.load_model(arguments.model),
        chat.stop_ids,
        slots=r.max_concurrent_episodes,
        max_context=r.max_context,
    )
    tasks = [Task(row, str(i), str(i), derive_seed(0, "cost", i)) for i, row in enumerate(rows)]
    played = asyncio.run(
        run_episodes(
            make_loop(policy, chat, tools, config.rollout, config.env),
            tasks,
            Sampling(r.max_tokens_per_turn),
        )
    )
    # `tool_agent` answers broken calls in other words, and ends episodes elsewhere at a limit.
    kept = [
        (row, t)
        for row, t in zip(rows, played, strict=True)
        if t.stop_reason is StopReason.ANSWERED and not t.metrics.get("invalid_calls")
    ]

    run = Path(workspace.root) / "runs" / "agent-loop-cost"
    sources = Sources(
        arguments.model, workspace.data / "train.parquet", workspace.data / "val.parquet", run
    )
    theirs_config = compose(overrides(config, sources, "cpu"))
    theirs_config.actor_rollout_ref.rollout.multi_turn.format = "hermes"
    theirs_config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns = config.env.max_turns
    theirs_config.actor_rollout_ref.rollout.response_length = r.max_context
    theirs_config.actor_rollout_ref.rollout.multi_turn.max_tool_response_length = (
        config.env.tool_max_chars
    )
    trainer = DictConfigWrap(theirs_config)
    agent_loop._open_shared = lambda *_: (config, chat, tools)  # no run folder to read them from

    async def search(**arguments) -> str:
        return (await tools["search"].execute(arguments)).content

    schema = OpenAIFunctionToolSchema.model_validate(tools["search"].schema())
    verl_tools = ToolListWrap([FunctionTool("search", search, schema, is_async=True)])
    params = {"temperature": 1.0, "top_p": 1.0}

    async def ours() -> list[list[int]]:
        async def episode(i: int, row: dict, t: Trajectory) -> list[int]:
            loop = agent_loop.AgentR1Loop(
                trainer, Replay(t), env_name=config.env.name, run=str(run)
            )
            place = {
                "raw_prompt": row["prompt"],
                "uid": str(i),
                "session_id": 0,
                "global_steps": 2,
                "index": i,
            }
            (out,) = await loop.run(params, **{**row, **place})
            return out.prompt_ids + out.response_ids

        return await asyncio.gather(*(episode(i, *pair) for i, pair in enumerate(kept)))

    async def theirs() -> list[list[int]]:
        async def episode(row: dict, t: Trajectory) -> list[int]:
            loop = ToolAgentLoop(
                trainer,
                Replay(t),
                chat.tokenizer,
                None,
                None,
                DictConfigWrap(theirs_config.data),
                "qwen2",
                tools=verl_tools,
            )
            out = await loop.run(params, raw_prompt=row["prompt"])
            return out.prompt_ids + out.response_ids

        return await asyncio.gather(*(episode(*pair) for pair in kept))

    times: dict[str, list[tuple[float, float]]] = {"ours": [], "tool_agent": []}
    for _ in range(arguments.repeats + 1):
        ids = {}
        for name, play in (("ours", ours), ("tool_agent", theirs)):
            wall, cpu = time.perf_counter(), time.process_time()
            ids[name] = asyncio.run(play())
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    same = sum(a == b for a, b in zip(ids["ours"], ids["tool_agent"], strict=True))
    result = {
        "episodes": len(kept),
        "turns": sum(len(t.steps) for _, t in kept),
        "same_tokens": same,
    }
    for name, taken in times.items():
        for kind, column in (("wall", 0), ("cpu", 1)):
            result[f"{name}_{kind}_ms"] = median(t[column] for t in taken[1:]) / len(kept) * 1e3
    print(f"{len(kept)} episodes, {result['turns']} turns; the same tokens in both loops: {same}")
    print(f"{'ms per episode':16}{'wall':>8}{'cpu':>8}")
    for name in times:
        print(f"{name:16}{result[f'{name}_wall_ms']:8.2f}{result[f'{name}_cpu_ms']:8.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
