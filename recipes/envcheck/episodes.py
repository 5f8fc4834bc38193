"""Play one episode of text, without a model and without tokens.

In: an environment, and a function that writes the agent's turns. Out: an `Episode`. Next:
`verdicts.py` compares rewards. Turns, limits and rewards are those of the training loop
(rollout/episode.py); only the tokenizer is missing, so its limits are, too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_r1 import (
    Action,
    AgentEnv,
    ConfigError,
    Message,
    Observation,
    Row,
    StopReason,
    check_reward,
    maybe_await,
)

SHOWN_CHARACTERS = 400
"""Characters of a turn or an observation that a transcript keeps."""
MAX_TEXT = 1_000_000
"""Characters of an observation; longer ones are a fault."""
MOST_TURNS = 200
"""Turns after which an environment that goes on and on is at fault, beyond 2 env.max_turns."""

Turn = Callable[[list[Message]], str]
"""Write the agent's next turn from the conversation so far."""


@dataclass
class Episode:
    """One episode, as far as a verdict needs it."""

    policy: str
    question: int
    reward: float = 0.0
    """All rewards of its steps, and its outcome."""
    stop: str = ""
    error: str | None = None
    """What the environment did wrong: it raised, or its reward is no finite number."""
    transcript: list[str] = field(default_factory=list)
    """`agent> ...` and `env> ...`, cut."""
    trace: list[str] = field(default_factory=list)
    """Hashes of observations with rewards, to compare two plays of the same turns."""
    seconds: list[float] = field(default_factory=list)
    """Wall time of each step."""
    sizes: list[int] = field(default_factory=list)
    """Characters of each observation."""
    turns: list[str] = field(default_factory=list)
    """The agent's turns, whole; not part of the record."""

    def record(self) -> dict[str, Any]:
        """Return what goes to the parent process."""
        values = asdict(self)
        del values["turns"]
        return values


async def play_episode(
    env: AgentEnv, row: Row, episode: Episode, write: Turn, report: Callable[[str], None]
) -> Episode:
    """Play to the end, and fill `episode`. `report` is called with each turn before it is played.

    Raises ConfigError for a failing demonstrator. Any exception of the environment's, SystemExit
    included, is recorded.
    """
    try:
        stop = await _converse(env, row, episode, write, report)
        episode.stop = str(stop)
        report("[the outcome]")
        outcome = await maybe_await(env.outcome(stop))
        episode.reward += check_reward(outcome.reward)
        episode.trace.append(f"outcome {outcome.reward:.9g}")
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        episode.error = f"{type(error).__name__}: {error}"
    try:
        await maybe_await(env.close())
    except (Exception, SystemExit) as error:
        episode.error = episode.error or f"close: {type(error).__name__}: {error}"
    return episode


async def _converse(
    env: AgentEnv, row: Row, episode: Episode, write: Turn, report: Callable[[str], None]
) -> StopReason:
    """Play turns until the environment is done; return its reason."""
    report("[reset]")
    observation = await maybe_await(env.reset(row))
    history: list[Message] = []
    limit = MOST_TURNS + 2 * getattr(getattr(env, "config", None), "max_turns", 0)
    while True:
        _note(episode, observation)
        history += observation.messages
        text = write(history)
        history.append({"role": "assistant", "content": text})
        episode.turns.append(text)
        episode.transcript.append(f"agent> {text[:SHOWN_CHARACTERS]}")
        report(text)
        start = time.perf_counter()
        result = await env.step(Action(text))
        episode.seconds.append(time.perf_counter() - start)
        reward = check_reward(result.reward)
        episode.reward += reward
        episode.trace.append(f"step {reward:.9g} {result.done}")
        if result.done:
            return result.stop_reason or StopReason.ANSWERED
        if len(episode.turns) >= limit:
            raise RuntimeError(f"the episode goes on after {limit} turns; end it (`done`)")
        observation = result.observation


def _note(episode: Episode, observation: Observation) -> None:
    """Record an observation: its size, its hash, and its beginning."""
    text = "\n".join(str(message.get("content")) for message in observation.messages)
    if len(text) > MAX_TEXT:
        raise ValueError(f"an observation has {len(text)} characters, and at most {MAX_TEXT}")
    episode.sizes.append(len(text))
    episode.trace.append(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16])
    episode.transcript.append(f"env> {text[-SHOWN_CHARACTERS:]}")
