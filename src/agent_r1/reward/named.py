"""Pay other rewards than exact match: `env.reward=NAME`.

In: an answer and its row. Out: the reward of the last action.

    math     equal to the right expression (recipes/math)
    code     passes the question's tests in a sandbox (recipes/code)
    sub_em   contains the right answer; an agent learns to list candidates (docs/safety.md)
    judge    the verdict of a language model at `env.judge_url` (recipes/judge)
    reward_model    the number of a reward model at `env.reward_model_url` (recipes/judge)
    exact_match     equal to a right answer, for a mixture

Each is between 0 and 1, minus the penalty for a malformed last turn. To add one, write an async
function `reward(answer, targets, row, config)` and add its name to the table `[reward]` of a
recipe.toml. Or use `env.reward=FILE.py:FUNCTION`, a user-defined function that returns any finite
number. It takes any of `answer`, `row` and `episode`, by these names:

    def close_enough(answer, row, episode):
        error = abs(float(answer) - float(row["reward_model"]["ground_truth"][0]))
        return 1 - error / 100 - 0.02 * len(episode.calls)

This reward is then the score of an evaluation; only exact match is called EM.

`env.rules={exact_match: 0.5}` mixes rewards: each rule has its share, and `env.reward` the rest.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_r1.config import plugins, tables
from agent_r1.config.settings import EnvConfig
from agent_r1.core import Row
from agent_r1.ground.errors import ConfigError


@dataclass(frozen=True)
class Episode:
    """What the agent did, for a reward function that takes it."""

    turns: int = 0  # the answer included
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls in order, as in rollouts/: `name`, `arguments`, `ok`, `error`, `seconds`, `content`."""


async def score_by_name(
    answer: str | None,
    well_formed: bool,
    row: Row,
    config: EnvConfig,
    episode: Episode | None = None,
) -> tuple[float, dict[str, float]]:
    """Return (reward, parts) of the answer by the reward that `config` names."""
    # `answer` has what the rules leave of the sum: all of it, without rules.
    assert config.reward is not None, "without one, `env/questions.py` pays exact match"
    names: dict[str, tuple[str, float]] = {
        "answer": (config.reward, 1 - sum(config.rules.values()))
    }
    names |= {name: (name, share) for name, share in config.rules.items()}
    parts = {}
    for part, (name, share) in names.items():
        reward = 0.0
        if answer is not None:
            reward = await _reward(name, answer, row, config, episode)
        parts[part] = share * float(reward)
    parts["format"] = 0.0 if well_formed else -config.format_penalty
    return sum(parts.values()), parts


async def _reward(
    name: str, answer: str, row: Row, config: EnvConfig, episode: Episode | None
) -> float:
    """Return the reward of that name, without the penalty for the form."""
    if plugins.is_user_code(name):
        return _call_user_reward(
            name, {"answer": answer, "row": row, "episode": episode or Episode()}
        )
    targets = [str(target) for target in row["reward_model"]["ground_truth"]]
    key = tables.entry_of("reward", name, "env.reward").get("address")
    if key:
        plugins.check_trusted(
            getattr(config, key), f"env.{key}"
        )  # its server receives answers and a key
    return await tables.resolve("reward", name, "env.reward")(answer, targets, row, config)


REWARD_ARGUMENTS = ("answer", "row", "episode")
"""Names of the arguments for user-defined reward functions."""


@functools.cache
def reward_of(name: str) -> tuple[Callable[..., float], list[str]]:
    """Load a user-defined reward function and the names of its arguments.

    Raises ConfigError if it requires others than `REWARD_ARGUMENTS`.
    """
    function = plugins.load_trusted(name, "env.reward")
    usage = "write `def reward(answer, row)` or `def reward(answer, row, episode)`"
    if not callable(function):
        raise ConfigError(
            f"env.reward={name} is {type(function).__name__}; {usage}", code="wrong_code"
        )
    try:
        signature = inspect.signature(function)
        arguments = [key for key in signature.parameters if key in REWARD_ARGUMENTS]
        signature.bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env.reward={name}: {error}; {usage}; row['reward_model']['ground_truth'] has the "
            "right answers",
            code="wrong_signature",
        ) from None
    if inspect.iscoroutinefunction(function) or not arguments:
        raise ConfigError(
            f"env.reward={name}: {signature} cannot be called with "
            f"{', '.join(REWARD_ARGUMENTS)}; {usage}",
            code="wrong_signature",
        )
    return function, arguments


def _call_user_reward(name: str, values: dict[str, Any]) -> float:
    """Call a user-defined function. Raise ValueError unless it returns a finite number."""
    function, arguments = reward_of(name)
    reward = function(**{key: values[key] for key in arguments})
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(f"env.reward={name} returned {reward!r}; it must be a finite number")
    return float(reward)
