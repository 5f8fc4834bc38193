"""Train an agent in a Gymnasium environment: `env.name=gym:FILE.py:Class` or `gym:ID`.

In: a class with Gymnasium's `reset(seed=...)` and `step(action)`, or the id of an installed
environment. Out: a plain class, whose only tool is `step`. Next: `env/class_env.py` plays it, with
its thread, deadlines and clean-up. A class of that shape needs no package; an id needs the extra
`gym`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from agent_r1 import AgentR1Error, ConfigError, ToolCall, extra, first_line
from agent_r1_recipes.gym.spaces import Actions, actions_of, check_observations, text_of

SUCCESS = ("is_success", "success")
"""Keys of `info` by which environments tell success."""


class Game:
    """How objects of an environment are made, and what its actions are."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self.owner = f"environment {name}"
        self.make = make
        try:
            env = make()
        except Exception as error:  # no display, a missing package, a fault of the class
            raise ConfigError(
                f"{self.owner}: it cannot be made ({type(error).__name__}: {first_line(error)})",
                code="broken_code",
            ) from error
        try:
            _check_methods(self.owner, env)
            self.actions: Actions = actions_of(env, self.owner)
            check_observations(getattr(env, "observation_space", None), self.owner)
            self.expert = callable(getattr(getattr(env, "unwrapped", env), "expert", None))
            self.about = self._about(name, env)
            # What play without skill may earn, for `agent-r1 env check`.
            self.floor = getattr(env, "floor", None)
            self.floor_reason = getattr(env, "floor_reason", "")
        finally:
            # It was never reset, and some classes can be closed only after that.
            with contextlib.suppress(Exception):
                close_if_possible(env)
        self.max_turns = 20
        """`env.max_turns`, once an episode has begun: no demonstration is longer."""

    def _about(self, name: str, env: Any) -> str:
        """Return what the agent reads first: the class's own docstring, or the id."""
        if ":" not in name.partition(":")[2]:
            return name.partition(":")[2]
        own = type(env).__dict__.get("__doc__")
        return inspect.cleandoc(own).partition("\n\n")[0] if own else ""


def _check_methods(owner: str, env: Any) -> None:
    """Raise ConfigError if `reset(seed=...)` or `step(action)` cannot be called."""
    for name, arguments in (("reset", {"seed": 0}), ("step", {})):
        method = getattr(env, name, None)
        if not callable(method):
            raise ConfigError(
                f"{owner} has no method {name}; a Gymnasium environment has reset(seed=...) and "
                "step(action)",
                code="missing_method",
            )
        if inspect.iscoroutinefunction(method):
            raise ConfigError(
                f"{owner}: {name} is async, and Gymnasium's methods are not; write a plain def, "
                "or a plain class (docs/tutorial/your-own-environment.md)",
                code="wrong_signature",
            )
        try:
            inspect.signature(method).bind(*(() if arguments else (None,)), **arguments)
        except ValueError:  # a method in C, whose signature cannot be read
            continue
        except TypeError as error:
            raise ConfigError(
                f"{owner}: {name} cannot be called as in Gymnasium ({error}); its form is "
                "reset(self, seed=None, options=None) and step(self, action)",
                code="wrong_signature",
            ) from None


def close_if_possible(env: Any) -> None:
    """Close an environment, if it can be closed."""
    close = getattr(env, "close", None)
    if callable(close):
        close()


class Episode:
    """An episode, in the form of a plain class."""

    game: Game
    score_name = "success"

    def __init__(self) -> None:
        self.env = self.game.make()
        self.total = 0.0
        self.done = False
        self.truncated = False
        self.score: bool | None = None

    def reset(self, seed: int, max_turns: int = 20, **row: Any) -> str:
        self.game.max_turns = max_turns
        result = self.env.reset(seed=int(seed))
        # Gymnasium returns the observation and an info; older classes only the observation.
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result = result[0]
        text = text_of(result, self.game.owner)
        return f"{self.game.about}\n{text}".strip()

    def get_reward(self) -> float:
        return self.total

    def close(self) -> None:
        close_if_possible(self.env)

    @classmethod
    def _call_from_text(cls, text: str) -> ToolCall:
        """Read an action that is written as plain text, for a turn without a call."""
        action = cls.game.actions.read(text)
        if action is not None:
            return ToolCall("step", {"action": action})
        choices = ", ".join(str(choice) for choice in cls.game.actions.choices[:20])
        remedy = f"; write one of {choices}" if choices else ""
        return ToolCall("step", {}, error=f"there is no action{remedy}")


def take_action(episode: Episode, action: Any) -> str:
    """Take one action of the agent, and return the observation as text."""
    game = episode.game
    result = episode.env.step(game.actions.value(action))
    if not isinstance(result, tuple | list) or len(result) not in (4, 5):
        raise AgentR1Error(
            f"{game.owner}: step returned {type(result).__name__}, and must return "
            "(observation, reward, terminated, truncated, info)",
            code="wrong_return_value",
        )
    observation, reward, *ends, info = result
    episode.total += float(reward)
    episode.truncated = len(ends) > 1 and bool(ends[1]) and not bool(ends[0])
    episode.done = any(bool(end) for end in ends)
    for key in SUCCESS:
        if isinstance(info, dict) and key in info:
            episode.score = bool(info[key])
    return text_of(observation, game.owner)


GAMES: dict[str, Game] = {}
"""The games of this process by `env.name`, for the demonstrator."""


def open_environment(name: str, cls: Any) -> type:
    """Return a plain class of `gym:NAME`. Raise ConfigError if it cannot be played.

    `cls` is the user's class, or None for the id of an installed environment.
    """
    game = Game(name, _find_installed(name) if cls is None else _constructor(name, cls))
    GAMES[name] = game

    def step(self: Episode, action: Any) -> str:
        """Act.

        Args:
            action: What to do.
        """
        return take_action(self, action)

    step.__annotations__ = {"action": game.actions.annotation, "return": str}
    attributes = {"floor": game.floor, "floor_reason": game.floor_reason}
    return type("GymEpisode", (Episode,), {"game": game, "step": step, **attributes})


def _find_installed(name: str) -> Callable[[], Any]:
    identifier = name.partition(":")[2]
    with extra("gym", f"env.name={name}"):
        import gymnasium
    try:
        gymnasium.spec(identifier)
    except Exception as error:
        raise ConfigError(
            f"env.name={name}: Gymnasium has no such environment ({first_line(error)})",
            code="unknown_name",
        ) from None
    return functools.partial(gymnasium.make, identifier)


def _constructor(name: str, cls: Any) -> Callable[[], Any]:
    if not callable(cls):
        raise ConfigError(f"env.name={name} is not a class; name a class", code="wrong_code")
    try:
        inspect.signature(cls).bind()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"env.name={name}: the constructor takes no arguments here ({error}); give them "
            "defaults",
            code="wrong_signature",
        ) from None
    return cls
