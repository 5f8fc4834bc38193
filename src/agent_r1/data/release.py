"""Release a data set, and read releases: `agent-r1 data --release FOLDER`, `--from FOLDER`.

In: the folder that `build.py` made. Out: its files and a data card (README.md); the manifest has
the hash of every file.
Next: the reader's `agent-r1 data --from FOLDER` verifies the hashes and settings, and copies the
same files. A reader needs no source, no download from several publishers, and no generator of the
same version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_r1.config.settings import DataConfig
from agent_r1.data.storage import (
    MANIFEST,
    copy_data,
    read_corpus,
    read_manifest,
    read_rows,
    verify,
)
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import whole, writing

RELEASE_FILES = ["*.parquet", "corpus.jsonl", MANIFEST, "README.md"]
REQUIRED_FILES = ("train.parquet", "val.parquet", "test.parquet", "corpus.jsonl")
DATASET_CARD = """\
---
license: {licence}
task_categories: [question-answering]
tags: [agent-r1]
---
# {name}: questions and passages for Agent-R1

{splits}

| | |
|---|---|
| source | {source} |
| licence | {licence}; of the corpus: {corpus_licence} |
| records left out | {skipped} |
| made by | `{command}` |
| code | Agent-R1 {version}, commit {commit} |

A row has verl's keys: `prompt`, `reward_model`, `extra_info` and so on. A line of `corpus.jsonl` is
a passage: `id`, `title`, `text`. `manifest.json` has all settings and the hash of every file. This
command verifies and copies them:

    {command} --from FOLDER
"""


def release(folder: Path, target: Path, facts: dict[str, Any]) -> None:
    """Write `target` from a data folder.

    Args:
        facts: For the card: `source`, `licence`, `corpus_licence`, `command`, `version`, `commit`.

    Raises AgentR1Error if `target` exists or cannot be written, or the data is damaged.
    """
    manifest = verify(folder)
    if target.exists():
        raise AgentR1Error(
            f"{target} already exists; choose another folder for --release", code="already_exists"
        )
    with writing(target), whole(target) as part:
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_data(folder, part)
        (part / "README.md").write_text(_card(part, manifest, facts), encoding="utf-8")


def _card(folder: Path, manifest: dict[str, Any], facts: dict[str, Any]) -> str:
    lines = ["| file | records | kinds |", "|---|---|---|"]
    for file in sorted(folder.glob("*.parquet")):
        kinds = manifest.get("splits", {}).get(file.stem, {}).get("kinds", {})
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items() if count)
        lines.append(f"| `{file.name}` | {len(read_rows(file))} | {counts} |")
    with (folder / "corpus.jsonl").open("rb") as corpus:
        lines.append(f"| `corpus.jsonl` | {sum(1 for _ in corpus)} | passages |")
    return DATASET_CARD.format(
        name=manifest["config"]["name"],
        splits="\n".join(lines),
        skipped=len(manifest.get("skipped", [])),
        **facts,
    )


def find_release(place: str, config: DataConfig, seed: int, agent_name: str) -> Path:
    """Return the verified folder of a release.

    `place`: the folder, or a data set OWNER/NAME on the hub. Raises AgentR1Error for a wrong hash
    or an incomplete folder, and ConfigError for other settings.
    """
    if hub.is_repo_name(place):
        folder = hub.download(place, RELEASE_FILES, "dataset")
    else:
        folder = Path(place)
    if not (folder / MANIFEST).is_file():
        raise AgentR1Error(
            f"{folder} is not a release (it has no {MANIFEST}); `agent-r1 data --release FOLDER` "
            "writes one",
            code="missing_source",
        )
    elsewhere = [name for name in read_manifest(folder)["files"] if name != Path(name).name]
    if elsewhere:
        raise AgentR1Error(
            f"{folder / MANIFEST} names the file {elsewhere[0]!r}, which is outside the folder; "
            "use another release",
            code="damaged_data",
        )
    names = read_manifest(folder)["files"]
    missing = [name for name in REQUIRED_FILES if name not in names]
    if missing:
        raise AgentR1Error(
            f"{folder / MANIFEST} does not name {missing[0]}, which every release has; download "
            "the folder again, or use another release",
            code="damaged_data",
        )
    manifest = verify(folder)
    for _ in read_corpus(folder / "corpus.jsonl"):
        pass  # raises for a damaged or endless line, before the folder is copied
    if not isinstance(manifest.get("config"), dict) or "seed" not in manifest:
        raise AgentR1Error(
            f"{folder / MANIFEST} names no settings; download the folder again, or use another "
            "release",
            code="damaged_data",
        )
    mine = config.model_dump(mode="json") | {"seed": seed, "env.name": agent_name}
    # Settings that are newer than the release have their defaults.
    theirs = (
        type(config)().model_dump(mode="json") | manifest["config"] | {"seed": manifest["seed"]}
    )
    test_rows = read_rows(folder / "test.parquet")
    if not test_rows:
        raise AgentR1Error(
            f"{folder / 'test.parquet'} has no questions; use another release",
            code="damaged_data",
        )
    theirs["env.name"] = test_rows[0]["agent_name"]
    different = [
        f"{key}={theirs[key]!r} there, {mine[key]!r} here"
        for key in mine
        if theirs[key] != mine[key]
    ]
    if different:
        raise ConfigError(
            f"{folder} has data that was made with other settings: {'; '.join(different)}; its "
            "README.md has the command",
            code="other_settings",
        )
    return folder
