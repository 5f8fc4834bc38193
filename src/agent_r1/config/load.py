"""Load, check and save one configuration.

In: a preset's name and words of the command line. Out: a `Config`. Next: `workspace.py` names
folders after its fingerprints, and `stages.py` passes its sections on. Later layers override
earlier ones:

    defaults in settings.py  <-  the preset  <-  its section of the data set  <-  its section of the
    algorithm  <-  `section.key=value`

The section of the data set has the name of `data.name`, such as `tinyhop:`. The section of the
algorithm has its name; otherwise `ppo:` serves algorithms with a critic and
`grpo:` the others. A preset that `extends` another one overrides all of it, including its section
of the algorithm. An impossible combination is refused in one line with the remedy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agent_r1.config import plugins, presets, tables
from agent_r1.config.key_values import addresses, find_key
from agent_r1.config.presets import preset_names
from agent_r1.config.renamed import RENAMED_SETTINGS, copy_sections, translate_keys
from agent_r1.config.settings import OUTSIDE, OUTSIDE_WHILE_DEFAULT, Engine, Section
from agent_r1.config.whole import Config, all_settings
from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest
from agent_r1.ground.ui import say

ALGORITHMS = tables.names("estimator")
ENGINES = get_args(Engine)


AUTO = "auto"

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
        trains: Whether the command trains; otherwise, as for `agent-r1 data`, batches need not fit
        together.

    Raises ConfigError naming the key and its nearest match.
    """
    overriding = _resolve_paths(_read_overrides(overrides or []), Path.cwd())
    if algorithm is not None:
        overriding["algorithm"] = algorithm
    if seed is not None:
        overriding["seed"] = seed
    preset = preset or presets.DEFAULT
    files = _read_preset(preset)
    preset = _resolve_preset(preset, Path.cwd())
    data_name, algorithm = _final_names(_merge(*with_implied([*files, overriding])))
    layers: list[dict[str, Any]] = []
    for file in files:
        layers += [file, *_pop_sections(file, data_name, algorithm)]
    layers = with_implied([*layers, {"preset": preset}, overriding])
    return _validate(_merge(*layers), trains)


def _final_names(merged: dict[str, Any]) -> tuple[str, str]:
    """Return the data set and the algorithm that all layers together name."""
    fields = all_settings().config.model_fields
    algorithm = merged.get("algorithm", fields["algorithm"].default)
    data = merged.get("data")
    if isinstance(data, dict) and "name" in data:
        return str(data["name"]), str(algorithm)
    return fields["data"].get_default(call_default_factory=True).name, str(algorithm)


def _pop_sections(file: dict[str, Any], data_name: str, algorithm: str) -> list[dict[str, Any]]:
    """Take a preset's sections for a data set or an algorithm. Return those that apply.

    `tinyhop:` is for `data.name=tinyhop`. So a preset can be tuned for its own questions, and still
    be one to start from for others. `ppo:` is for all algorithms with a critic, `grpo:` for those
    without, if their own name has no section.
    """
    per_data = {name: file.pop(name, None) or {} for name in tables.names("data")}
    per_algorithm = {name: file.pop(name, None) or {} for name in tables.names("estimator")}
    critic = algorithm in per_algorithm and tables.algorithm_has(algorithm, "critic")
    relative = "ppo" if critic else "grpo"
    return [
        per_data.get(data_name, {}),
        per_algorithm.get(algorithm) or per_algorithm[relative],
    ]


