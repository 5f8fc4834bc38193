"""A data set's folder: made whole or not at all, with a manifest that holds the hash of every file.

In: a function that writes the files. Out: the folder. Next: `tinyhop_build.py` and `qa_build.py` fill one each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agent_r1.data.rows import REMEDY
from agent_r1.errors import AgentR1Error
from agent_r1.files import sha256

FORMAT = 2
"""Version of the folder's layout; raised when old data must be made again. The rows of format 1 asked for the search tool
alone, whatever env.tools said."""
MANIFEST = "manifest.json"


def make_folder(out: Path, write: Callable[[Path], dict[str, Any]], files: Iterable[str]) -> dict[str, Any]:
    """Let `write` put `files` into the new folder `out`; return what it returned, with format and hashes, as manifest.

    Everything is written beside `out` and renamed at the end: a folder of that name is complete. Raises AgentR1Error if
    `out` exists or cannot be written.
    """
    partial = out.parent / f".{out.name}.partial"
    try:
        if out.exists():
            raise AgentR1Error(f"{out} exists already; use it as it is, or delete it to make the data again")
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted call may have left
        partial.mkdir(parents=True)
        manifest = {"format": FORMAT} | write(partial) | {"files": {name: sha256(partial / name) for name in files}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.rename(out)
    except OSError as error:
        raise AgentR1Error(
            f"cannot write {out} ({error.strerror or error}); free some space or choose a folder that you may write to"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def verify_folder(out: Path, files: Iterable[str]) -> dict[str, Any]:
    """Hash every file of a data set again and return its manifest. Raises AgentR1Error naming what does not fit."""
    manifest = read_manifest(out)
    for name in files:
        if not (out / name).is_file():
            raise AgentR1Error(f"{out / name} is missing; {REMEDY}")
        if sha256(out / name) != manifest["files"].get(name):
            raise AgentR1Error(f"{out / name} is not the file that was made (its hash differs); {REMEDY}")
    return manifest


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of a data set. Raises AgentR1Error where it is missing, damaged or of another version."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
        version, _ = manifest["format"], dict(manifest["files"])
    except OSError as error:
        raise AgentR1Error(f"{out / MANIFEST} cannot be read ({error.strerror}); {REMEDY}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise AgentR1Error(f"{out / MANIFEST} is damaged ({type(error).__name__}); {REMEDY}") from None
    if version != FORMAT:
        raise AgentR1Error(f"{out} has data of format {version}, and this version reads {FORMAT}; {REMEDY}")
    return manifest
