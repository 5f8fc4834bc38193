"""The Hugging Face hub: models and data sets come from there by name, and models go there.

In: OWNER/NAME, or OWNER/NAME@REVISION. Out: a local folder that is called by the commit that was fetched, so that a result
can say what it was made from. Next: `cold_start.py` starts from such a model, `data/` reads such a data set, and
`inference/` talks to any model.

Only data is asked for: safetensors, JSON, templates, vectors; never code, never a pickle. A download that breaks off goes on
where it stopped, in the hub's own cache (HF_HOME).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, first_line

T = TypeVar("T")
PAUSES_S = (2.0, 8.0, 30.0)
"""Seconds before a download is tried again. The hub counts requests over minutes."""
NAME = r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?"
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "agent_r1.yaml"]


def is_name(text: str) -> bool:
    """Is it a name on the hub, rather than a folder? A folder that is there wins."""
    return re.fullmatch(NAME, text) is not None and not Path(text).is_dir()


def fetch(name: str, patterns: list[str], kind: str = "model", otherwise: str = "give a local folder") -> Path:
    """Download the files of OWNER/NAME[@REVISION] that match; `kind` is model or dataset.

    Raises AgentR1Error where that fails, with what to do `otherwise`.
    """
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        return Path(
            with_retries(
                name, snapshot_download, repo, repo_type=kind, revision=revision or None, allow_patterns=patterns
            )
        )
    except Exception as error:  # the hub's client has many: no network, no such name, gated, no space
        raise AgentR1Error(
            f"cannot download {name!r} ({type(error).__name__}: {first_line(error)}); mend name, network or space, or {otherwise}",
            code="download_failed",
        ) from None


def with_retries(name: str, download: Callable[..., T], *words: Any, **options: Any) -> T:
    """Call `download` up to four times, as long as what it raises may pass."""
    from agent_r1.ground.ui import say

    for pause in PAUSES_S:
        try:
            return download(*words, **options)
        except Exception as error:
            if not passes(error):
                raise
            say(f"{name}: {first_line(error)}; again in {pause:g} s")
            time.sleep(pause)
    return download(*words, **options)


def passes(error: BaseException | None) -> bool:
    """Tell whether a download may work a moment later: too many requests, a server in trouble, a connection that broke."""
    import httpx
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):  # HF_HUB_OFFLINE, by choice
        return False
    if (response := getattr(error, "response", None)) is not None:
        return response.status_code == 429 or response.status_code >= 500
    broken = isinstance(error, httpx.TransportError | ConnectionError | TimeoutError)
    return broken or (error is not None and passes(error.__cause__))


def fetch_model(name: str) -> Path:
    """A whole model: all its weights, as safetensors."""
    if re.fullmatch(NAME, name) is None:
        raise AgentR1Error(
            f"{name!r} is neither a folder nor the name of a model (OWNER/NAME); check the path", code="missing_model"
        )
    folder = fetch(name, MODEL_FILES)
    # Without network the hub's client may hand out what an earlier, broken download has left.
    if trouble := damage(folder):
        raise AgentR1Error(
            f"{name}: {trouble}, or take a model that is published whole, as safetensors", code="damaged_model"
        )
    return folder


def damage(folder: Path) -> str | None:
    """What a model folder lacks, and what to do; None if all of its weights are there, in their whole length."""
    file = folder / "model.safetensors.index.json"
    try:
        wanted = set(bounds.read_json(file)["weight_map"].values()) if file.is_file() else {"model.safetensors"}
        for file in [folder / name for name in ("config.json", *sorted(wanted))]:
            if not file.is_file():
                return f"there is no {file.name} in {folder}; make or download it again"
            if file.suffix == ".safetensors":
                safe_open(file, framework="pt")  # reads the header, and holds the file's length against it
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return f"{file.resolve()} is cut short or broken ({first_line(error)}); delete it and make or download it again"
    return None


def push(folder: Path, name: str) -> str:
    """Upload a folder as OWNER/NAME (made private if it is new); returns its address."""
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by agent-r1")
    except Exception as error:  # not logged in, no network, name taken
        raise AgentR1Error(
            f"cannot upload to {name!r} ({type(error).__name__}: {first_line(error)}); log in with `hf auth login`, check the name",
            code="upload_failed",
        ) from None
    return str(address)
