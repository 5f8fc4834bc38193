"""From published question sets to files: train, val and test as parquet, passages as one corpus, and a manifest.

In: `DataConfig` and a seed. Out: a folder as of TinyHop (without the cold start's split: a pretrained model needs none, and
the tiny one plays the training questions under other names), the same bytes for the same seed, configuration and source.
Next: `search/` indexes corpus.jsonl; the trainer and the evaluation read the rows.

Which question goes where: `train` and `val` are drawn from the published training set, without overlap; `test` is the
published validation set, whole or a sample. The curve during training therefore never sees a test question. One local file
alone gives all three splits.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from agent_r1.config import DataConfig
from agent_r1.data import corpora, hotpotqa
from agent_r1.data.folder import make_folder, verify_folder
from agent_r1.data.musique import MUSIQUE
from agent_r1.data.prompts import messages
from agent_r1.data.records import Corrupt, Dataset, Record, from_file, from_hub, read_records
from agent_r1.data.rows import write_corpus, write_rows
from agent_r1.data.twowiki import TWOWIKI
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.files import sha256
from agent_r1.types import Row

DATASETS: dict[str, Dataset] = {
    "hotpotqa": hotpotqa.DISTRACTOR,
    "hotpotqa-fullwiki": hotpotqa.FULLWIKI,
    "twowiki": TWOWIKI,
    "musique": MUSIQUE,
}
SPLITS = ("train", "val", "test")
FILES = (*(f"{split}.parquet" for split in SPLITS), "corpus.jsonl")


def build(config: DataConfig, seed: int, out: Path, downloads: Path, agent_name: str = "hermes") -> dict[str, Any]:
    """Make the data set in the new folder `out` and return its manifest. Large downloads go to `downloads`, and stay.

    Raises ConfigError for sizes that the source does not have, AgentR1Error for a source that is missing or corrupt.
    """
    return make_folder(out, lambda place: _write(config, seed, place, downloads, agent_name), FILES)


def verify(out: Path) -> dict[str, Any]:
    """Hash every file of a data set again and return its manifest. Raises AgentR1Error naming what does not fit.

    A local source that is still there must be the one that the data was made of.
    """
    manifest = verify_folder(out, FILES)
    for name, digest in manifest["sources"].items():
        if Path(name).is_file() and sha256(Path(name)) != digest:
            raise AgentR1Error(f"{name} has changed since {out} was made of it; delete that folder to make it again")
    return manifest


def _write(config: DataConfig, seed: int, folder: Path, downloads: Path, agent_name: str) -> dict[str, Any]:
    """The data files; what the manifest says of them."""
    dataset, skipped = DATASETS[config.name], []
    files = source_files(config)
    corpora.check(config.corpus)

    def read(split: str) -> list[Record]:
        path = files.get(split)
        corrupt = Corrupt(str(path) if path else f"{dataset.hub}, {split}", config.skip_bad)
        records = read_records(dataset, from_file(path) if path else from_hub(dataset, split), corrupt)
        skipped.extend(f"{corrupt.where}: {found}" for found in corrupt.found)
        return records

    if list(files) == ["all"]:
        splits = split_one(config, seed, read("all"))
    else:
        splits = split_two(config, seed, read("train"), read("validation"))
    for split, records in splits.items():
        rows = [_row(record, i, split, config.name, agent_name) for i, record in enumerate(records)]
        write_rows(folder / f"{split}.parquet", rows)
    everyone = [record for records in splits.values() for record in records]
    found = corpora.passages(config.corpus, everyone, downloads, config.skip_bad, skipped)
    write_corpus(folder / "corpus.jsonl", found)
    local = [*files.values(), *(path for path in [Path(config.corpus)] if path.is_file())]
    return {
        "seed": seed,
        "config": config.model_dump(),
        "dataset": {"hub": dataset.hub, "revision": dataset.revision} if not files else None,
        "sources": {str(path.resolve()): sha256(path) for path in local},
        "skipped": skipped,
        "splits": {
            split: {"questions": len(records), "kinds": dict(sorted(Counter(r.kind for r in records).items()))}
            for split, records in splits.items()
        },
    }


def source_files(config: DataConfig) -> dict[str, Path]:
    """Where the questions are: nothing for the hub, one file for all splits, or the published two in a folder."""
    if config.source is None:
        return {}
    source = Path(config.source)
    if source.is_file():
        return {"all": source}
    if not source.is_dir():
        raise AgentR1Error(f"data.source={source} does not exist; give a published file, or the folder that has them")
    found = {}
    for split, name in DATASETS[config.name].files.items():
        candidates = [source / name, source / f"{name}.gz"]
        if not any(path.is_file() for path in candidates):
            raise AgentR1Error(f"{source} has no {name} (or {name}.gz); {config.name} is published under that name")
        found[split] = next(path for path in candidates if path.is_file())
    return found


def split_one(config: DataConfig, seed: int, records: list[Record]) -> dict[str, list[Record]]:
    """Three samples without overlap."""
    if not config.test:
        raise ConfigError("data.test=0 takes the whole validation set, and one file has none apart; say how many")
    wanted = {split: getattr(config, split) for split in SPLITS}
    drawn = iter(_draw(records, sum(wanted.values()), f"{seed}/all", "train, val and test"))
    return {split: [next(drawn) for _ in range(count)] for split, count in wanted.items()}


def split_two(config: DataConfig, seed: int, train: list[Record], test: list[Record]) -> dict[str, list[Record]]:
    """Two samples of the training set without overlap, and the validation set."""
    drawn = _draw(train, config.train + config.val, f"{seed}/train", "train and val")
    tested = _draw(test, config.test, f"{seed}/test", "test") if config.test else test
    return {"train": drawn[: config.train], "val": drawn[config.train :], "test": tested}


def _draw(records: list[Record], count: int, seed: str, splits: str) -> list[Record]:
    if count > len(records):
        raise ConfigError(
            f"the source has {len(records)} questions and {splits} take {count}; lower data.train and the like"
        )
    return random.Random(seed).sample(records, count)


def _row(record: Record, index: int, split: str, dataset: str, agent_name: str) -> Row:
    """verl's keys."""
    return {
        "data_source": dataset,
        "prompt": messages(dataset, record.question),
        "ability": "multi-hop-qa",
        "reward_model": {"style": "rule", "ground_truth": record.answers},
        "extra_info": {
            "index": index,
            "split": split,
            "kind": record.kind,
            "hops": record.hops,
            "id": record.id,
            "supporting": record.supporting,
        },
        "agent_name": agent_name,
        "env_kwargs": {"tools": None},  # those of env.tools; a list here would narrow them
    }
