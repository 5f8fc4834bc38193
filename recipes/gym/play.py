"""Play demonstrations in a Gymnasium environment: by its `expert`, or at random.

In: a row with a seed, and the conversation so far. Out: the next turn. A plan of actions is made
once for each seed, in an environment of its own. So the environment must depend on its seed and on
the actions only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from dataclasses import dataclass
from typing import Any

from agent_r1 import ConfigError, Hermes, Row
from agent_r1_recipes.gym.environment import GAMES, Episode, Game, take_action

RANDOM_PLAYS = 32
"""Random episodes of each seed, of which the best is the demonstration."""
TRIAL_SEEDS = 20
"""Seeds that are tried before the first demonstration: does random play ever succeed?"""
SLIPS = 0.3
"""Share of random actions in an expert's demonstrations. RL compares good and bad behaviour, so a
perfect expert would leave it nothing to learn."""


@dataclass(frozen=True)
class Play:
    """One episode of a demonstrator."""

    actions: list[Any]
    total: float
    success: bool | None

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Sort by success, then by reward, then by brevity."""
        return bool(self.success), self.total, -len(self.actions)


def demonstrate(row: Row, history: list[dict[str, str]], rng: random.Random) -> str:
    """Return the next turn: a call of `step`."""
    return _plan_turn(row, history, rng, SLIPS)


def expert(row: Row, history: list[dict[str, str]], rng: random.Random) -> str:
    """Return the next turn without slips, for `agent-r1 env check`."""
    return _plan_turn(row, history, rng, slips=0.0)


def _plan_turn(row: Row, history: list[dict[str, str]], rng: random.Random, slips: float) -> str:
    game = GAMES[row["agent_name"]]
    actions = plan(row["agent_name"], row["extra_info"]["metadata"]["seed"], slips)
    turn = sum(message["role"] == "assistant" for message in history)
    # An environment that depends on more than its seed may go on after the plan.
    choices = game.actions.choices or actions[-1:]
    action = actions[turn] if turn < len(actions) else rng.choice(choices)
    return Hermes.call("step", action=action)


@functools.cache
def plan(name: str, seed: int, slips: float = SLIPS) -> list[Any]:
    """Return the actions of a demonstration.

    Args:
        slips: Share of random actions among the expert's, if the environment has an expert.
    """
    game = GAMES[name]
    rng = random.Random(f"plan/{seed}")
    if game.expert:
        return _play(game, seed, rng, by_expert=True, slips=slips).actions
    _check_random_play(name)
    plays = [_play(game, seed, rng) for _ in range(RANDOM_PLAYS)]
    return max(plays, key=_rank).actions


def _rank(play: Play) -> tuple[bool, float, int]:
    return play.rank


@functools.cache
def _check_random_play(name: str) -> None:
    """Raise ConfigError if random play never succeeds."""
    game = GAMES[name]
    if not game.actions.choices:
        raise ConfigError(
            f"{game.owner}: random play is impossible where step takes any text or number; "
            "write a method expert(self, observation), which returns an action",
            code="no_expert",
        )
    rng = random.Random("trial")
    plays = [_play(game, seed, rng) for seed in range(TRIAL_SEEDS) for _ in range(RANDOM_PLAYS)]
    totals = [play.total for play in plays]
    if any(play.success is not None for play in plays):
        succeeds = any(play.success for play in plays)
    else:
        succeeds = max(totals) > 0.0 or max(totals) > min(totals)
    if not succeeds:
        raise ConfigError(
            f"{game.owner}: {len(plays)} random episodes of at most {game.max_turns} actions never "
            "succeed; write a method expert(self, observation), which returns an action",
            code="no_expert",
        )


def _play(
    game: Game, seed: int, rng: random.Random, by_expert: bool = False, slips: float = SLIPS
) -> Play:
    """Play one episode of at most `game.max_turns` actions."""
    episode = type("Demonstration", (Episode,), {"game": game})()
    observations: list[Any] = []
    reset, step = episode.env.reset, episode.env.step
    try:
        result = reset(seed=seed)
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observations.append(result[0] if pair else result)
        episode.env = _Watched(episode.env, step, observations)
        actions: list[Any] = []
        while not episode.done and len(actions) < game.max_turns:
            action = None
            if by_expert and not (game.actions.choices and rng.random() < slips):
                action = _experts_action(game, episode.env, observations[-1])
            if action is None:
                action = rng.choice(game.actions.choices)
            take_action(episode, action)
            actions.append(action)
        return Play(actions, episode.total, episode.score)
    finally:
        with contextlib.suppress(Exception):
            episode.close()


class _Watched:
    """An environment that remembers its observations, for the expert."""

    def __init__(self, env: Any, step: Any, observations: list[Any]):
        self.env = env
        self._step = step
        self._observations = observations

    def step(self, action: Any) -> Any:
        result = self._step(action)
        self._observations.append(result[0])
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


def _experts_action(game: Game, env: Any, observation: Any) -> Any:
    """Ask the class's expert, and translate its action to what the agent writes."""
    inside = getattr(env.env, "unwrapped", env.env)
    expert = inside.expert
    takes_observation = len(inspect.signature(expert).parameters) > 0
    value = expert(observation) if takes_observation else expert()
    if hasattr(value, "item"):
        value = value.item()
    if not game.actions.choices or value in game.actions.choices:
        return value
    if value in game.actions.values:
        return game.actions.choices[game.actions.values.index(value)]
    raise ConfigError(
        f"{game.owner}: expert returned {value!r}, which is no action; it returns what step takes",
        code="wrong_return_value",
    )
