"""Rewards with a name, instead of exact match: `env.reward=NAME`. In: an answer and its row. Out: what the last action is paid.

    math     equal to the right expression (maths.py)
    code     passes the question's tests in a sandbox (programs.py)
    sub_em   contains the right answer. Much of the literature pays this and calls it EM; an agent learns to list (docs/safety.md)
    judge    what a language model behind `env.judge_url` says (judge.py)

Each is paid between 0 and 1, less the penalty for a malformed ending. Add one: a function here, its name in `REWARDS` of
choices.py.
"""

from __future__ import annotations

import asyncio
import functools

from agent_r1 import own
from agent_r1.reward.judge import Judge
from agent_r1.reward.maths import worker
from agent_r1.reward.programs import passes
from agent_r1.reward.qa import sub_em
from agent_r1.settings import EnvConfig
from agent_r1.tool.python import local_sandbox, make_runner
from agent_r1.types import Row


async def named_outcome(
    answer: str | None, well_formed: bool, row: Row, config: EnvConfig
) -> tuple[float, dict[str, float]]:
    """(reward, parts) of the answer (None: there is none) by the reward that `config` names."""
    targets = [str(target) for target in row["reward_model"]["ground_truth"]]
    paid = await PAYS[config.reward](answer, targets, row, config) if answer is not None else 0.0
    parts = {"answer": float(paid), "format": 0.0 if well_formed else -config.format_penalty}
    return sum(parts.values()), parts


async def _math(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    return await asyncio.to_thread(worker(local_sandbox(config)).same, answer, targets)


async def _code(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    return await asyncio.to_thread(passes, answer, targets, make_runner(config))


async def _sub_em(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    return sub_em(answer, targets)


async def _judge(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    return await _judge_at(config.judge_url, config.judge_model).score(row["prompt"][-1]["content"], targets, answer)


@functools.cache
def _judge_at(url: str, model: str) -> Judge:
    own.check_said(url, "env.judge_url")  # it hears what the agent answers, and the key
    return Judge(url, model)


PAYS = {"math": _math, "code": _code, "sub_em": _sub_em, "judge": _judge}
