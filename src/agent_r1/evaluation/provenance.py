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


def provenance(config: Config, model: Path) -> dict[str, Any]:
    """Return the provenance keys of a card. Unknown values are None."""
    workspace = Workspace(config)
    data_manifest = _manifest(workspace.data)
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
        "command": train_command(config) if config.preset in preset_names() else None,
        "hardware": describe_machine(),
    }


def weights_hash(model: Path) -> str | None:
    """Hash the weights of a model or of verl's shards, whatever their path."""
    files = sorted([*model.glob("*.safetensors"), *model.glob(SHARDS)])
    if not files:
        return None
    return fingerprint([[file.name, sha256(file)] for file in files])


def code_version() -> dict[str, Any]:
    """Return the version; for a git checkout also the commit and whether tracked files differ."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists() or not shutil.which("git"):
        return {"version": __version__, "commit": None}

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", root, *words], capture_output=True, text=True, timeout=30
        ).stdout.strip()

    commit = git("rev-parse", "HEAD") or None
    has_changes = bool(git("status", "--porcelain", "--untracked-files=no"))
    return {"version": __version__, "commit": commit, "changed": has_changes}


def _index(config: Config, workspace: Workspace, data_manifest: dict[str, Any]) -> dict[str, Any]:
    """Describe encoder, corpus, kind and the vectors' hash; a service's files have none."""
    facts = {
        "encoder": config.search.encoder,
        "encoder_package": describe_name(config.search.encoder),
    }
    facts |= {
        "corpus": config.data.corpus,
        "corpus_sha256": data_manifest.get("files", {}).get("corpus.jsonl"),
    }
    if tables.any_entry_has(
        "corpus", [config.data.corpus], "of_questions"
    ) and not config.data_facts.get("generated"):
        facts["note"] = (
            "the questions' own paragraphs: do not compare scores with those over an encyclopedia"
        )
    if config.search.foreign:
        return {"service": config.search.url}
    if config.search.url:
        return facts | {"service": True}
    manifest = _manifest(workspace.index)
    digest = manifest.get("files", {}).get("vectors.faiss")
    return facts | {"kind": manifest.get("index"), "sha256": digest}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        return {}
    return bounds.read_json(path)


def _revision(model: Path) -> str | None:
    """Return the commit of a model in the hub's cache, from its folder's name."""
    if model.parent.name != "snapshots":
        return None
    return model.name


def train_command(config: Config, *program: str) -> str:
    """Return the command that trains this model again, with every setting that differs.

    If the preset of an old run is gone, the settings are those that differ from another one's.
    Commands are left out, and of paths the names are kept: the command may be published.
    `program`: another one that takes these options, such as `agent-r1 data`.
    """

    def flat(c: Config) -> dict[str, Any]:
        settings = {}
        for section, value in c.model_dump().items():
            if not isinstance(value, dict):
                settings[section] = value
                continue
            for key, inner in value.items():
                settings[f"{section}.{key}"] = inner
        return settings

    preset = presets.replace_gone(config.preset)
    plain = flat(load_config(preset, algorithm=config.algorithm, seed=config.seed))
    shown = flat(shareable(config.model_copy(update={"preset": preset})))
    settings = []
    for key, value in flat(config).items():
        if key != "preset" and plain[key] != value and plain[key] != shown[key]:
            settings.append(f"{key}={json.dumps(shown[key])}")
    program = program or ("bash", "speedrun-nodocker.sh")
    words = [
        *program,
        config.algorithm,
        "--preset",
        str(shown["preset"]),
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
    licence = config.data_facts.get("licence", NO_FACT)
    corpus_licence = licence
    if not tables.any_entry_has("corpus", [settings.corpus], "of_questions"):
        corpus = tables.entries("corpus").get(settings.corpus, {})
        corpus_licence = corpus.get("licence", NO_FACT)
    command = "agent-r1 data --recipe FOLDER"
    if config.preset in preset_names():
        command = train_command(config, "agent-r1", "data")
    commit = code["commit"] or "unknown"
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


NO_FACT = "unknown"
"""For the licence of questions or passages that only their owner knows."""


def describe_name(text: str | None) -> dict[str, str] | None:
    """Describe the origin of a name such as package:NAME; None for other names."""
    scheme = tables.scheme_of(text)
    if not scheme:
        return None
    return scheme.describe(text)
