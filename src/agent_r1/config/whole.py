"""Join the core's settings with those that recipes and engines declare.

In: `settings.py`, and `fields` in the tables `[setting."SECTION.OWNER"]`: a class of settings. It
extends the core's class for that section, so its owner reads both through it; a section unknown to
the core is a separate class. Out: `Config`, which has every setting. Next: `load.py` fills it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from inspect import get_annotations
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from agent_r1.config import plugins, settings, tables
from agent_r1.ground.errors import ConfigError


class NamedConfig(settings.Config):
    """The settings, with what the tables say about the names in them."""

    def algorithm_has(self, fact: Literal["critic", "groups", "greedy"]) -> bool:
        """Return whether the estimator has a critic, compares samples, or plays greedy ones."""
        return tables.algorithm_has(self.algorithm, fact)

    @property
    def greedy_episodes(self) -> int:
        """Count a step's greedy episodes, which serve as a baseline and are not trained on."""
        return tables.greedy_episodes(self.algorithm, self.rollout.prompts_per_step)

    @property
    def searches(self) -> bool:
        """Return whether one of the tools needs the run's index."""
        return tables.any_entry_has("tool", self.env.tools, "index")

    @property
    def data_facts(self) -> dict[str, Any]:
        """Return the facts of the data set's table entry: `generated`, `instructed` and so on."""
        return tables.entry_of("data", self.data.data_source, "data.name")


def join_sections() -> type[NamedConfig]:
    """Join all classes of each section. Raises ConfigError if two owners declare one setting."""
    cores: dict[str, Any] = {
        name: field.annotation for name, field in settings.Config.model_fields.items()
    }
    owners: dict[str, list[type[settings.Section]]] = defaultdict(list)
    for name, entry in tables.entries("setting").items():
        if "fields" not in entry:
            continue
        place = f"recipe.toml, setting.{name}.fields"
        owner = plugins.import_object(entry["fields"], place)
        section = name.partition(".")[0]
        base = cores.get(section, settings.Section)
        if not (isinstance(owner, type) and issubclass(owner, base)):
            raise ConfigError(
                f"{place}: {entry['fields']} does not extend {base.__name__}; write a class that "
                "does",
                code="wrong_code",
            )
        owners[section].append(owner)
    sections: dict[str, Any] = {}
    for section, parts in owners.items():
        core = cores.get(section)
        declared_by: dict[str, str] = {}
        if core:
            declared_by = dict.fromkeys(core.model_fields, "the core")
        for part in parts:
            for key in get_annotations(part):
                if key in declared_by:
                    raise ConfigError(
                        f"{section}.{key}: both {declared_by[key]} and {part.__module__} declare "
                        "it; rename one",
                        code="name_taken",
                    )
                declared_by[key] = part.__module__
        bases: set[type] = set()
        for part in parts:
            bases.update(part.__mro__[1:])
        parts = [part for part in parts if part not in bases]
        whole = create_model(
            (core or parts[0]).__name__, __base__=tuple(parts), __module__=__name__
        )
        # Validators are built when first used (`defer_build`): most classes only serve as bases.
        sections[section] = (whole, Field(default_factory=whole))
    return create_model("Config", __base__=NamedConfig, __module__=__name__, **sections)


class DeclaredSettings:
    """Hold every setting, and by annotation those that name code, files or commands."""

    def __init__(self):
        self.config = join_sections()
        self.fields: dict[str, FieldInfo] = {}
        for section, of in self.config.model_fields.items():
            for name, field in getattr(of.annotation, "model_fields", {}).items():
                self.fields[f"{section}.{name}"] = field
        self.code = self._with_mark(settings.NamesCode)
        self.files = self._with_mark(settings.NamesFile)
        self.trusted_fields = self._with_mark(settings.Trusted)
        values: dict[str, Any] = {}
        for key, field in self.fields.items():
            table = _dictionary_in(field.annotation)
            if table is not None:
                values[key] = get_args(table)[1]
        shares = {
            key for key, value in values.items() if getattr(value, "__origin__", value) is float
        }
        self.replaced_tables = {key.partition(".")[2] for key in shares}
        """Tables of numbers, which are shares: a later layer replaces all of them."""
        self.tables = values.keys() - shares
        """Other tables, whose entries are set one by one: `env.mcp.NAME=COMMAND`."""

    def _with_mark(self, alias: Any) -> dict[str, FieldInfo]:
        mark = alias.__metadata__[-1]
        return {key: field for key, field in self.fields.items() if mark in field.metadata}


def _dictionary_in(annotation: Any) -> Any:
    """Return the dictionary of an annotation such as `dict[str, float] | None`, or None."""
    if get_origin(annotation) is dict:
        return annotation
    if get_origin(annotation) is Annotated:
        return _dictionary_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        found = [_dictionary_in(part) for part in get_args(annotation)]
        return next((table for table in found if table is not None), None)
    return None


def all_settings() -> DeclaredSettings:
    """Return the settings, including those of a user's added recipe (tables.py)."""
    return _settings_of(tuple(tables.names("setting")))


@cache
def _settings_of(names: tuple[str, ...]) -> DeclaredSettings:
    return DeclaredSettings()


if TYPE_CHECKING:
    Config = NamedConfig
else:
    Config = all_settings().config
