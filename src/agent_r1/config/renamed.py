"""Know the names of earlier versions.

Keys of a run are translated, so that `report`, `inspect`, `eval` and `chat` open it. In: the
config.yaml or an eval card, as plain values. Out: the same with today's keys. `--resume` refuses
such a run, because it needs the checkpoint's exact settings. Nothing else is translated: for old
presets (`presets.py`) and tables of a recipe (`tables.py`), a message says the new name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agent_r1.ground.errors import ConfigError


class Dropped(NamedTuple):
    """Mark a removed setting. A run opens only if the setting had this value."""

    default: Any


RENAMED_SETTINGS: dict[str, str | Dropped] = {
    "actor.mask_tool_tokens": Dropped(True),
    "actor.ablation_normalizer": Dropped("masked"),
    "rollout.top_p": Dropped(1.0),
    "rollout.slots": "rollout.max_concurrent_episodes",
    "rollout.refill_rounds": "rollout.dynamic_sampling_rounds",
    "trainer.micro_tokens": "trainer.max_tokens_per_microbatch",
    "actor.ratio": "actor.ratio_level",
    "actor.mean_clip_low": "actor.span_clip_low",
    "actor.mean_clip_high": "actor.span_clip_high",
    "env.context_results": "env.window_results",
    "verl.patience_s": "verl.stall_timeout_s",
}
"""Old `section.key` -> the new one, or `Dropped`."""
REPLACED_PRESETS = {"sprint": "discover", "laptop": "discover"}
"""Preset that is gone -> the one in its place."""
RENAMED_TABLES = {
    "settings": '[setting."SECTION.OWNER"] with fields = "CODE"',
    "export": '[option."export --NAME"]',
    "agent": '[option] with "chat --demo" = "CODE"',
    "server": '[option] with "serve --backend NAME" = "CODE"',
    "env_scheme": "[scheme.NAME] with environments = true",
}
"""Kinds of tables that a recipe.toml of version 0.1.0 may have, and what to write now."""
NEW_PREFIXES = {
    "agent_r1.worlds.populations:": "agent_r1_recipes.two_tools.populations:",
    "agent_r1.worlds.": "agent_r1_recipes.",
}
"""Old prefix of a name of our own code -> the new prefix."""


def translate_keys(values_of_run: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with today's keys. A dropped key with another value stays, and is refused.

    Raises ConfigError for an old key with its new one: one of the two values would be ignored.
    """
    result = copy_sections(values_of_run)
    for old, new in RENAMED_SETTINGS.items():
        section, _, key = old.partition(".")
        values = result.get(section)
        if not isinstance(values, dict) or key not in values:
            continue
        if isinstance(new, Dropped) and values[key] != new.default:
            continue
        value = values.pop(key)
        if isinstance(new, str):
            section, _, key = new.partition(".")
            owner = result.setdefault(section, {})
            if isinstance(owner, dict) and key in owner:
                raise ConfigError(
                    f"{old} and {new} are the same setting, and both have a value; delete {old}",
                    code="setting_twice",
                )
            owner[key] = value
    for values in result.values():
        if isinstance(values, dict):
            for key, value in values.items():
                if isinstance(value, str):
                    values[key] = _current_name(value)
    return result


def copy_sections(layer: dict[str, Any]) -> dict[str, Any]:
    """Copy a configuration of plain values together with its sections."""
    copy = {}
    for section, values in layer.items():
        copy[section] = dict(values) if isinstance(values, dict) else values
    return copy


def _current_name(name: str) -> str:
    for old, new in NEW_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def translate_card(card: dict[str, Any]) -> dict[str, Any]:
    """Return an eval card with today's keys.

    Earlier cards have only the interval of exact match.
    """
    return {"score_ci95": card.get("em_ci95") or [card["score"]] * 2} | card
