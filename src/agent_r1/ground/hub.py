"""Download models and data sets from the Hugging Face hub, and upload models.

In: OWNER/NAME, or OWNER/NAME@REVISION. Out: a local folder named after the fetched commit, so that
results can record it. Next: `cold_start/` starts from such a model, `data/` reads such a data
set, and `inference/` runs any model.

Only data is downloaded: safetensors, JSON, templates, vectors; never code or pickles. The hub's
client retries a failed download, and continues an interrupted one in its own cache (HF_HOME).
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, first_line

REPO_NAME = r"\w[\w.-]*/[\w.-]+(@[\w./-]+)?"
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "agent_r1.yaml"]

CHAT_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "*.jinja",
]


def is_repo_name(text: str) -> bool:
    """Return whether `text` is a name on the hub. An existing folder takes precedence."""
    return re.fullmatch(REPO_NAME, text) is not None and not Path(text).is_dir()


def download(
    name: str, patterns: list[str], kind: str = "model", otherwise: str = "give a local folder"
) -> Path:
    """Download the matching files of OWNER/NAME[@REVISION]; `kind` is model or dataset.

    Raises AgentR1Error if that fails, with the alternative `otherwise`.
    """
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(
                repo, repo_type=kind, revision=revision or None, allow_patterns=patterns
            )
        )
    except (
        Exception
    ) as error:  # the hub's client raises many kinds: no network, no such name, gated, no space
        raise AgentR1Error(
            f"cannot download {name!r} ({type(error).__name__}: {first_line(error)}); "
            f"check its name, the network and the disk space, or {otherwise}",
            code="download_failed",
        ) from None


def fetch_model(name: str) -> Path:
    """Download a complete model, all its weights as safetensors."""
    if re.fullmatch(REPO_NAME, name) is None:
        raise AgentR1Error(
            f"{name!r} is neither a folder nor the name of a model (OWNER/NAME); check the path",
            code="missing_model",
        )
    folder = download(name, MODEL_FILES)
    # Offline, the hub's client may return what an earlier, interrupted download left.
    trouble = damage(folder)
    if trouble:
        raise AgentR1Error(
            f"{name}: {trouble}, or use a model whose weights are published as safetensors",
            code="damaged_model",
        )
    return folder


def fetch_chat(name: str) -> Path:
    """Download a model's tokenizer, chat templates and settings, a few MB, without its weights."""
    return download(name, CHAT_FILES)


def damage(folder: Path) -> str | None:
    """Describe missing or truncated weights of a model folder and the remedy, or return None."""
    file = folder / "model.safetensors.index.json"
    try:
        weights = {"model.safetensors"}
        if file.is_file():
            weights = set(bounds.read_json(file)["weight_map"].values())
        for file in [folder / name for name in ("config.json", *sorted(weights))]:
            if not file.is_file():
                return f"there is no {file.name} in {folder}; make or download it again"
            if file.suffix == ".safetensors":
                # This reads the header, and compares it with the file's length.
                safe_open(file, framework="pt")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return (
            f"{file.resolve()} is cut short or broken ({first_line(error)}); delete it and make or "
            "download it again"
        )
    return None


def push(folder: Path, name: str) -> str:
    """Upload a folder as OWNER/NAME (a new repository is private) and return its address."""
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by agent-r1")
    except Exception as error:  # not logged in, no network, name taken
        raise AgentR1Error(
            f"cannot upload to {name!r} ({type(error).__name__}: {first_line(error)}); log in with "
            "`hf auth login`, check the name",
            code="upload_failed",
        ) from None
    return str(address)
