"""Record what a result was made from, so that others can repeat it.

In: a configuration and a model folder. Out: model, start model, data, index, code, command and
hardware, each with the hash or revision that identifies it. Next: the card of
`evaluation/evaluate.py`; docs/lab/leaderboard.md tells how to report it.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from agent_r1 import __version__
from agent_r1.config import (
    Config,
    fingerprint,
    load_config,
    preset_names,
    presets,
    shareable,
    tables,
)
from agent_r1.ground import bounds
from agent_r1.ground.files import sha256
from agent_r1.ground.machine import describe_machine
from agent_r1.model.files import SHARDS
from agent_r1.workspace import Workspace

UNKNOWN_FACT = "unknown"
"""In a data card: a licence that only the owner of the questions knows, or a commit."""


def provenance(config: Config, model: Path) -> dict[str, Any]:
    """Return the provenance keys of a card. Unknown values are None."""
    workspace = Workspace(config)
    data_manifest = _manifest(workspace.data)
    # Without folders: a card may be published, and the digest identifies the file.
    sources = {Path(name).name: digest for name, digest in data_manifest.get("sources", {}).items()}
    return {
        "model_hash": weights_hash(model),
        "model_revision": _revision(model),
        "start_model": config.model.path or workspace.cold_start.name,
        "start_model_revision": _revision(workspace.start_model),
        "start_model_package": describe_name(config.model.path),
        "data": workspace.data.name,
        "data_revision": data_manifest.get("dataset") or sources or None,
        "data_hash": fingerprint(data_manifest.get("files")),
        "index": _index(config, workspace, data_manifest),
        "config_hash": fingerprint(config),
        "attention": config.verl.attention if config.engine == "verl" else None,
        "code": code_version(),
        # A user's own preset is a file that others do not have.
        "command": train_command(config) if config.preset in preset_names() else None,
        "hardware": describe_machine(),
    }


def weights_hash(model: Path) -> str | None:
    """Hash names and content of a model's weights, or of verl's shards.

    Returns None if there are none. The path does not count: a copy of a model has the same hash.
    """
    files = sorted([*model.glob("*.safetensors"), *model.glob(SHARDS)])
    if not files:
        return None
    return fingerprint([[file.name, sha256(file)] for file in files])


def code_version() -> dict[str, Any]:
    """Return the version; for a git checkout also the commit and whether tracked files differ."""
    version = {"version": __version__, "commit": None}
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or not shutil.which("git"):
        return version

    def git(*words: str) -> str:
        # `git status` reads every file: 30 s are enough for a slow network disk.
        return subprocess.run(
            ["git", "-C", root, *words], capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        has_changes = bool(git("status", "--porcelain", "--untracked-files=no"))
    except subprocess.SubprocessError:
        # No commit yet, a folder of another user, or a slower disk. A card is worth more than that.
        return version
    return version | {"commit": commit, "changed": has_changes}


def _index(config: Config, workspace: Workspace, data_manifest: dict[str, Any]) -> dict[str, Any]:
    """Describe encoder, corpus, kind and the vectors' hash; a service's files have none."""
    if config.search.foreign:
        return {"service": config.search.url}
    facts = {
        "encoder": config.search.encoder,
        "encoder_package": describe_name(config.search.encoder),
        "corpus": config.data.corpus,
        "corpus_sha256": data_manifest.get("files", {}).get("corpus.jsonl"),
    }
    # Generated questions have a made-up world, of which there is no encyclopedia.
    if _is_of_questions(config) and not config.data_facts.get("generated"):
        facts["note"] = (
            "the questions' own paragraphs: do not compare scores with those over an encyclopedia"
        )
    if config.search.url:
        return facts | {"service": True}
    manifest = _manifest(workspace.index)
    digest = manifest.get("files", {}).get("vectors.faiss")
    return facts | {"kind": manifest.get("index"), "sha256": digest}


def _is_of_questions(config: Config) -> bool:
    """Return whether the corpus is the questions' own paragraphs, and has their licence."""
    return tables.any_entry_has("corpus", [config.data.corpus], "of_questions")


def _manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an artefact; {} if there is none, as without searches."""
    path = folder / "manifest.json"
    if not path.is_file():
        return {}
    return bounds.read_json(path)


def _revision(model: Path) -> str | None:
    """Return the commit of a model in the hub's cache, models--OWNER--NAME/snapshots/COMMIT."""
    if model.parent.name != "snapshots":
        return None
    return model.name


def train_command(config: Config, *program: str) -> str:
    """Return the command that trains this model again, with every setting that differs.

    `program`: its first words, if they are others, such as `agent-r1 data`.

    If the preset of an old run is gone, the settings are those that differ from another one's.
    Commands are left out, and of paths the names are kept: the command may be published.
    """

    def flatten(c: Config) -> dict[str, Any]:
        settings = {}
        for section, value in c.model_dump().items():
            if not isinstance(value, dict):
                settings[section] = value
                continue
            for key, inner in value.items():
                settings[f"{section}.{key}"] = inner
        return settings

    preset = presets.replace_gone(config.preset)
    preset_settings = flatten(load_config(preset, algorithm=config.algorithm, seed=config.seed))
    shown_settings = flatten(shareable(config.model_copy(update={"preset": preset})))
    settings = []
    for key, value in flatten(config).items():
        was_changed = key != "preset" and value != preset_settings[key]
        # A command is left out of `shown_settings`, which then has the default: nothing to write.
        if was_changed and shown_settings[key] != preset_settings[key]:
            settings.append(f"{key}={json.dumps(shown_settings[key])}")
    program = program or ("bash", "speedrun-nodocker.sh")
    words = [
        *program,
        config.algorithm,
        "--preset",
        str(shown_settings["preset"]),
        "--seed",
        str(config.seed),
    ]
    return shlex.join(words + settings)


def data_facts(config: Config) -> dict[str, Any]:
    """Return the facts of a data card: source, licences, command and code."""
    settings = config.data
    code = code_version()
    manifest = _manifest(Workspace(config).data)
    source = manifest.get("dataset") or settings.source or settings.name
    if config.data_facts.get("generated"):
        source = "generated by the code"
    licence = config.data_facts.get("licence", UNKNOWN_FACT)
    corpus_licence = licence
    if not _is_of_questions(config):
        corpus = tables.entries("corpus").get(settings.corpus, {})
        corpus_licence = corpus.get("licence", UNKNOWN_FACT)
    command = "agent-r1 data --recipe FOLDER"
    if config.preset in preset_names():
        command = train_command(config, "agent-r1", "data")
    commit = code["commit"] or UNKNOWN_FACT
    if code.get("changed"):
        commit += ", with changes"
    return {
        "source": source,
        "licence": licence,
        "corpus_licence": corpus_licence,
        "command": command,
        "version": code["version"],
        "commit": commit,
    }


def describe_name(text: str | None) -> dict[str, str] | None:
    """Describe the origin of a name such as package:NAME; None for other names."""
    scheme = tables.scheme_of(text)
    if not scheme:
        return None
    return scheme.describe(text)
