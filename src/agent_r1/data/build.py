"""From any source to files: splits of questions as parquet, all passages as one corpus, and a manifest over both.

In: `DataConfig` and a seed. Out: a folder with train, val, test (and with TinyHop cold) .parquet, corpus.jsonl and
manifest.json, the same bytes for the same seed, configuration and source. Next: `search/` indexes corpus.jsonl; the trainer
and the evaluation read the rows.

TinyHop has a world of its own for each split. The corpus holds the passages of *all* worlds: one index serves all splits,
and the agent has to find its passages among those of worlds that it is not asked about.

Published sets: `train` and `val` are drawn from the published training set, without overlap; `test` is the published
validation set, whole or a sample. The curve during training therefore never sees a test question. One local file alone, or a
set that is published as one, gives all three splits. The cold start has no split: a pretrained model needs none, and the tiny
one plays the training questions under other names.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from agent_r1.data import corpora, own_rows, published
from agent_r1.data.forms import Record
from agent_r1.data.prompts import messages
from agent_r1.data.published import DATASETS
from agent_r1.data.rows import Passage, make_folder, write_corpus, write_rows
from agent_r1.data.spellings import question_key
from agent_r1.data.tinyhop import KINDS, make_questions, make_world
from agent_r1.errors import AgentR1Error, ConfigError, first_line
from agent_r1.files import sha256
from agent_r1.settings import DataConfig

SPLITS = ("train", "val", "test", "cold")
"""`cold` is TinyHop's alone, for the cold start: RL must not meet questions whose answers have been demonstrated."""
KNOWN = ("kind", "hops", "id", "supporting")
"""What evaluations and environments get to know of a published question."""


@dataclass(frozen=True)
class Asked:
    """One question of any source."""

    question: str
    answers: list[str]
    extra: dict[str, Any]
    """What is known of it to evaluations and environments, and not to the agent."""
    system: str | None = None
    """A system message of its own."""
    tools: list[str] | None = None
    """Those of env.tools that it is asked with; None: all."""


@dataclass(frozen=True)
class Made:
    """What a source gives: questions by split, passages, and what the manifest says of them."""

    splits: dict[str, list[Asked]]
    passages: Iterable[Passage]
    manifest: dict[str, Any]


def build(
    config: DataConfig, seed: int, out: Path, agent_name: str = "hermes", says_how: bool = False
) -> dict[str, Any]:
    """Make the data set in the new folder `out` and return its manifest. `agent_name` and `says_how` are those of the dialect.

    Raises ConfigError for sizes that cannot be or that the source does not have; AgentR1Error for a source that is missing
    or corrupt, and if `out` exists or cannot be written.
    """
    make = _tinyhop if config.name == "tinyhop" else _published if config.name in DATASETS else _own
    splits = SPLITS if config.name == "tinyhop" else SPLITS[:3]
    published_as = "multi-hop-qa" if config.name == "tinyhop" else "question-answering"
    ability = DATASETS[config.name].ability if config.name in DATASETS else published_as

    def write(folder: Path) -> dict[str, Any]:
        made = make(config, seed)
        for split, questions in made.splits.items():
            rows = [
                {  # verl's keys
                    "data_source": config.data_source,
                    "prompt": messages(config.data_source, asked.question, asked.system, says_how),
                    "ability": ability,
                    "reward_model": {"style": "rule", "ground_truth": asked.answers},
                    "extra_info": {"index": index, "split": split, **asked.extra},
                    "agent_name": agent_name,
                    "env_kwargs": {"tools": asked.tools},
                }
                for index, asked in enumerate(questions)
            ]
            try:
                write_rows(folder / f"{split}.parquet", rows)
            except pa.ArrowException as error:
                raise AgentR1Error(
                    f"the metadata of {split} are not alike ({first_line(error)}); give a key the same type everywhere"
                ) from None
        write_corpus(folder / "corpus.jsonl", made.passages)
        return {"seed": seed, "config": config.model_dump(), **made.manifest}

    return make_folder(out, write, [*(f"{split}.parquet" for split in splits), "corpus.jsonl"])


# -------------------------------------------------------------------------------------------------------------- tinyhop


def _tinyhop(config: DataConfig, seed: int) -> Made:
    """Each split draws from its own generator, seeded with its own name."""
    if not config.test:
        raise ConfigError("data.test=0: TinyHop has no validation set to take whole; say how many questions")
    taken: set[str] = set()
    corpus: list[Passage] = []
    splits, manifest = {}, {}
    for split in SPLITS:
        rng = random.Random(f"{seed}/{split}")
        count = getattr(config, split)
        world = make_world(rng, _world_size(config, split), taken)
        questions = make_questions(world, rng, count, _mix(config, split))
        splits[split] = [
            Asked(q.text, [q.answer], {"kind": q.kind, "hops": q.hops, "lookups": [asdict(lk) for lk in q.lookups]})
            for q in questions
        ]
        corpus += world.passages()
        found = Counter(question.kind for question in questions)
        kinds = {kind: found[kind] for kind in KINDS}
        manifest[split] = {"questions": count, "entities": world.size, "kinds": kinds}
    return Made(splits, corpus, {"splits": manifest})


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


