"""Load, check and save one configuration.

In: a preset's name and words of the command line. Out: a `Config`. Next: `workspace.py` names
folders after its fingerprints, and `stages.py` passes its sections on. Later layers override
earlier ones:

    defaults in settings.py
    the preset
    the preset's section of the data set        named as `data.name`, such as `tinyhop:`
    the preset's section of the algorithm       named as it; else `ppo:` with a critic, or `grpo:`
    `section.key=value` of the command line

A preset that `extends` another one overrides all of it, including its sections. An impossible
combination is refused in one line with the remedy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agent_r1.config import plugins, presets, tables
from agent_r1.config.key_values import addresses, find_key
from agent_r1.config.presets import preset_names
from agent_r1.config.renamed import (
    RENAMED_SETTINGS,
    REPLACED_PRESETS,
    copy_sections,
    translate_keys,
)
from agent_r1.config.settings import OUTSIDE, OUTSIDE_WHILE_DEFAULT, DataConfig, Engine, Section
from agent_r1.config.whole import Config, all_settings
from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest
from agent_r1.ground.ui import say

ALGORITHMS = tables.names("estimator")
"""Our own ones: names of a user's recipe are added later, and only checked by `_check_names`."""
ENGINES = get_args(Engine)
AUTO = "auto"
"""Value of a setting that the machine or the model decides."""

# --------------------------------------------------------------------------------------- load, save


def load_config(
    preset: str | None = None,
    overrides: list[str] | None = None,
    *,
    algorithm: str | None = None,
    seed: int | None = None,
    trains: bool = True,
) -> Config:
    """Resolve a configuration.

    Args:
        preset: A name, or a file (default: `presets.DEFAULT`).
        overrides: `section.key=value` strings; values are YAML.
        algorithm: Overrides `algorithm`, and so selects the preset's section of that name.
        seed: Overrides `seed`.
        trains: Whether the command trains; otherwise, as for `agent-r1 data`, batches need not fit
        together.

    Raises ConfigError naming the key and its nearest match.
    """
    override_layer = _resolve_paths(_read_overrides(overrides or []), Path.cwd())
    if algorithm is not None:
        override_layer["algorithm"] = algorithm
    if seed is not None:
        override_layer["seed"] = seed
    preset = preset or presets.DEFAULT
    preset_layers = _read_preset(preset)
    # All layers together choose the sections. The last one may: data.name=rows on the command line.
    merged_layer = _merge(*_insert_implied([*preset_layers, override_layer]))
    data_name, algorithm_name = _final_names(merged_layer)
    layers: list[dict[str, Any]] = []
    for layer in preset_layers:
        layers += [layer, *_pop_sections(layer, data_name, algorithm_name)]
    name_layer = {"preset": _resolve_preset(preset, Path.cwd())}
    layers = _insert_implied([*layers, name_layer, override_layer])
    return _validate(_merge(*layers), trains)


def _final_names(merged: dict[str, Any]) -> tuple[str, str]:
    """Return `data.name` and `algorithm` of merged layers, or their defaults."""
    fields = all_settings().config.model_fields
    algorithm = str(merged.get("algorithm", fields["algorithm"].default))
    data = merged.get("data")
    if isinstance(data, dict) and "name" in data:
        return str(data["name"]), algorithm
    return fields["data"].get_default(call_default_factory=True).name, algorithm


def _pop_sections(preset: dict[str, Any], data_name: str, algorithm: str) -> list[dict[str, Any]]:
    """Remove all sections for data sets and algorithms from `preset`. Return those that apply.

    So a preset can be tuned for its own questions, and still be one to start from for others.
    """
    per_data = {name: preset.pop(name, None) or {} for name in tables.names("data")}
    per_algorithm = {name: preset.pop(name, None) or {} for name in tables.names("estimator")}
    # An unknown algorithm gets some section here, and its message by `_check_names`.
    critic = algorithm in per_algorithm and tables.algorithm_has(algorithm, "critic")
    fallback = per_algorithm["ppo" if critic else "grpo"]
    return [per_data.get(data_name, {}), per_algorithm.get(algorithm) or fallback]


