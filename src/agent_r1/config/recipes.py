"""Find recipes: folders with a preset, code, and a table of names.

In: recipes/ of the checkout, or a user's folder from `--recipe`. Out: presets by name, and the
user's names in the tables. Next: `load.py` reads the presets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.config import plugins, tables
from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest

DEFAULT = "discover"
"""The preset without `--preset`, on a machine without a large GPU."""
USER = "of a user's recipe"
"""Marks a name that a user's recipe added."""


def preset_files() -> dict[str, Path]:
    """Map preset names to files.

    RECIPE/preset.yaml has the recipe's name, other files their own.
    """
    files: dict[str, Path] = {}
    for folder in plugins.recipe_folders():
        for file in folder.iterdir():
            if file.name.endswith(".yaml"):
                stem = file.name.removesuffix(".yaml")
                name = stem
                if stem == "preset":
                    name = folder.name.replace("_", "-")
                files[name] = file
    return dict(sorted(files.items()))


def preset_names() -> list[str]:
    """List the names that `--preset` accepts."""
    return list(preset_files())


def preset_named(recipe: str | None, preset: str | None) -> str | None:
    """Resolve `--recipe` and `--preset` to one preset, and add the names of a user's recipe."""
    if recipe and preset:
        raise ConfigError(
            "--recipe already names a preset; give only one of --recipe and --preset",
            code="exclusive_options",
        )
    if recipe:
        preset = preset_of(recipe)
    if preset and preset.endswith((".yaml", ".yml")):
        add(Path(preset).expanduser().parent / "recipe.toml")
    return preset


def preset_of(recipe: str) -> str:
    """Return the preset of `--recipe`: a folder's preset.yaml, or one of our names.

    Raises ConfigError.
    """
    file = Path(recipe).expanduser() / "preset.yaml"
    name = recipe.replace("_", "-")
    if file.is_file():
        for preset, built_in in preset_files().items():
            if file.samefile(str(built_in)):
                return preset
        return str(file)
    if name in preset_names():
        return name
    raise ConfigError(
        f"--recipe {recipe}: there is no {file}{nearest(name, preset_names())}; `agent-r1 new "
        f"FOLDER` writes one, and the built-in presets are {', '.join(preset_names())}",
        code="missing_recipe",
    )


def add(file: Path) -> None:
    """Add the names of a user's recipe.toml. Raises ConfigError.

    Code is FILE.py:NAME next to it, or MODULE:NAME.
    """
    if not file.is_file():
        return
    if file.resolve() in [Path(str(ours)).resolve() for ours in plugins.manifests()]:
        return
    try:
        table = tables.parse_table(bounds.read_file(file).decode())
    # AttributeError: a name outside all tables
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {' '.join(str(error).split())}", code="bad_recipe"
        ) from None
    for kind, names in table.items():
        if kind not in tables.kinds():
            raise ConfigError(
                f"{file}: the table {kind!r} is unknown{nearest(kind, tables.kinds())}",
                code="unknown_name",
            )
        # A process may name the same recipe twice; only names of other recipes are refused.
        others = {name for name, facts in tables.entries(kind).items() if not facts.get(USER)}
        tables.refuse_twice(file, kind, others & names.keys())
        for name, facts in names.items():
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
            tables.entries(kind)[name] = facts | texts | {USER: True}


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
        if part not in tables.PARTS:
            raise ConfigError(
                f"{file}: setting.{name}: the part {part!r} is unknown"
                f"{nearest(part, tables.PARTS)}; choose from {', '.join(tables.PARTS)}",
                code="unknown_name",
            )
    return list(facts.values())


def recipe_code(names_by_kind: Mapping[str, list[str]]) -> list[str]:
    """List the code that these names of users' recipes stand for."""
    code = []
    for kind, names in names_by_kind.items():
        for name in names:
            facts = tables.entries(kind).get(name, {})
            if facts.get(USER):
                code.append(facts["code"])
    return code
