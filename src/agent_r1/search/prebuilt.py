"""An index that somebody else has built: fetched from the hub by name, and taken only if it is the one this run would build.

In: `search.index=hub:OWNER/NAME`, this configuration's encoder and corpus. Out: an index folder, as `index.py` writes it.
`push` is the way back. On the hub an index is a data set that holds the files of that folder.

The manifest comes first and is compared before gigabytes follow. Then each file is held against its hash in the manifest.
That tells a broken file from a whole one, not a good author from a bad one: FAISS reads its files with code that was never
meant for hostile ones, so take an index only from somebody whom you would let run a program.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agent_r1 import hub
from agent_r1.errors import AgentR1Error
from agent_r1.files import sha256
from agent_r1.search.encoders import Encoder
from agent_r1.search.index import FILES, FORMAT, MANIFEST, METRIC

PREFIX = "hub:"
BUILD = "build one here with search.index=auto"
REMEDY = f"name another, or {BUILD}"


def fetch(name: str, out: Path, encoder: Encoder, corpus: Path) -> dict[str, Any]:
    """Put the index OWNER/NAME[@REVISION] into the new folder `out` and return its manifest.

    Raises AgentR1Error where it cannot be had, is of another encoder or corpus, or is not whole.
    """
    at = hub.fetch(name, [MANIFEST], "dataset", BUILD)
    manifest = _read(at / MANIFEST, name)
    ours = {"format": FORMAT, "metric": METRIC, "encoder": encoder.settings, "corpus_sha256": sha256(corpus)}
    for key, wanted in ours.items():
        if manifest.get(key) != wanted:
            raise AgentR1Error(
                f"the index {name} has another {key} than this configuration ({manifest.get(key)} instead of {wanted}); {REMEDY}"
            )
    folder = hub.fetch(f"{name.partition('@')[0]}@{at.name}", sorted(manifest["files"]), "dataset", BUILD)
    out.mkdir()
    for file, digest in manifest["files"].items():
        path = (folder / file).resolve()
        if not path.is_file():
            raise AgentR1Error(f"the index {name} has no {file}, which its manifest names; {REMEDY}")
        if sha256(path) != digest:
            raise AgentR1Error(
                f"{path} is damaged (the manifest of {name} has another SHA-256); delete it and try again"
            )
        (out / file).symlink_to(path)  # the hub's cache keeps it: gigabytes need not lie here twice
    manifest |= {"corpus": os.path.relpath(corpus.resolve(), out.resolve()), "hub": {"name": name, "revision": at.name}}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def push(index: Path, name: str) -> str:
    """Publish an index folder as OWNER/NAME; returns its address."""
    if "files" not in _read(index / MANIFEST, str(index)):
        raise AgentR1Error(
            f"{index} has no hashes of its files; delete it, and `agent-r1 index` builds it again with them"
        )
    return hub.push(index, name, "dataset")


def _read(path: Path, name: str) -> dict[str, Any]:
    """A manifest that may be anybody's. Raises AgentR1Error where it is none."""
    try:
        manifest = json.loads(path.read_text())
        files = manifest.get("files", {})
        sound = set(files) <= FILES and all(isinstance(digest, str) for digest in files.values())
    except (OSError, ValueError, AttributeError, TypeError):
        sound = False
    if not sound:
        raise AgentR1Error(f"{name} is no index of agent-r1 (its {MANIFEST} is missing or of another kind); {REMEDY}")
    return manifest
