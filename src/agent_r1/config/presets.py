"""Find presets by name.

In: recipes/ of the checkout, or a user's folder from `--recipe`. Out: the preset's file. Next:
`load.py` reads it.
"""

from __future__ import annotations

from pathlib import Path

from agent_r1.config import plugins, tables
from agent_r1.config.renamed import REPLACED_PRESETS
from agent_r1.ground.errors import ConfigError, nearest

DEFAULT = "discover"
"""The preset without `--preset`, on a machine without a large GPU."""


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


def is_file_name(preset: str) -> bool:
    """Return whether a preset is named by its file, which may not exist."""
    return preset.endswith((".yaml", ".yml"))


def replace_gone(name: str) -> str:
    """Return a preset's name, or that of the preset in place of it."""
    if name in preset_names() or Path(name).is_file():
        return name
    return REPLACED_PRESETS.get(name, DEFAULT)


def preset_named(recipe: str | None, preset: str | None) -> str | None:
    """Resolve `--recipe` and `--preset` to one preset, and add the names of a user's recipe."""
    if recipe and preset:
        raise ConfigError(
            "--recipe already names a preset; give only one of --recipe and --preset",
            code="exclusive_options",
        )
    if recipe:
        preset = preset_of(recipe)
    if preset and is_file_name(preset):
        tables.add_recipe(Path(preset).expanduser().parent / "recipe.toml")
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
    others = [
        preset
        for preset, built_in in preset_files().items()
        if Path(str(built_in)).parent.name.replace("_", "-") == name
    ]
    if others:
        raise ConfigError(
            f"--recipe {recipe}: this recipe has several presets; name one with --preset: "
            f"{', '.join(others)}",
            code="missing_recipe",
        )
    raise ConfigError(
        f"--recipe {recipe}: there is no {file}{nearest(name, preset_names())}; `agent-r1 new "
        f"FOLDER` writes one, and the built-in presets are {', '.join(preset_names())}",
        code="missing_recipe",
    )
