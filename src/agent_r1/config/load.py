"""Load, check and save one configuration.

In: a preset's name and words of the command line. Out: a `Config`. Next: `workspace.py` names
folders after its fingerprints, and `stages.py` passes its sections on. Later layers override
earlier ones:

    defaults in settings.py  <-  the preset  <-  its section of the algorithm  <-
    `section.key=value`

The section of the algorithm has its name; otherwise `ppo:` serves algorithms with a critic and
`grpo:` the others. A preset that `extends` another one overrides all of it, including its section
of the algorithm. An impossible combination is refused in one line with the remedy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agent_r1.config import plugins, recipes, tables
from agent_r1.config.recipes import add, added, preset_names
from agent_r1.config.renamed import RENAMED, translate_keys
from agent_r1.config.settings import Engine, OutsideFingerprint
from agent_r1.config.whole import Config, declared_settings
from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest

ALGORITHMS, ENGINES = tables.names("estimator"), get_args(Engine)


# --------------------------------------------------------------------------------------- load, save


def load_config(
    preset: str,
    overrides: list[str] | None = None,
    *,
    algorithm: str | None = None,
    seed: int | None = None,
    trains: bool = True,
) -> Config:
    """Resolve a configuration.

    Args:
        overrides: `section.key=value` strings; values are YAML.
        trains: Whether the command trains; otherwise, as for `agent-r1 data`, batches need not fit
        together.

    Raises ConfigError naming the key and its nearest match.
    """
    overriding = _resolve_paths(_read_overrides(overrides or []), Path.cwd())
    overriding |= {
        name: value
        for name, value in (("algorithm", algorithm), ("seed", seed))
        if value is not None
    }
    files = _read_preset(preset)
    preset = str(Path(preset).resolve()) if _is_file(preset) else preset
    default = {"algorithm": declared_settings().config.model_fields["algorithm"].default}
    chosen = str(_merged(default, *files, overriding)["algorithm"])
    layers: list[dict[str, Any]] = []
    for file in files:
        per_algorithm = {name: file.pop(name, None) or {} for name in tables.names("estimator")}
        critic = chosen in per_algorithm and tables.algorithm_has(chosen, "critic")
        layers += [file, per_algorithm.get(chosen) or per_algorithm["ppo" if critic else "grpo"]]
    return _validated(_merged(*layers, {"preset": preset}, overriding), trains)


def changed(config: Config, overrides: list[str]) -> Config:
    """Return `config` with `section.key=value` strings applied. Raises ConfigError as `load_config`
    does."""
    return _validated(
        _merged(config.model_dump(), _resolve_paths(_read_overrides(overrides), Path.cwd()))
    )


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
        saved = bounds.parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as YAML ({type(error).__name__}); delete the run or restore "
            "the file",
            code="damaged_config",
        ) from None
    preset = str(saved.get("preset", "")) if isinstance(saved, dict) else ""
    table = Path(preset).parent / "recipe.toml" if _is_file(preset) else None
    if written_here and table:
        add(table)
    try:
        config = _validated(translate_keys(saved) if isinstance(saved, dict) else saved)
    except ConfigError as error:
        theirs = (
            f" Or does it need the names of its recipe, --recipe {table.parent}?"
            if table and table.is_file()
            else ""
        )
        raise ConfigError(
            f"{path}: {error}; was this run made by another version?{theirs}", code=error.code
        ) from None
    if written_here:
        plugins.trust(all_code(config))
    return config


def preset_title(preset: str) -> str:
    """Return a preset's name, or of a user's file its stem (for preset.yaml: its folder)."""
    path = Path(preset)
    return (
        preset if not _is_file(preset) else path.parent.name if path.stem == "preset" else path.stem
    )


def _is_file(preset: str) -> bool:
    return preset.endswith((".yaml", ".yml"))


def _read_preset(name: str, seen: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Read a preset by name or file, after the presets that it `extends`."""
    if name in seen:
        raise ConfigError(
            f"presets extend one another in a circle: {' -> '.join([*seen, name])}",
            code="preset_circle",
        )
    if not _is_file(name) and name not in preset_names():
        raise ConfigError(
            f"unknown preset {name!r}{nearest(name, preset_names())}; choose from "
            f"{', '.join(preset_names())}, or name a file "
            "(FILE.yaml)",
            code="unknown_preset",
        )
    path = Path(name) if _is_file(name) else recipes.preset_files()[name]
    if _is_file(name):
        add(Path(name).parent / "recipe.toml")
    try:
        preset = bounds.parse_yaml(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(
            f"there is no preset file {path}; `agent-r1 new FOLDER` writes one, FOLDER/preset.yaml",
            code="missing_preset",
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
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
    if parent and _is_file(parent):
        parent = str(path.resolve().parent / parent)
    return [*(_read_preset(parent, (*seen, name)) if parent else ()), preset]


def _resolve_paths(layer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the names of code and files in `layer` from `folder`.

    The user wrote this layer, so its code may be imported.
    """
    layer = {
        section: dict(values) if isinstance(values, dict) else values
        for section, values in layer.items()
    }
    settings = declared_settings()
    for key in (*settings.code, *settings.files, *settings.trusted):
        section, name = key.split(".")
        values = layer.get(section)
        if not isinstance(values, dict) or name not in values:
            continue
        if key in settings.trusted:
            plugins.trust(_strings(values[name]))
            continue
        many = values[name] if isinstance(values[name], list) else [values[name]]
        if key in settings.code:
            many = [
                plugins.absolute(item, folder)
                if isinstance(item, str) and plugins.is_user_code(item)
                else item
                for item in many
            ]
            plugins.trust(item for item in many if isinstance(item, str))
        else:
            many = [
                str(folder / item) if isinstance(item, str) and (folder / item).exists() else item
                for item in many
            ]
        values[name] = many if isinstance(values[name], list) else many[0]
    return layer


def _strings(value: Any) -> list[str]:
    """List the strings of a setting: itself, or the values of a table."""
    return [
        item
        for item in (value.values() if isinstance(value, dict) else [value])
        if isinstance(item, str)
    ]


def all_code(config: Config) -> list[str]:
    """List everything that needs the user's trust: names of user-defined code, and `Trusted`
    settings."""
    return [*user_code_names(config), *trusted(config).values()]


def trusted(config: Config) -> dict[str, str]:
    """Return setting -> command or address, for `Trusted` settings that are not at their
    default."""
    found = {
        key: _value(config, key)
        for key, field in declared_settings().trusted.items()
        if _value(config, key) != field.default
    }
    parts = {key: value if isinstance(value, dict) else {"": value} for key, value in found.items()}
    return {
        f"{key}.{name}".rstrip("."): place
        for key, places in parts.items()
        for name, place in places.items()
    }


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def user_code(config: Config, updates: bool = True) -> list[str]:
    """List a run's user-defined code: in settings, and by names of a user's recipe.

    Args:
        updates: False for a cold start, which uses no estimator.
    """
    d, e = config.data, config.env
    chosen = {
        "data": [d.name],
        "env": [e.name],
        "tool": e.tools,
        "reward": [e.reward],
        "estimator": [config.algorithm] * updates,
    }
    return [*user_code_names(config), *added(chosen)]


def user_code_names(config: Config) -> dict[str, str]:
    """Map each name of user-defined code to the setting that names it."""
    found = {}
    for key in declared_settings().code:
        value = _value(config, key)
        found |= {
            item: key
            for item in (value if isinstance(value, list) else [value])
            if item and plugins.is_user_code(item)
        }
    return found


def _read_overrides(overrides: list[str]) -> dict[str, Any]:
    """Parse `["trainer.steps=20"]` to `{"trainer": {"steps": 20}}`.

    `1e-4` stays a string, which pydantic converts.
    """
    layer: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(
                f"override {item!r} is not of the form section.key=value (for example "
                "trainer.steps=20)",
                code="bad_override",
            )
        try:
            value = bounds.parse_yaml(text)
        except (ValueError, yaml.YAMLError):  # an open bracket, or an impossible date
            raise ConfigError(
                f"override {item!r} is not valid YAML after the =", code="bad_override"
            ) from None
        table = ".".join(key.split(".")[:2]) in declared_settings().tables and key.count(".") > 1
        for name in reversed(key.split(".", 2 if table else 1)):
            value = {name: value}
        layer = _merged(layer, value)
    return layer


def _merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge layers key by key; later layers win, and replace tables of shares."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = (
                _merged(result[name], value)
                if both and name not in declared_settings().replaced
                else value
            )
    return result


def _validated(values: Any, trains: bool = True) -> Config:
    """Build the configuration and check its conflicts. Raises ConfigError."""
    try:
        config = declared_settings().config.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None
    _check_names(config)
    sections = [
        getattr(config, name)
        for name in type(config).model_fields
        if isinstance(getattr(config, name), BaseModel)
    ]
    owners = [
        owner
        for section in sections
        for owner in type(section).__mro__
        if "conflicts" in vars(owner)
    ]
    theirs = (conflict for owner in owners for conflict in owner.conflicts(config, trains))
    for conflict in chain(_conflicts(config), _batch_conflicts(config) if trains else (), theirs):
        raise (
            conflict
            if isinstance(conflict, ConfigError)
            else ConfigError(conflict, code="settings_conflict")
        )
    return config


def _explain(error: ValidationError) -> ConfigError:
    """Describe pydantic's first error in one line, with the nearest valid name."""
    found = error.errors(include_url=False)[0]
    key, value, kind, context = (
        ".".join(map(str, found["loc"])),
        found["input"],
        found["type"],
        found.get("ctx", {}),
    )
    if kind == "extra_forbidden":
        new = RENAMED.get(key)
        hint = (
            f"; it is {new} now"
            if isinstance(new, str)
            else nearest(
                key, [*declared_settings().fields, *declared_settings().config.model_fields]
            )
        )
        return ConfigError(
            f"unknown configuration key {key!r}{hint}; `agent-r1 train --dry-run` lists all keys",
            code="unknown_setting",
        )
    if kind == "literal_error":
        allowed = re.findall("'(.*?)'", context["expected"])
        return ConfigError.unknown(key, value, allowed)
    message = (
        f"{key}={value!r}: {context.get('error') or found['msg'][0].lower() + found['msg'][1:]}"
    )
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
    fields, outside = type(part).model_fields.items(), OutsideFingerprint.__metadata__[0]
    return {
        name: fingerprint_values(getattr(part, name))
        for name, field in fields
        if outside not in field.metadata
    }


# ---------------------------------------------------------------------------------------- conflicts


def _check_names(config: Config) -> None:
    """Raise ConfigError for a name in no table, and for code without its place."""
    tables.entry_of("estimator", config.algorithm, "algorithm")
    tables.entry_of("ratio", config.actor.ratio_level, "actor.ratio_level")
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
    d, s, e, r, a, m = (
        config.data,
        config.search,
        config.env,
        config.rollout,
        config.actor,
        config.model,
    )
    for text, setting in ((m.path, "model.path"), (s.encoder, "search.encoder")):
        if scheme := tables.scheme_of(text):
            scheme.find(text, setting)
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
    if e.call_reward * e.max_tool_calls >= 1:
        yield ConfigError(
            f"env.call_reward={e.call_reward:g} pays {e.max_tool_calls} calls (env.max_tool_calls) "
            "as much as a right "
            f"answer; set it below {1 / e.max_tool_calls:.2g}",
            code="excessive_reward",
        )
    elif e.call_reward * e.max_tool_calls + e.evidence_reward >= 1:
        yield ConfigError(
            f"env.evidence_reward={e.evidence_reward:g} and the rewards of calls pay a wrong "
            "answer as much as a right one; set it "
            f"below {1 - e.call_reward * e.max_tool_calls:.2g}",
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
    if (a.kl_in == "reward") != (a.kl_estimator == "k1"):
        yield ConfigError(
            f"actor.kl_estimator={a.kl_estimator} with actor.kl_in={a.kl_in} does not pull the "
            "policy to the reference "
            "(see losses.kl_penalty); set "
            f"actor.kl_estimator={'k1' if a.kl_in == 'reward' else 'k3'}",
            code="mismatched_kl",
        )


def _addresses(env: Any) -> Iterator[ConfigError]:
    """Find names of server clients without an address, and addresses without such a name."""
    for kind, chosen in (("env", env.name), ("reward", env.reward)):
        setting = "env.name" if kind == "env" else "env.reward"
        for name, facts in tables.entries(kind).items():
            key = facts.get("address")
            if key and (name == chosen) != bool(
                re.fullmatch(r"https?://\S+", getattr(env, key) or "")
            ):
                yield ConfigError(
                    f"{setting}={name} and env.{key}=http://... require each other: the first is "
                    "the protocol, the second the "
                    f"server; here {setting}={chosen} and env.{key}={getattr(env, key)}",
                    code="address_without_name",
                )


def _batch_conflicts(config: Config) -> Iterator[ConfigError]:
    """Find settings of a training step that do not fit together."""
    d, r, a = config.data, config.rollout, config.actor
    if a.lora_rank and config.engine == "local":
        yield ConfigError(
            f"actor.lora_rank={a.lora_rank} needs --engine verl; the local loop trains all weights "
            "(actor.lora_rank=0)",
            code="lora_without_verl",
        )
    if r.prompts_per_step > d.train:
        yield ConfigError(
            f"rollout.prompts_per_step={r.prompts_per_step} is more than data.train={d.train} "
            "questions; "
            "raise the second or lower the first",
            code="too_few_questions",
        )
    batch = r.prompts_per_step * r.samples_per_prompt
    for name, count in (("actor", a.minibatches), ("critic", config.critic.minibatches)):
        if batch % count:
            yield ConfigError(
                f"a batch of {r.prompts_per_step} prompts x {r.samples_per_prompt} samples = "
                f"{batch} trajectories does not "
                f"divide into {name}.minibatches={count}; choose a divisor of {batch}",
                code="indivisible_batch",
            )
