"""Other rewards than exact match: `env.reward=NAME`. In: an answer and its row. Out: what the last action is paid.

    math     equal to the right expression (maths.py)
    code     passes the question's tests in a sandbox (programs.py)
    sub_em   contains the right answer. Much of the literature pays this and calls it EM; an agent learns to list (docs/safety.md)
    judge    what a language model behind `env.judge_url` says (judge.py)

Each is paid between 0 and 1, less the penalty for a malformed ending. Add one: a function here, its name in `REWARDS` of
choices.py. Or without touching this file: `env.reward=FILE.py:FUNCTION`, a function of the answer and the row, in any range.

    def close_enough(answer, row):
        return 1 - abs(float(answer) - float(row["reward_model"]["ground_truth"][0])) / 100

The score of an evaluation is then this reward: nothing that is not exact match is called EM.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable

from agent_r1 import own
from agent_r1.errors import ConfigError
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
    paid = await PAYS.get(config.reward, _own)(answer, targets, row, config) if answer is not None else 0.0
    parts = {"answer": float(paid), "format": 0.0 if well_formed else -config.format_penalty}
    return sum(parts.values()), parts


@functools.cache
def reward_of(name: str) -> Callable[[str, Row], float]:
    """The function of one's own that has this name. Raises ConfigError where it is none."""
    function = own.load(name, "env.reward")
    if not callable(function):
        raise ConfigError(f"env.reward={name} is {type(function).__name__}; write `def reward(answer, row) -> float`")
    return function


async def _own(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    """Raises ValueError for what is no finite number; the function's own exceptions pass."""
    paid = reward_of(config.reward)(answer, row)
    if not isinstance(paid, int | float) or not math.isfinite(paid):
        raise ValueError(f"env.reward={config.reward} returned {paid!r}; it must be a finite number")
    return paid


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
