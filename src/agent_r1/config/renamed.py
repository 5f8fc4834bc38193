"""Keys of earlier runs under their present names, so that `report`, `inspect`, `eval` and `chat` still open those runs.

In: the config.yaml or an eval card of a run, as plain values. Out: the same with today's keys. `--resume` needs the very
settings that the checkpoint was made with, so it refuses such a run; presets and the command line never come through here.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Dropped(NamedTuple):
    """A setting that is gone. A run opens only where the setting had this value."""

    default: Any


RENAMED: dict[str, str | Dropped] = {
    "actor.mask_tool_tokens": Dropped(True),
    "actor.ablation_normalizer": Dropped("masked"),
    "rollout.top_p": Dropped(1.0),
}
"""Old `section.key` -> the new one, or `Dropped`."""
MOVED = {
    "agent_r1.worlds.populations:": "agent_r1_recipes.two_tools.populations:",
    "agent_r1.worlds.": "agent_r1_recipes.",
}
"""How names of our own code began in earlier runs -> how they begin now."""


def renamed(saved: dict[str, Any]) -> dict[str, Any]:
    """Return `saved` under today's keys. A dropped key of another value stays, and is refused as unknown."""
    result = {section: dict(values) if isinstance(values, dict) else values for section, values in saved.items()}
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        values = result.get(section)
        if (
            not isinstance(values, dict)
            or key not in values
            or (isinstance(new, Dropped) and values[key] != new.default)
        ):
            continue
        value = values.pop(key)
        if isinstance(new, str):
            section, _, key = new.partition(".")
            result.setdefault(section, {})[key] = value
    for values in result.values():
        if isinstance(values, dict):
            values.update({key: _moved(value) for key, value in values.items() if isinstance(value, str)})
    return result


def _moved(name: str) -> str:
    old = next((old for old in MOVED if name.startswith(old)), "")
    return MOVED[old] + name.removeprefix(old) if old else name


def renamed_card(card: dict[str, Any]) -> dict[str, Any]:
    """Return an eval card under today's keys. Earlier ones have the interval of exact match alone."""
    return {"score_ci95": card.get("em_ci95") or [card["score"]] * 2} | card
