"""The whole configuration: the core's settings, and in the same sections those that recipes and engines declare.

In: `settings.py`, and the tables `[settings]`, each a name SECTION.OWNER with a class of settings. Such a class extends the
core's one for that section, so its owner reads both through it; a section that the core does not have is a class of its own.
Out: `Config`, which knows every setting. Next: `load.py` fills it.
"""

from __future__ import annotations

from collections import defaultdict
from inspect import get_annotations
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from agent_r1.config import own, settings, tables
from agent_r1.ground.errors import ConfigError


def join_sections() -> type[settings.Config]:
    """Join all classes of each section. Raises ConfigError where two owners declare one setting."""
    declared: dict[str, list[type[settings.Section]]] = defaultdict(list)
    for name, entry in tables.entries("settings").items():
        declared[name.partition(".")[0]].append(own.imported(entry["code"], f"[settings] {name}"))
    cores: dict[str, Any] = {name: field.annotation for name, field in settings.Config.model_fields.items()}
    sections: dict[str, Any] = {}
    for section, parts in declared.items():
        core = cores.get(section)
        taken = dict.fromkeys(core.model_fields, "the core") if core else {}
        for part in parts:
            for key in get_annotations(part):
                if key in taken:
                    raise ConfigError(
                        f"{section}.{key}: both {taken[key]} and {part.__module__} declare it; rename one"
                    )
                taken[key] = part.__module__
        parts = [part for part in parts if not any(part in other.__mro__[1:] for other in parts)]
        whole = create_model((core or parts[0]).__name__, __base__=tuple(parts), __module__=__name__)
        sections[section] = (whole, whole())
    return create_model("Config", __base__=settings.Config, __module__=__name__, **sections)


if TYPE_CHECKING:
    Config = settings.Config
else:
    Config = join_sections()
