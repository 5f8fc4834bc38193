"""Let a model of an API play training questions, and keep what scored: `agent-r1 demonstrate`.

In: questions, and a teacher. Out: a file for `cold_start.episodes`, one conversation a line. Next:
`agent-r1 cold-start`, which clones them.

Cloning one's own best episodes is rejection-sampling fine-tuning (called RFT or STaR, too): the
baseline that RL has to beat. RL also learns from episodes that failed.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from agent_r1 import (
    AgentR1Error,
    BaseToolEnv,
    ChatFormat,
    Config,
    ConfigError,
    Hermes,
    Message,
    Row,
    Sampling,
    Task,
    Trajectory,
    Workspace,
    command,
    derive_seed,
    load_config,
    make_env,
    make_loop,
    option,
    run_episodes,
    say,
    train_tokenizer,
    write_whole,
)
from agent_r1_recipes.api.client import open_model, settings_of
from agent_r1_recipes.api.flow import ApiFlow


@command(
    "demonstrate", "let a model of an API play, and keep what scored as cold_start.episodes",
    ["--api https://api.example.com/v1 --model NAME --preset small --limit 200 --out teacher.jsonl",
     "--api http://127.0.0.1:8000/v1 --model agent --preset small --samples 4 --out own.jsonl",
     "--api URL --model NAME --preset discover --budget 2 rollout.api_price_in=2.5 "
         "rollout.api_price_out=10 --out teacher.jsonl"],
    option("--api", metavar="URL", required=True, help="OpenAI-compatible address of the teacher; "
        "its key is in OPENAI_API_KEY"),
    option("--model", metavar="NAME", required=True, help="name of the teacher at that address"),
    option("--out", type=Path, metavar="FILE.jsonl", required=True, help="file to write; every "
        "answer is kept next to it, in FILE.calls/"),
    option("--preset", default="discover", help="preset of the task (default: discover)"),
    option("--limit", type=int, metavar="N", help="only the first N training questions"),
    option("--samples", type=int, default=1, metavar="N", help="plays of each question (default: "
        "1)"),
    option("--temperature", type=float, help="sampling temperature (default: 0, or 1 with "
        "--samples)"),
    option("--least", type=float, default=1.0, metavar="SCORE", help="least score of a kept "
        "episode (default: 1)"),
    option("--keep", type=int, default=1, metavar="N", help="most kept episodes of a question "
        "(default: 1)"),
    option("--budget", type=float, metavar="USD", help="most US dollars to spend, retries "
        "included"),
    option("settings", nargs="*", metavar="section.key=value", help="settings, such as "
        "rollout.max_tokens_per_turn=1024"),
)  # fmt: skip
def demonstrate(a: Namespace) -> None:
    records = a.out.with_name(f"{a.out.name}.calls")
    config = load_config(
        a.preset, [*a.settings, *settings_of(a.api, records, a.budget)], trains=False
    )
    if a.samples < 1 or a.keep < 1:
        raise ConfigError("--samples and --keep are at least 1", code="bad_option")
    temperature = a.temperature
    if temperature is None:
        temperature = float(a.samples > 1)
    paths = Workspace(config)
    paths.make_task()
    rows = paths.load_rows("train")[: a.limit]
    tools = paths.load_tools()
    env = make_env(rows[0], tools, config.env)
    if not (isinstance(env, BaseToolEnv) and isinstance(env.dialect, Hermes)):
        raise ConfigError(
            "a teacher plays environments in the Hermes dialect, such as env.name=hermes: in "
            "another one cold_start.episodes would show the tools twice",
            code="no_native_calls",
        )
    with open_model(Path(a.model), config, (), all_gpus=False) as (client, max_concurrent):
        # A byte is a token: the teacher's own tokens are not known.
        chat = ChatFormat(train_tokenizer([], 512))
        flow = make_loop(client, chat, tools, config.rollout, config.env)
        trajectories = play(flow, rows, a.samples, temperature, config, max_concurrent)
        best_episodes = best(trajectories, a.least, a.keep)
        usage = client.usage()["usage"]
    scores = [trajectory.score for trajectory in trajectories]
    say(
        f"{len(rows)} questions, {len(scores)} episodes, mean score "
        f"{sum(scores) / max(1, len(scores)):.3f}; {usage['prompt_tokens']:,} + "
        f"{usage['completion_tokens']:,} tokens"
        + ("" if usage["usd"] is None else f", ${usage['usd']:.4f}")
    )
    if not best_episodes:
        raise AgentR1Error(
            f"no episode scored {a.least:g}: the best one {max(scores, default=0):g}. Lower "
            "--least, play more --samples, or choose another teacher",
            code="no_records",
        )
    write_whole(a.out, "".join(lines_of(flow, best_episodes)))
    say(f"kept {len(best_episodes)} episodes in {a.out}; clone them with")
    say(f"  agent-r1 cold-start --preset {a.preset} cold_start.episodes={a.out}")


def session_of(question: int, sample: int) -> str:
    return f"demonstration-{sample}-{question}"


def play(
    flow: Any, rows: list[Row], samples: int, temperature: float, config: Config, concurrent: int
) -> list[Trajectory]:
    """Play each row `samples` times."""
    tasks: list[Task] = []
    for sample in range(samples):
        for number, row in enumerate(rows):
            seed = derive_seed(config.seed, "demonstrate", number, sample)
            task = Task(row, str(number), session_of(number, sample), seed, sample)
            tasks.append(task)
    sampling = Sampling(config.rollout.max_tokens_per_turn, temperature)
    return asyncio.run(run_episodes(flow, tasks, sampling, max_concurrent=concurrent))


def best(trajectories: list[Trajectory], least: float, keep: int) -> list[Trajectory]:
    """Return at most `keep` episodes of each question that score at least `least`.

    The shortest of equal ones come first, because a detour is no lesson.
    """
    by_question: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if not trajectory.stop_reason.failed and trajectory.score >= least:
            by_question.setdefault(trajectory.group_id, []).append(trajectory)
    best_episodes: list[Trajectory] = []
    for group in sorted(by_question, key=int):
        ranking = sorted(by_question[group], key=lambda t: (-t.score, len(t.steps), t.sample))
        best_episodes += ranking[:keep]
    return best_episodes


def lines_of(flow: ApiFlow, episodes: list[Trajectory]) -> list[str]:
    """Write episodes as lines for `cold_start.episodes`; each context is one."""
    lines: list[str] = []
    for trajectory in episodes:
        session = session_of(int(trajectory.group_id), trajectory.sample)
        for conversation in flow.conversations[session]:
            names = {tool["function"]["name"] for tool in conversation.tools or []}
            messages = [
                message | {"weight": 0} if _is_invalid(message, names) else message
                for message in conversation.texts
            ]
            record: dict[str, Any] = {"messages": messages}
            if conversation.tools:
                record["tools"] = conversation.tools
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return lines


def _is_invalid(message: Message, names: set[str]) -> bool:
    """Return whether a turn calls what is not there, or nothing that can be read.

    Such a turn is shown and not cloned, although the episode scored.
    """
    if message["role"] != "assistant":
        return False
    calls = Hermes().calls(message["content"], {})
    return any(call.error is not None or call.name not in names for call in calls)