# --------------------------------------------------------------------------------------------- published, and one's own


def _published(config: DataConfig, seed: int) -> Made:
    dataset, skipped = DATASETS[config.name], []
    files = published.source_files(config)
    corpora.check(config.corpus)

    def read(split: str) -> list[Record]:
        return published.read(config, split, files.get(split, []), skipped)

    train, *held_out = ["all"] if "all" in files else dataset.files
    splits = (
        split_two(config, seed, read(train), read(*held_out), skipped)
        if held_out
        else split_one(config, f"{seed}/all", read(train), skipped)
    )
    asked = {
        split: [
            Asked(r.question, r.answers, {name: getattr(r, name) for name in KNOWN}, config.system) for r in records
        ]
        for split, records in splits.items()
    }
    made = _of_records(config, splits, asked, [path for part in files.values() for path in part], skipped)
    made.manifest["dataset"] = {"hub": dataset.hub, "revision": dataset.revision} if not files else None
    return made


def _own(config: DataConfig, seed: int) -> Made:
    corpora.check(config.corpus)
    skipped: list[str] = []
    files = own_rows.source_files(config)
    splits = own_rows.splits_of(config, files, seed, skipped)
    if "all" in splits:
        splits = split_one(config, f"{seed}/own", splits["all"], skipped)
    asked = {
        split: [Asked(q.question, q.answer, q.extra(), q.system or config.system, q.tools) for q in questions]
        for split, questions in splits.items()
    }
    return _of_records(config, splits, asked, files.values(), skipped)


def _of_records(
    config: DataConfig,
    splits: dict[str, list[Any]],
    asked: dict[str, list[Asked]],
    files: Iterable[Path],
    skipped: list[str],
) -> Made:
    """`splits` holds the records that were read from `files`, each with its `kind` and its `paragraphs`."""
    local = [*files, *(path for path in [Path(config.corpus)] if path.is_file())]
    manifest = {
        "sources": {str(path.resolve()): sha256(path) for path in local},
        "skipped": skipped,  # by those of the corpus it grows, while the passages are written
        "splits": {
            split: {
                "questions": len(records),
                "kinds": dict(sorted(Counter(r.kind for r in records if r.kind).items())),
            }
            for split, records in splits.items()
        },
    }
    everyone = [record for records in splits.values() for record in records]
    return Made(asked, corpora.passages(config.corpus, everyone, config.skip_bad, skipped), manifest)


# ------------------------------------------------------------------------------------------------------- their splits


def different(records: list[Any], skipped: list[str], held_out: Iterable[Any] = ()) -> list[Any]:
    """Keep the rows whose questions are new, here and in `held_out`; the others are named in `skipped`.

    GSM8K has no ids, and where there are ids the same question may have two: dealt out, it would be trained and tested.
    """
    known = {question_key(record.question) for record in held_out}
    kept = []
    for record in records:
        if (key := question_key(record.question)) in known:
            skipped.append(f"{record.question[:80]!r} is asked twice")
            continue
        known.add(key)
        kept.append(record)
    return kept


def split_one(config: DataConfig, seed: str, records: list[Any], skipped: list[str]) -> dict[str, list[Any]]:
    """Three samples without overlap."""
    records = different(records, skipped)
    if not config.test:
        raise ConfigError("data.test=0 takes the whole validation set, and one file has none apart; say how many")
    wanted = {split: getattr(config, split) for split in SPLITS[:3]}
    drawn = iter(_draw(records, sum(wanted.values()), seed, "train, val and test"))
    return {split: [next(drawn) for _ in range(count)] for split, count in wanted.items()}


def split_two(
    config: DataConfig, seed: int, train: list[Record], test: list[Record], skipped: list[str]
) -> dict[str, list[Record]]:
    """Two samples of the training set without overlap, and the validation set, which stays as it is published."""
    train = different(train, skipped, test)
    drawn = _draw(train, config.train + config.val, f"{seed}/train", "train and val")
    tested = _draw(test, config.test, f"{seed}/test", "test") if config.test else test
    return {"train": drawn[: config.train], "val": drawn[config.train :], "test": tested}


def _draw(records: list[Any], count: int, seed: str, splits: str) -> list[Any]:
    if count > len(records):
        raise ConfigError(
            f"the source has {len(records)} questions and {splits} take {count}; lower data.train and the like"
        )
    return random.Random(seed).sample(records, count)
