"""From any source to files: splits of questions as parquet, all passages as one corpus, and a manifest over both.

In: `DataConfig` and a seed. Out: a folder with train, val, test (and with TinyHop cold) .parquet, corpus.jsonl and
manifest.json, the same bytes for the same seed, configuration and source. Next: `search/` indexes corpus.jsonl; the trainer
and the evaluation read the rows.

TinyHop has a world of its own for each split. The corpus holds the passages of *all* worlds: one index serves all splits,
and the agent has to find its passages among those of worlds that it is not asked about.

Published sets: `train` and `val` are drawn from the published training set, without overlap; `test` is the published
validation set, whole or a sample. The curve during training therefore never sees a test question. One local file alone
gives all three splits. The cold start has no split: a pretrained model needs none, and the tiny one plays the training
questions under other names.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_r1.data import corpora
from agent_r1.data.prompts import messages
from agent_r1.data.published import DATASETS, Corrupt, Record, from_file, from_hub, read_records
from agent_r1.data.rows import Passage, make_folder, write_corpus, write_rows
from agent_r1.data.tinyhop import KINDS, make_questions, make_world
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.files import sha256
from agent_r1.settings import DataConfig
from agent_r1.types import Row

SPLITS = ("train", "val", "test", "cold")
"""`cold` is TinyHop's alone, for the cold start: RL must not meet questions whose answers have been demonstrated."""


def build(config: DataConfig, seed: int, out: Path, agent_name: str = "hermes") -> dict[str, Any]:
    """Make the data set in the new folder `out` and return its manifest.

    Raises ConfigError for sizes that cannot be or that the source does not have; AgentR1Error for a source that is missing
    or corrupt, and if `out` exists or cannot be written.
    """
    write, splits = (_write_tinyhop, SPLITS) if config.name == "tinyhop" else (_write_published, SPLITS[:3])
    files = [*(f"{split}.parquet" for split in splits), "corpus.jsonl"]
    return make_folder(out, lambda folder: write(config, seed, folder, agent_name), files)


def _row(dataset: str, question: str, answers: list[str], agent_name: str, **extra: Any) -> Row:
    """verl's keys; `extra` is known to evaluations, not to the agent."""
    return {
        "data_source": dataset,
        "prompt": messages(dataset, question),
        "ability": "multi-hop-qa",
        "reward_model": {"style": "rule", "ground_truth": answers},
        "extra_info": extra,
        "agent_name": agent_name,
        "env_kwargs": {"tools": None},  # those of env.tools; a list here would narrow them
    }


# -------------------------------------------------------------------------------------------------------------- tinyhop


def _write_tinyhop(config: DataConfig, seed: int, folder: Path, agent_name: str) -> dict[str, Any]:
    """The data files; what the manifest says of them. Each split draws from its own generator, seeded with its own name."""
    for split in SPLITS:
        if getattr(config, split) < 1:
            raise ConfigError(f"data.{split}={getattr(config, split)}: each split needs at least one question")
    taken: set[str] = set()
    corpus: list[Passage] = []
    splits: dict[str, Any] = {}
    for split in SPLITS:
        rng = random.Random(f"{seed}/{split}")
        count = getattr(config, split)
        world = make_world(rng, _world_size(config, split), taken)
        questions = make_questions(world, rng, count, _mix(config, split))
        rows = [
            _row("tinyhop", q.text, [q.answer], agent_name, index=index, split=split, kind=q.kind, hops=q.hops,
                 lookups=[asdict(lookup) for lookup in q.lookups])
            for index, q in enumerate(questions)
        ]  # fmt: skip
        write_rows(folder / f"{split}.parquet", rows)
        corpus += world.passages()
        found = Counter(question.kind for question in questions)
        kinds = {kind: found[kind] for kind in KINDS}
        splits[split] = {"questions": count, "entities": world.size, "kinds": kinds}
    write_corpus(folder / "corpus.jsonl", corpus)
    return {"seed": seed, "config": config.model_dump(), "splits": splits}


def _world_size(config: DataConfig, split: str) -> int:
    """Entities in the world of a split. Held-out worlds grow with their questions: 0.6 entities each yield any mix."""
    fixed = {"train": config.entities, "cold": config.cold_entities}
    return fixed.get(split) or max(150, math.ceil(0.6 * getattr(config, split)))


def _mix(config: DataConfig, split: str) -> dict[str, float]:
    """The mix of a split. The cold start's has more one-hop questions, for its first phase is about copying and nothing
    else, and twice the share of the longest chains, which take the most examples to learn.
    """
    if split != "cold":
        return config.mix
    mix = config.mix | {"1-hop": config.mix.get("1-hop", 0.0) + sum(config.mix.values())}
    return mix | {"3-hop": 2 * mix.get("3-hop", 0.0)}


# ------------------------------------------------------------------------------------------------------ published sets


def _write_published(config: DataConfig, seed: int, folder: Path, agent_name: str) -> dict[str, Any]:
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
        rows = [
            _row(config.name, r.question, r.answers, agent_name, index=index, split=split, kind=r.kind, hops=r.hops,
                 id=r.id, supporting=r.supporting)
            for index, r in enumerate(records)
        ]  # fmt: skip
        write_rows(folder / f"{split}.parquet", rows)
    everyone = [record for records in splits.values() for record in records]
    found = corpora.passages(config.corpus, everyone, config.skip_bad, skipped)
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
    wanted = {split: getattr(config, split) for split in SPLITS[:3]}
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
