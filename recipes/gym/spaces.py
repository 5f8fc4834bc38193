"""Translate Gymnasium's spaces and values to text, and refuse what has no text.

In: an environment's spaces, or an observation. Out: the form of its actions, or text. Spaces are
recognised by the names of their classes, so no package is needed.
"""

from __future__ import annotations

import enum
import inspect
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from agent_r1 import AgentR1Error, ConfigError

MAX_VALUES = 64
"""Numbers of an observation that are written as text; more are pixels."""


@dataclass(frozen=True)
class Actions:
    """What `step` takes."""

    annotation: Any
    """For the tool's JSON schema."""
    choices: list[Any]
    """All actions, as the agent writes them; empty if there is no end to them."""
    values: list[Any]
    """What the environment's `step` gets for each choice."""

    def value(self, action: Any) -> Any:
        """Return what `step` gets for an action of the agent."""
        return self.values[self.choices.index(action)] if self.choices else action

    def read(self, text: str) -> Any | None:
        """Return the action that a plain text means; None if it means none."""
        if self.choices:
            return next((choice for choice in self.choices if str(choice) == text.strip()), None)
        if self.annotation is int:
            digits = text.strip().removeprefix("-")
            # Longer ones are no action, and Python refuses to read 5,000 digits.
            return int(text) if digits.isdecimal() and len(digits) < 10 else None
        return text.strip() or None


def actions_of(env: Any, owner: str) -> Actions:
    """Read the form of an environment's actions. Raise ConfigError for continuous ones."""
    space = getattr(env, "action_space", None)
    if space is None:
        return _read_annotation(env, owner)
    kind = type(space).__name__
    if kind == "Discrete":
        first = int(getattr(space, "start", 0))
        values = list(range(first, first + int(space.n)))
        names = getattr(env, "action_names", None) or values
        if len(names) != len(values):
            raise ConfigError(
                f"{owner}: action_names has {len(names)} names for {len(values)} actions; give one "
                "for each",
                code="wrong_code",
            )
        return _choice(list(names), values, owner)
    if kind == "Text":
        return Actions(str, [], [])
    if isinstance(space, list | tuple | range | enum.EnumType):
        return _choice(list(space), list(space), owner)
    raise ConfigError(
        f"{owner}: its action_space is a {kind}"
        f"{' of continuous actions' if kind == 'Box' else ''}, and an agent writes Discrete or "
        "Text actions; wrap it in a class whose step takes one of a few names",
        code="unsupported_space",
    )


def _choice(choices: list[Any], values: list[Any], owner: str) -> Actions:
    """Return actions that are chosen from a list. `values` are what `step` gets."""
    if not choices:
        raise ConfigError(
            f"{owner}: it has no actions; name at least one in action_space",
            code="unsupported_space",
        )
    labels = [_spell(choice) for choice in choices]
    return Actions(Literal[tuple(labels)], labels, values)


def _spell(choice: Any) -> Any:
    """Return an action as the agent writes it: an enum's name, NumPy's numbers as Python's."""
    if isinstance(choice, enum.Enum):
        return choice.name
    return choice.item() if hasattr(choice, "item") else choice


def _read_annotation(env: Any, owner: str) -> Actions:
    """Read the actions of a class without spaces: the annotation of its `step`."""
    names = list(inspect.signature(env.step).parameters)
    try:
        hint = typing.get_type_hints(env.step).get(names[0] if names else "")
    except Exception:  # an annotation that cannot be resolved is as good as none
        hint = None
    if typing.get_origin(hint) is Literal:
        choices = list(typing.get_args(hint))
        return _choice(choices, choices, owner)
    if isinstance(hint, enum.EnumType):
        return _choice(list(hint), list(hint), owner)
    if hint in (int, str):
        return Actions(hint, [], [])
    raise ConfigError(
        f"{owner}: it does not tell its actions; annotate step(self, action: int), with str or a "
        "Literal, or set action_space",
        code="unsupported_space",
    )


def check_observations(space: Any, owner: str) -> None:
    """Refuse observations that have no text, by the name of their space."""
    if space is None:
        return
    kind = type(space).__name__
    if kind == "Box":
        shape = tuple(getattr(space, "shape", ()) or ())
        what = "pixels" if len(shape) > 1 else "numbers without a text"
        raise ConfigError(
            f"{owner}: its observation_space is a Box of shape {shape}, {what}; wrap it in a class "
            "whose reset and step return a text or a dict",
            code="unsupported_space",
        )
    inner = getattr(space, "spaces", None)
    if inner is not None:
        for part in inner.values() if hasattr(inner, "values") else inner:
            check_observations(part, owner)


def text_of(observation: Any, owner: str) -> str:
    """Write an observation as text. Raise AgentR1Error for one of many numbers."""
    if observation is None:
        return ""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, bytes):
        return observation.decode("utf-8", "replace")
    if isinstance(observation, dict):
        lines = [f"{key}: {text_of(value, owner)}" for key, value in observation.items()]
        return "\n".join(lines)
    if hasattr(observation, "tolist"):  # NumPy's arrays and scalars
        _refuse_many(getattr(observation, "size", 1), owner)
        return text_of(observation.tolist(), owner)
    if isinstance(observation, float):
        return f"{observation:.6g}"
    if isinstance(observation, Iterable):
        observation = list(observation)
        _refuse_many(_count_numbers(observation), owner)
        return ", ".join(text_of(value, owner) for value in observation)
    return str(observation)


def _refuse_many(count: int, owner: str) -> None:
    if count > MAX_VALUES:
        raise AgentR1Error(
            f"{owner}: an observation has {count} numbers, such as pixels, and an agent reads "
            "text; return a text or a dict",
            code="unsupported_space",
        )


def _count_numbers(value: Any) -> int:
    """Count the numbers in nested lists."""
    if isinstance(value, list | tuple):
        return sum(_count_numbers(element) for element in value)
    return isinstance(value, int | float)