def with_implied(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
    """Read a run's config.yaml. Raises ConfigError if it is damaged or of another version.

    Args:
        written_here: The parent process wrote it, after the user named its code and its recipe
        there.
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
    table = None
    if _is_file(preset):
        table = Path(preset).parent / "recipe.toml"
    if written_here and table:
        tables.add_recipe(table)
    try:
        config = _validate(values)
    except ConfigError as error:
        theirs = ""
        if table and table.is_file():
            theirs = f" Or does it need the names of its recipe, --recipe {table.parent}?"
        raise ConfigError(
            f"{path}: {error}; was this run made by another version?{theirs}", code=error.code
        ) from None
    if written_here:
        plugins.trust(all_code(config))
    elif preset in presets.preset_files():
        load_config(preset)  # trusts the code that our own preset names, and no other
    return config


def preset_title(preset: str) -> str:
    """Return a preset's name, or of a user's file its stem (for preset.yaml: its folder)."""
    if not _is_file(preset):
        return preset
    path = Path(preset)
    return path.parent.name if path.stem == "preset" else path.stem


def _is_file(preset: str) -> bool:
    return preset.endswith((".yaml", ".yml"))


def _read_preset(name: str, children: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Read a preset by name or file, after the presets that it `extends`."""
    if name in children:
        raise ConfigError(
            f"presets extend one another in a circle: {' -> '.join([*children, name])}",
            code="preset_circle",
        )
    if not _is_file(name) and name not in preset_names():
        hint = nearest(name, preset_names())
        if name in presets.SUCCESSORS:
            hint = f" (it is gone, and {presets.SUCCESSORS[name]!r} is in its place)"
        raise ConfigError(
            f"unknown preset {name!r}{hint}; choose from {', '.join(preset_names())}, or name a "
            "file (FILE.yaml)",
            code="unknown_preset",
        )
    if _is_file(name):
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
    if parent and _is_file(parent):
        parent = str(path.resolve().parent / parent)
    if not parent:
        return [preset]
    return [*_read_preset(parent, (*children, name)), preset]


def _resolve_paths(layer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the names of code and files in `layer` from `folder`.

    The user wrote this layer, so its code may be imported.
    """
    layer = copy_sections(layer)
    settings = all_settings()
    if "preset" in layer:
        layer["preset"] = _resolve_preset(layer["preset"], folder)
    for key in (*settings.code, *settings.files, *settings.trusted_fields):
        section, name = key.split(".")
        values = layer.get(section)
        if not isinstance(values, dict) or name not in values:
            continue
        if key in settings.trusted_fields and key not in settings.code:
            plugins.trust(_strings(values[name]))
            continue
        resolve = _resolve_code if key in settings.code else _resolve_file
        if isinstance(values[name], list):
            values[name] = [resolve(entry, folder) for entry in values[name]]
        else:
            values[name] = resolve(values[name], folder)
    return layer


def _resolve_code(name: Any, folder: Path) -> Any:
    """Make the file of user-defined code absolute, and trust the name."""
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
    if not (isinstance(preset, str) and _is_file(preset)):
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
                places[f"{key}.{name}".rstrip(".")] = place
        else:
            places[key] = value
    return places


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def user_code(config: Config, updates: bool = True) -> list[str]:
    """List a run's user-defined code: in settings, and by names of a user's recipe.

    Args:
        updates: False for a cold start, which uses no estimator.
    """
    names: dict[str, list[Any]] = {
        "data": [config.data.name],
        "env": [config.env.name],
        "tool": config.env.tools,
        "reward": [config.env.reward, *config.env.rules],
    }
    if updates:
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

    `1e-4` stays a string, which pydantic converts.
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
        table = ".".join(key.split(".")[:2]) in all_settings().tables and key.count(".") > 1
        dots = 2 if table else 1  # env.mcp.NAME=COMMAND sets one entry of a table
        for name in reversed(key.split(".", dots)):
            value = {name: value}
        layer = _merge(layer, value)
    return layer


def _merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge layers key by key; later layers win, and replace tables of shares."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            if both and name not in all_settings().replaced_tables:
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
    for conflict in _all_conflicts(config, trains):
        if isinstance(conflict, ConfigError):
            raise conflict
        raise ConfigError(conflict, code="settings_conflict")
    return config


def _all_conflicts(config: Config, trains: bool) -> Iterator[ConfigError | str]:
    """Yield the conflicts of the core's settings, then those that their owners find."""
    yield from _conflicts(config)
    if trains:
        yield from _batch_conflicts(config)
    for name in type(config).model_fields:
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            continue
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
    """Return `config` with what a resumed run found for `auto`, whatever would be found now."""
    overrides = [f"{setting}={_value(stored_config, setting)}" for setting in config.replaced_auto]
    return apply_overrides(config, overrides) if overrides else config


def keep_choices(config: Config, other: Config) -> Config:
    """Return `config` with the values of `other` where a setting is still `auto`.

    These are the settings that a stage of a run chooses, not the loading (`OutsideWhileDefault`).
    """
    for name in type(config).model_fields:
        part = getattr(config, name)
        if not isinstance(part, BaseModel):
            continue
        values = {
            key: getattr(getattr(other, name), key)
            for key, field in type(part).model_fields.items()
            if OUTSIDE_WHILE_DEFAULT in field.metadata and getattr(part, key) == AUTO
        }
        if values:
            config = config.model_copy(update={name: part.model_copy(update=values)})
    return config


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
    places = [os.path.realpath(os.path.expanduser(path)) for path in (one, other)]
    return places[0] == places[1] and os.path.exists(places[0])


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
    """Describe pydantic's first error in one line, with the nearest valid name."""
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
    if kind == "no_variable":
        return ConfigError(f"{key}: {text}", code="no_variable")
    message = f"{key}={value!r}: {context.get('error') or text[0].lower() + text[1:]}"
    if kind.startswith(("greater_than", "less_than", "finite_number", "too_short", "too_long")):
        return ConfigError(message, code="out_of_range")
    if kind.endswith(("_type", "_parsing", "_from_float")):
        return ConfigError(message, code="wrong_type")
    return ConfigError(message, code="bad_setting")


# ------------------------------------------------------------------------------------- fingerprints


def fingerprint(*parts: Any) -> str:
    """Return eight hex digits that depend on all parts (JSON-able values or sections)."""
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


def _conflicts(config: Config) -> Iterator[ConfigError]:
    """Find settings that are valid alone but not together, each with cause and remedy."""
    d = config.data
    s = config.search
    e = config.env
    r = config.rollout
    a = config.actor
    for text, setting in ((config.model.path, "model.path"), (s.encoder, "search.encoder")):
        scheme = tables.scheme_of(text)
        if scheme:
            scheme.find(text, setting)
    if s.min_k is not None and s.min_k > s.top_k:
        yield ConfigError(
            f"search.min_k={s.min_k} is more than search.top_k={s.top_k}; results have "
            "search.min_k to search.top_k passages",
            code="min_k_above_top_k",
        )
    if config.data_facts.get("generated") and (d.source or d.corpus != type(d)().corpus):
        others = [
            name
            for name in tables.names("data")
            if not tables.entry_of("data", name, "").get("generated")
        ]
        yield ConfigError(
            f"{d.name} is generated and takes no data.source or data.corpus; set data.name to "
            f"{', '.join(others)}",
            code="unused_setting",
        )
    if config.data_facts.get("needs_source") and not plugins.is_user_code(d.name) and not d.source:
        yield ConfigError(
            f"data.name={d.name} has no questions; name a JSONL or parquet file of them with "
            "data.source",
            code="missing_source",
        )
    if not re.fullmatch(r"auto|Flat|(IVF|HNSW)\d+\S*", s.index) and not Path(s.index).is_dir():
        yield ConfigError(
            f"search.index={s.index!r} is unknown; choose auto, Flat, HNSW32, IVF4096,PQ64 or the "
            "like, or an index's folder",
            code="unknown_index",
        )
    if s.url and not re.fullmatch(r"https?://[^/\s]+(/retrieve)?/?", s.url):
        yield ConfigError(
            f"search.url={s.url!r} is not an address; give one such as http://127.0.0.1:8100 "
            "(Search-R1's: .../retrieve)",
            code="bad_address",
        )
    yield from _addresses(e)
    for name in e.rules:
        tables.entry_of("reward", name, "env.rules")
    if e.rules and (not e.reward or sum(e.rules.values()) > 1):
        yield ConfigError(
            f"env.rules={e.rules} mixes rules with env.reward={e.reward}; set env.reward, and "
            "shares of 1 or less in all (env.reward has the rest)",
            code="bad_mixture",
        )
    if e.call_reward * e.max_tool_calls >= 1:
        yield ConfigError(
            f"env.call_reward={e.call_reward:g} pays {e.max_tool_calls} calls (env.max_tool_calls) "
            f"as much as a right answer; set it below {1 / e.max_tool_calls:.2g}",
            code="excessive_reward",
        )
    elif e.call_reward * e.max_tool_calls + e.evidence_reward >= 1:
        yield ConfigError(
            f"env.evidence_reward={e.evidence_reward:g} and the rewards of calls pay a wrong "
            "answer as much as a right one; set it below "
            f"{1 - e.call_reward * e.max_tool_calls:.2g}",
            code="excessive_reward",
        )
    if r.max_tokens_per_turn >= r.max_context:
        yield ConfigError(
            "rollout.max_tokens_per_turn must be smaller than rollout.max_context",
            code="turn_exceeds_context",
        )
    if config.algorithm_has("groups") and r.samples_per_prompt < 2:
        yield ConfigError(
            f"{config.algorithm} compares samples of one prompt and has nothing to learn from a "
            "group of one; "
            "set rollout.samples_per_prompt to 2 or more, or use ppo",
            code="group_of_one",
        )
    estimator = "k1" if a.kl_in == "reward" else "k3"
    if (a.kl_in == "reward") != (a.kl_estimator == "k1"):
        yield ConfigError(
            f"actor.kl_estimator={a.kl_estimator} with actor.kl_in={a.kl_in} does not pull the "
            f"policy to the reference (see losses.kl_penalty); set actor.kl_estimator={estimator}",
            code="mismatched_kl",
        )


def _addresses(env: Any) -> Iterator[ConfigError]:
    """Find names of server clients without an address, and addresses without such a name."""
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
    r = config.rollout
    a = config.actor
    if a.lora_rank and config.engine == "local":
        yield ConfigError(
            f"actor.lora_rank={a.lora_rank} needs --engine verl; the local loop trains all weights "
            "(actor.lora_rank=0)",
            code="lora_without_verl",
        )
    warmup = config.critic.warmup_steps
    if config.algorithm_has("critic") and warmup >= config.trainer.steps:
        yield ConfigError(
            f"critic.warmup_steps={warmup} leaves none of trainer.steps={config.trainer.steps} for "
            "the policy, which would not be trained; set it below trainer.steps",
            code="policy_not_trained",
        )
    if r.prompts_per_step > config.data.train:
        yield ConfigError(
            f"rollout.prompts_per_step={r.prompts_per_step} is more than "
            f"data.train={config.data.train} questions; "
            "raise the second or lower the first",
            code="too_few_questions",
        )
    batch = r.prompts_per_step * r.samples_per_prompt
    for name, count in (("actor", a.minibatches), ("critic", config.critic.minibatches)):
        if batch % count:
            yield ConfigError(
                f"a batch of {r.prompts_per_step} prompts x {r.samples_per_prompt} samples = "
                f"{batch} trajectories does not divide into {name}.minibatches={count}; choose a "
                f"divisor of {batch}",
                code="indivisible_batch",
            )