def _insert_implied(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Insert the settings that an environment's scheme implies, before the layer that names it.

    So `env.name=gym:FILE.py:Class` brings its own rows and demonstrator, and the same layer or a
    later one may set others.
    """
    result: list[dict[str, Any]] = []
    for layer in layers:
        env = layer.get("env")
        name = env.get("name") if isinstance(env, dict) else None
        entry = tables.env_scheme(str(name))
        if entry is not None:
            # Our own table names this code, and the user named the scheme.
            plugins.trust(_strings(entry["implies"].get("cold_start", {})))
            result.append(entry["implies"])
        result.append(layer)
    return result


def apply_overrides(config: Config, overrides: list[str], trains: bool = True) -> Config:
    """Return `config` with `section.key=value` strings applied.

    Raises ConfigError as `load_config` does.
    """
    values = _resolve_paths(_read_overrides(overrides), Path.cwd())
    return _validate(_merge(config.model_dump(), values), trains)


def to_yaml(config: Config) -> str:
    """Format the resolved configuration as YAML, for a run's config.yaml."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def from_yaml(path: Path, written_here: bool = False) -> Config:
    """Read a run's config.yaml, with keys of earlier versions translated.

    Args:
        written_here: The parent process wrote it, after the user named its code and its recipe
        there. So the code that it names is trusted.

    Raises ConfigError if it is damaged or of another version.
    """
    try:
        values = bounds.read_yaml(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as YAML ({type(error).__name__}); restore the file, or "
            "choose another run",
            code="damaged_config",
        ) from None
    preset = ""
    if isinstance(values, dict):
        preset = str(values.get("preset", ""))
        values = translate_keys(values)
    recipe = None
    if presets.is_file_name(preset):
        recipe = Path(preset).parent / "recipe.toml"
    if written_here and recipe:
        tables.add_recipe(recipe)
    try:
        config = _validate(values)
    except ConfigError as error:
        hint = ""
        if recipe and recipe.is_file():
            hint = f" Or does it need the names of its recipe, --recipe {recipe.parent}?"
        raise ConfigError(
            f"{path}: {error}; was this run made by another version?{hint}", code=error.code
        ) from None
    if written_here:
        plugins.trust(all_code(config))
    elif preset in presets.preset_files():
        # The file may name any code, our preset only ours: loading the preset trusts that.
        load_config(preset)
    return config


def preset_title(preset: str) -> str:
    """Return a preset's name, or of a user's file its stem (for preset.yaml: its folder)."""
    if not presets.is_file_name(preset):
        return preset
    path = Path(preset)
    return path.parent.name if path.stem == "preset" else path.stem


def _read_preset(name: str, children: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Read a preset by name or file. Return one layer for it, after those that it `extends`.

    `children` are the presets that extend this one. Raises ConfigError.
    """
    if name in children:
        raise ConfigError(
            f"presets extend one another in a circle: {' -> '.join([*children, name])}",
            code="preset_circle",
        )
    if not presets.is_file_name(name) and name not in preset_names():
        hint = nearest(name, preset_names())
        if name in REPLACED_PRESETS:
            hint = f" (it is gone, and {REPLACED_PRESETS[name]!r} is in its place)"
        raise ConfigError(
            f"unknown preset {name!r}{hint}; choose from {', '.join(preset_names())}, or name a "
            "file (FILE.yaml)",
            code="unknown_preset",
        )
    if presets.is_file_name(name):
        path = Path(name).expanduser()
        tables.add_recipe(path.parent / "recipe.toml")
    else:
        path = presets.preset_files()[name]
    try:
        preset = bounds.read_yaml(path) or {}
    except FileNotFoundError:
        raise ConfigError(
            f"there is no preset file {path}; `agent-r1 new FOLDER` writes one, FOLDER/preset.yaml",
            code="missing_preset",
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the preset {path} cannot be read: {' '.join(str(error).split())}", code="bad_preset"
        ) from None
    if not isinstance(preset, dict):
        raise ConfigError(
            f"the preset {path} has no settings; it looks like `trainer: {{steps: 40}}`",
            code="bad_preset",
        )
    preset = _resolve_paths(preset, path.resolve().parent)
    parent = preset.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(
            f"the preset {path}: extends={parent!r} names no preset; write one name, such as "
            "`extends: small`",
            code="bad_preset",
        )
    if parent and presets.is_file_name(parent):
        parent = str(path.resolve().parent / parent)
    if not parent:
        return [preset]
    return [*_read_preset(parent, (*children, name)), preset]


def _resolve_paths(layer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `layer` with the names of code and files made absolute, from `folder`.

    The user wrote this layer, so the code, commands and addresses that it names are trusted.
    """
    layer = copy_sections(layer)
    settings = all_settings()
    if "preset" in layer:
        layer["preset"] = _resolve_preset(layer["preset"], folder)
    for section, values in layer.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            key = f"{section}.{name}"
            if key in settings.code:
                values[name] = _resolve_each(_resolve_code, value, folder)
            elif key in settings.trusted_fields:
                plugins.trust(_strings(value))
            elif key in settings.files:
                values[name] = _resolve_each(_resolve_file, value, folder)
    return layer


def _resolve_each(resolve: Callable[[Any, Path], Any], value: Any, folder: Path) -> Any:
    """Resolve a value, or each entry of a list."""
    if isinstance(value, list):
        return [resolve(entry, folder) for entry in value]
    return resolve(value, folder)


def _resolve_code(name: Any, folder: Path) -> Any:
    """Make the file of user-defined code absolute, and trust the name.

    What is no string stays: pydantic refuses it later, with the setting's name.
    """
    if not isinstance(name, str):
        return name
    if plugins.is_user_code(name):
        name = plugins.absolute(name, folder)
    plugins.trust([name])
    return name


def _resolve_file(name: Any, folder: Path) -> Any:
    """Return the path from `folder` if there is such a file; otherwise `name` itself."""
    if not isinstance(name, str):
        return name
    # Links stay: what a link in the hub's cache points to has no suffix, which tells the format.
    path = os.path.abspath(folder / os.path.expanduser(name))
    return path if os.path.exists(path) else name


def _resolve_preset(preset: Any, folder: Path) -> Any:
    """Return a preset's file as an absolute path without links; a name does not change.

    A run is found again by this path, however the user spells it.
    """
    if not (isinstance(preset, str) and presets.is_file_name(preset)):
        return preset
    return str((folder / os.path.expanduser(preset)).resolve())


def _strings(value: Any) -> list[str]:
    """List the strings of a setting: itself, or the values of a table."""
    entries = value.values() if isinstance(value, dict) else [value]
    return [entry for entry in entries if isinstance(entry, str)]


def all_code(config: Config) -> list[str]:
    """List what needs the user's trust: names of user-defined code, and `Trusted` settings."""
    return [*user_code_names(config), *trusted_settings(config).values()]


def trusted_settings(config: Config) -> dict[str, str]:
    """Return setting -> command or address, for `Trusted` settings that differ from the default."""
    places = {}
    for key, field in all_settings().trusted_fields.items():
        value = _value(config, key)
        if value == field.default:
            continue
        if isinstance(value, dict):
            for name, place in value.items():
                places[f"{key}.{name}"] = place
        else:
            places[key] = value
    return places


def _value(config: Config, key: str) -> Any:
    """Return the value of `section.key`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def user_code(config: Config, trains: bool = True) -> list[str]:
    """List a run's user-defined code: in settings, and by names of a user's recipe.

    If the code changes, artefacts are made anew and a run is not resumed.

    Args:
        trains: False for a cold start, which uses no estimator.
    """
    names: dict[str, list[Any]] = {
        "data": [config.data.name],
        "env": [config.env.name],
        "tool": config.env.tools,
        "reward": [config.env.reward, *config.env.rules],
    }
    if trains:
        names["estimator"] = [config.algorithm]
    return [*user_code_names(config), *tables.recipe_code(names)]


def user_code_names(config: Config) -> dict[str, str]:
    """Map each name of user-defined code to the setting that names it."""
    settings = {}
    for key in all_settings().code:
        value = _value(config, key)
        names = value if isinstance(value, list) else [value]
        for name in names:
            if name and plugins.is_user_code(name):
                settings[name] = key
    return settings


def _read_overrides(overrides: list[str]) -> dict[str, Any]:
    """Parse `["trainer.steps=20"]` to `{"trainer": {"steps": 20}}`.

    YAML reads 1e-4 as a string, because it has no dot; pydantic converts it.
    """
    layer: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(
                f"override {override!r} is not of the form section.key=value (for example "
                "trainer.steps=20)",
                code="bad_override",
            )
        try:
            value = bounds.parse_yaml(text)
        except (ValueError, yaml.YAMLError):  # an open bracket, or an impossible date
            raise ConfigError(
                f"the value of {key!r} is not valid YAML after the =", code="bad_override"
            ) from None
        # env.mcp.NAME=COMMAND sets one entry of a table. Otherwise all after the first dot is one
        # name, so that the message about an unknown key has it as the user wrote it.
        is_entry = ".".join(key.split(".")[:2]) in all_settings().tables
        for name in reversed(key.split(".", 2 if is_entry else 1)):
            value = {name: value}
        layer = _merge(layer, value)
    return layer


def _merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge layers key by key; later layers win.

    A table of shares is replaced as a whole: half of an old one would not add up with the new one.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            both_tables = isinstance(value, dict) and isinstance(result.get(name), dict)
            if both_tables and name not in all_settings().replaced_tables:
                value = _merge(result[name], value)
            result[name] = value
    return result


def _validate(values: Any, trains: bool = True) -> Config:
    """Build the configuration and check its conflicts. Raises ConfigError."""
    _refuse_keys(addresses(values))  # before a message shows a value
    try:
        config = all_settings().config.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None
    config = _resolve_auto(config)
    _check_names(config)
    _refuse_keys(trusted_settings(config).items())
    for conflict in _find_conflicts(config, trains):
        if isinstance(conflict, ConfigError):
            raise conflict
        raise ConfigError(conflict, code="settings_conflict")
    return config


def _find_conflicts(config: Config, trains: bool) -> Iterator[ConfigError | str]:
    """Yield the conflicts of the core's settings, then those that their owners find.

    Each says cause and remedy. Only the first is shown: the others may follow from it.
    """
    yield from _task_conflicts(config)
    yield from _reward_conflicts(config.env)
    yield from _learning_conflicts(config)
    if trains:
        yield from _batch_conflicts(config)
    for name in type(config).model_fields:
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            continue
        # A section joins the classes of its owners (whole.py). Each may declare `conflicts`, and a
        # plain call would find only the first.
        for owner in type(section).__mro__:
            if "conflicts" in vars(owner):
                yield from owner.conflicts(config, trains)


def _resolve_auto(config: Config) -> Config:
    """Replace `auto` in the settings that have a function for it, and say by what.

    Only the name that is found reaches rows, the names of artefacts, config.yaml and cards.
    """
    for setting, code_of_part in tables.entries("setting").items():
        if "auto" not in code_of_part or _value(config, setting) != AUTO:
            continue
        section, key = setting.split(".")
        value = plugins.import_object(code_of_part["auto"], setting)(config)
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
        config.replaced_auto.append(setting)
        say(f"{setting}={AUTO}: {value}", sys.stderr)
    return config


def keep_stored(config: Config, stored_config: Config) -> Config:
    """Return `config` with what a run's start found for `auto` when it loaded its settings.

    A resumed run may find another value now, for example with a newer version. A value that the
    user names here stays.
    """
    overrides = [f"{setting}={_value(stored_config, setting)}" for setting in config.replaced_auto]
    return apply_overrides(config, overrides) if overrides else config


def keep_choices(config: Config, other: Config) -> Config:
    """Return `config` with the values of `other` where a setting is still `auto` after loading.

    A stage of the run chooses these, such as `verl.attention` (`OutsideWhileDefault`).
    """
    sections = {}
    for name in type(config).model_fields:
        part = getattr(config, name)
        if not isinstance(part, BaseModel):
            continue
        values = {}
        for key, field in type(part).model_fields.items():
            if OUTSIDE_WHILE_DEFAULT in field.metadata and getattr(part, key) == AUTO:
                values[key] = getattr(getattr(other, name), key)
        sections[name] = part.model_copy(update=values)
    return config.model_copy(update=sections)


def keep_spelling(value: Any, stored: Any) -> Any:
    """Return `value` with the paths of `stored` where both name the same place.

    Both are a configuration, a section or a setting. `model.path=out/m` and `model.path=./out/m/`
    are one model, but two fingerprints, and artefacts have the names of fingerprints.
    """
    if isinstance(value, BaseModel):
        kept = {}
        for name in type(value).model_fields:
            kept[name] = keep_spelling(getattr(value, name), getattr(stored, name))
        return value.model_copy(update=kept)
    if isinstance(value, str) and isinstance(stored, str) and _is_same_place(value, stored):
        return stored
    return value


def _is_same_place(one: str, other: str) -> bool:
    """Return whether both are paths of one file or folder, which exists."""
    # Two settings may be equal strings that are no paths; then it does not matter which is kept.
    place = os.path.realpath(os.path.expanduser(one))
    return place == os.path.realpath(os.path.expanduser(other)) and os.path.exists(place)


def shareable(config: Config) -> Config:
    """Return `config` as a tracker or the reader of a model card may see it.

    Commands and addresses are left out, because they may hold keys. Of a path on this machine only
    the name of the file or folder is kept.
    """
    sections = {}
    for name in type(config).model_fields:
        part = getattr(config, name)
        sections[name] = part.without_commands() if isinstance(part, Section) else part
    for key, field in all_settings().trusted_fields.items():
        section, name = key.split(".")
        default = field.get_default(call_default_factory=True)
        sections[section] = sections[section].model_copy(update={name: default})
    return _without_folders(config.model_copy(update=sections))


def _without_folders(value: Any) -> Any:
    """Return a configuration, a section or a setting with the names of its paths only."""
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        return value.model_copy(update={n: _without_folders(getattr(value, n)) for n in names})
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _without_folders(entry) for key, entry in value.items()}
    if not isinstance(value, str):
        return value
    scheme, place = plugins.split_scheme(value)  # gym:/home/me/game.py:Game
    if not place.startswith(("/", "~")):
        return value
    path = Path(place)
    place = path.name
    if path.stem == "preset":  # its folder has the name
        place = f"{path.parent.name}/{path.name}"
    return f"{scheme}:{place}" if scheme else place


def _refuse_keys(places: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError for a command or an address that holds a key. The key is not shown."""
    for setting, place in places:
        name = find_key(place)
        if name is not None:
            raise ConfigError(
                f"{setting} holds the value of {name}, which may be a key, and config.yaml would "
                "keep it. Export it as a variable, and name the variable in env.mcp_variables, "
                "env.mcp_tokens, rollout.agent_environment or rollout.api_key",
                code="key_in_command",
            )


def _explain(error: ValidationError) -> ConfigError:
    """Describe pydantic's first error in one line: its cause, and the nearest valid name."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    value = first["input"]
    kind = first["type"]
    context = first.get("ctx", {})
    if kind == "extra_forbidden":
        new = RENAMED_SETTINGS.get(key)
        if isinstance(new, str):
            hint = f"; it is {new} now"
        else:
            settings = all_settings()
            hint = nearest(key, [*settings.fields, *settings.config.model_fields])
        return ConfigError(
            f"unknown configuration key {key!r}{hint}; `agent-r1 train --dry-run --verbose` lists "
            "all keys",
            code="unknown_setting",
        )
    if kind == "literal_error":
        choices = re.findall("'(.*?)'", context["expected"])
        return ConfigError.unknown(key, value, choices)
    text = first["msg"]
    if kind == "no_variable":  # the value may be a key, and is not shown
        return ConfigError(f"{key}: {text}", code="no_variable")
    message = f"{key}={value!r}: {context.get('error') or text[0].lower() + text[1:]}"
    if kind.startswith(("greater_than", "less_than", "finite_number", "too_short", "too_long")):
        return ConfigError(message, code="out_of_range")
    if kind.endswith(("_type", "_parsing", "_from_float")):
        return ConfigError(message, code="wrong_type")
    return ConfigError(message, code="bad_setting")


# ------------------------------------------------------------------------------------- fingerprints


def fingerprint(*parts: Any) -> str:
    """Return eight hex digits that depend on all parts (JSON-able values or sections).

    Names of artefacts, not protection: of 1,000 of them, two agree with a chance of 1 in 8,600.
    """
    return hashlib.sha256(
        json.dumps([fingerprint_values(p) for p in parts], sort_keys=True).encode()
    ).hexdigest()[:8]


def fingerprint_values(part: Any) -> Any:
    """Convert `part` to plain values, without the `OutsideFingerprint` fields of a section."""
    if not isinstance(part, BaseModel):
        return part
    values = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        is_default = value == field.get_default(call_default_factory=True)
        is_outside = OUTSIDE_WHILE_DEFAULT in field.metadata and is_default
        if not is_outside and OUTSIDE not in field.metadata:
            values[name] = fingerprint_values(value)
    return values


# ---------------------------------------------------------------------------------------- conflicts


def _check_names(config: Config) -> None:
    """Raise ConfigError for a name in no table, and for code without its place."""
    tables.entry_of("estimator", config.algorithm, "algorithm")
    tables.entry_of("ratio", config.actor.ratio_level, "actor.ratio_level")
    for text in config.trainer.eval_conditions:
        tables.entry_of("condition", text.partition(" ")[0], "trainer.eval_conditions")
    kinds = {
        "data.name": "data",
        "env.reward": "reward",
        "rollout.flow": None,
        "cold_start.demonstrator": None,
    }
    for setting, kind in kinds.items():
        name = _value(config, setting)
        if name is None or plugins.is_user_code(name):
            continue
        if kind is None:
            raise ConfigError(
                f"{setting}={name!r} names no code; give FILE.py:NAME or MODULE:NAME",
                code="bad_setting",
            )
        tables.entry_of(kind, name, setting)


def _task_conflicts(config: Config) -> Iterator[ConfigError]:
    """Find names of models, questions and searches that do not exist, or not together."""
    dataset = config.data
    search = config.search
    for name, setting in ((config.model.path, "model.path"), (search.encoder, "search.encoder")):
        scheme = tables.scheme_of(name)
        if scheme:
            scheme.find(name, setting)  # raises for a name that the scheme does not have
    if search.min_k is not None and search.min_k > search.top_k:
        yield ConfigError(
            f"search.min_k={search.min_k} is more than search.top_k={search.top_k}; results have "
            "search.min_k to search.top_k passages",
            code="min_k_above_top_k",
        )
    is_generated = config.data_facts.get("generated")
    if is_generated and (dataset.source or dataset.corpus != DataConfig().corpus):
        others = [
            name for name, facts in tables.entries("data").items() if not facts.get("generated")
        ]
        yield ConfigError(
            f"{dataset.name} is generated and takes no data.source or data.corpus; set data.name "
            f"to {', '.join(others)}",
            code="unused_setting",
        )
    # User-defined questions share the facts of `rows`, and their function needs no file.
    needs_source = config.data_facts.get("needs_source") and not plugins.is_user_code(dataset.name)
    if needs_source and not dataset.source:
        yield ConfigError(
            f"data.name={dataset.name} has no questions; name a JSONL or parquet file of them with "
            "data.source",
            code="missing_source",
        )
    index = search.index
    if not re.fullmatch(r"auto|Flat|(IVF|HNSW)\d+\S*", index) and not Path(index).is_dir():
        yield ConfigError(
            f"search.index={index!r} is unknown; choose auto, Flat, HNSW32, IVF4096,PQ64 or the "
            "like, or an index's folder",
            code="unknown_index",
        )
    if search.url and not re.fullmatch(r"https?://[^/\s]+(/retrieve)?/?", search.url):
        yield ConfigError(
            f"search.url={search.url!r} is not an address; give one such as http://127.0.0.1:8100 "
            "(Search-R1's: .../retrieve)",
            code="bad_address",
        )


def _reward_conflicts(env: Any) -> Iterator[ConfigError]:
    """Find rewards that are not defined, or that pay wrong answers like right ones."""
    yield from _address_conflicts(env)
    for name in env.rules:
        tables.entry_of("reward", name, "env.rules")
    if env.rules and (not env.reward or sum(env.rules.values()) > 1):
        yield ConfigError(
            f"env.rules={env.rules} mixes rules with env.reward={env.reward}; set env.reward, and "
            "shares of 1 or less in all (env.reward has the rest)",
            code="bad_mixture",
        )
    # A right answer pays 1. An agent that gets as much for calls need not answer.
    reward_of_calls = env.call_reward * env.max_tool_calls
    if reward_of_calls >= 1:
        yield ConfigError(
            f"env.call_reward={env.call_reward:g} pays {env.max_tool_calls} calls "
            "(env.max_tool_calls) as much as a right answer; set it below "
            f"1/{env.max_tool_calls}",
            code="excessive_reward",
        )
    elif reward_of_calls + env.evidence_reward >= 1:
        yield ConfigError(
            f"env.evidence_reward={env.evidence_reward:g} and the rewards of calls pay a wrong "
            f"answer as much as a right one; set it below {1 - reward_of_calls:g}",
            code="excessive_reward",
        )


def _learning_conflicts(config: Config) -> Iterator[ConfigError]:
    """Find limits and losses that do not go together, whether or not the command trains."""
    rollout = config.rollout
    actor = config.actor
    if rollout.max_tokens_per_turn >= rollout.max_context:
        yield ConfigError(
            "rollout.max_tokens_per_turn must be smaller than rollout.max_context",
            code="turn_exceeds_context",
        )
    if config.algorithm_has("groups") and rollout.samples_per_prompt < 2:
        yield ConfigError(
            f"{config.algorithm} compares samples of one prompt and has nothing to learn from a "
            "group of one; set rollout.samples_per_prompt to 2 or more, or use ppo",
            code="group_of_one",
        )
    # In the reward only the value of the KL counts, and k1's mean is the KL. In the loss its
    # gradient counts, and k1's has mean 0.
    in_reward = actor.kl_in == "reward"
    if in_reward != (actor.kl_estimator == "k1"):
        yield ConfigError(
            f"actor.kl_estimator={actor.kl_estimator} with actor.kl_in={actor.kl_in} does not pull "
            "the policy to the reference (see losses.kl_penalty); set "
            f"actor.kl_estimator={'k1' if in_reward else 'k3'}",
            code="mismatched_kl",
        )


def _address_conflicts(env: Any) -> Iterator[ConfigError]:
    """Find clients of servers without an address, and addresses without their client."""
    for kind, setting, value in (
        ("env", "env.name", env.name),
        ("reward", "env.reward", env.reward),
    ):
        for name, facts in tables.entries(kind).items():
            key = facts.get("address")
            if not key:
                continue
            has_address = bool(re.fullmatch(r"https?://\S+", getattr(env, key) or ""))
            if (name == value) != has_address:
                yield ConfigError(
                    f"{setting}={name} and env.{key}=http://... require each other: the first is "
                    f"the protocol, the second the server; here {setting}={value} and "
                    f"env.{key}={getattr(env, key)}",
                    code="address_without_name",
                )


def _batch_conflicts(config: Config) -> Iterator[ConfigError]:
    """Find settings of a training step that do not fit together."""
    rollout = config.rollout
    actor = config.actor
    trains_critic = config.algorithm_has("critic")
    if actor.lora_rank and config.engine == "local":
        yield ConfigError(
            f"actor.lora_rank={actor.lora_rank} needs --engine verl; the local loop trains all "
            "weights (actor.lora_rank=0)",
            code="lora_without_verl",
        )
    warmup = config.critic.warmup_steps
    if trains_critic and warmup >= config.trainer.steps:
        yield ConfigError(
            f"critic.warmup_steps={warmup} leaves none of trainer.steps={config.trainer.steps} for "
            "the policy, which would not be trained; set it below trainer.steps",
            code="policy_not_trained",
        )
    if rollout.prompts_per_step > config.data.train:
        yield ConfigError(
            f"rollout.prompts_per_step={rollout.prompts_per_step} is more than "
            f"data.train={config.data.train} questions; raise the second or lower the first",
            code="too_few_questions",
        )
    batch = rollout.prompts_per_step * rollout.samples_per_prompt
    minibatches = {"actor": actor.minibatches}
    if trains_critic:
        minibatches["critic"] = config.critic.minibatches
    for name, count in minibatches.items():
        if batch % count:
            yield ConfigError(
                f"a batch of {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} "
                f"samples = {batch} trajectories does not divide into {name}.minibatches={count}; "
                f"choose a divisor of {batch}",
                code="indivisible_batch",
            )
