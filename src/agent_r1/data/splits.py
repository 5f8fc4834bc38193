"""Split records into train, val and test without overlap.

In: records of a published or user-defined data set. Out: the records of each split, and their part
of the manifest.

`train` and `val` are drawn from the published training set; `test` is the published validation set
or a sample. So validation during training never uses a test question. A single file gives all three
splits.
"""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_r1.config.settings import DataConfig
from agent_r1.data import corpora
from agent_r1.data.json_files import parse_records
from agent_r1.data.source import SPLITS, Asked, Made, Source
from agent_r1.data.spellings import question_key
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.files import sha256

MAX_SHUFFLES = 100
"""Random orders in which groups are dealt out. A large group fits into train, and not into val."""


class RecordSource(Source):
    """A data set that reads records, from files or from the hub, and splits them."""

    checked = staticmethod(parse_records)

    @abstractmethod
    def local_files(self, config: DataConfig) -> dict[str, list[Path]]:
        """Find the local files, by part; {} without any. Raise AgentR1Error for a missing one."""

    @abstractmethod
    def parts(
        self, config: DataConfig, files: dict[str, list[Path]], seed: int, omissions: list[str]
    ) -> dict[str, list[Any]]:
        """Read records with `question`, `kind` and `paragraphs`; name others in `omissions`.

        One part is divided into the splits. Of two, the second is the test set. Three are train,
        val and test, as `split_three` draws them.
        """

    def split_three(
        self, config: DataConfig, parts: dict[str, list[Any]], seed: int, omissions: list[str]
    ) -> dict[str, list[Any]]:
        """Draw each split from its own part; 0 takes all of it.

        What is tested is in no other split, and what is validated is not trained on.
        """
        splits: dict[str, list[Any]] = {}
        held_out: list[Any] = []
        for split in reversed(SPLITS):
            records = different(parts[split], omissions, held_out)
            count = getattr(config, split) or len(records)
            splits[split] = _draw(records, count, f"{seed}/{split}", split)
            held_out += records
        return {split: splits[split] for split in SPLITS}

    @abstractmethod
    def asked(self, config: DataConfig, record: Any) -> Asked:
        """Make a question from a record."""

    def is_one_file(self, config: DataConfig) -> bool:
        return len(self.local_files(config)) == 1

    def check_settings(self, config: DataConfig, seed: int) -> None:
        """Look for the files that the settings name."""
        self.local_files(config)

    def make(self, config: DataConfig, seed: int) -> Made:
        files = self.local_files(config)
        corpora.check_corpus(config.corpus)
        omissions: list[str] = []
        splits = self.parts(config, files, seed, omissions)
        (first, records), *held_out = splits.items()
        if not held_out:
            splits = split_one(config, f"{seed}/{first}", records, omissions)
        elif len(held_out) == 1:
            splits = split_two(config, seed, records, held_out[0][1], omissions)
        local: list[Path] = []
        for part in files.values():
            local += part
        if Path(config.corpus).is_file():
            local.append(Path(config.corpus))
        questions = {}
        sizes = {}
        everyone = []
        for split, records in splits.items():
            kinds = Counter(record.kind for record in records if record.kind)
            sizes[split] = {"questions": len(records), "kinds": dict(sorted(kinds.items()))}
            questions[split] = [self.asked(config, record) for record in records]
            everyone += records
        manifest = {
            "sources": {str(path.resolve()): sha256(path) for path in local},
            "skipped": omissions,  # grows while the passages are written
            "splits": sizes,
        }
        return Made(
            questions,
            corpora.corpus_passages(config.corpus, everyone, config.skip_bad, omissions),
            manifest,
        )


def different(records: list[Any], omissions: list[str], held_out: Iterable[Any] = ()) -> list[Any]:
    """Keep records whose questions are new, here and in `held_out`; name the others in `omissions`.

    GSM8K has no ids, and elsewhere one question may have two ids. Split by id, it could be in train
    and test.
    """
    keys = {_key(record) for record in held_out}
    first_ones = []
    for record in records:
        key = _key(record)
        if key in keys:
            omissions.append(f"{record.question[:80]!r} is asked twice")
            continue
        keys.add(key)
        first_ones.append(record)
    return first_ones


def _key(record: Any) -> str:
    """Return what is equal for equal questions. A question about a text of its own has a `key`."""
    return getattr(record, "key", None) or question_key(record.question)


def split_one(
    config: DataConfig, seed: str, records: list[Any], omissions: list[str]
) -> dict[str, list[Any]]:
    """Draw three samples without overlap."""
    records = different(records, omissions)
    if not config.test:
        raise ConfigError(
            "data.test=0 takes the whole validation set, and a single file has none; set it to a "
            "number",
            code="no_validation_set",
        )
    sizes = {split: getattr(config, split) for split in SPLITS}
    if config.split_by != "auto":
        return _split_by_groups(config.split_by, sizes, seed, records)
    if len(records) < sum(sizes.values()):
        fitting = share_out(len(records), sizes)
        words = " ".join(f"data.{split}={size}" for split, size in (fitting or {}).items())
        remedy = f"set {words}, or add some" if fitting else "add some"
        raise ConfigError(
            f"the source has {len(records)} questions and train, val and test take "
            f"{sum(sizes.values())}; {remedy}",
            code="too_few_questions",
        )
    sample = random.Random(seed).sample(records, sum(sizes.values()))
    splits = {}
    start = 0
    for split, count in sizes.items():
        splits[split] = sample[start : start + count]
        start += count
    return splits


def _split_by_groups(
    key: str, sizes: dict[str, int], seed: str, records: list[Any]
) -> dict[str, list[Any]]:
    """Divide records so that the splits share no value of their metadata's `key`.

    Raises ConfigError for a record without it, or for too few groups.
    """
    groups: dict[str, list[Any]] = {}
    for record in records:
        metadata = getattr(record, "metadata", {})
        if key not in metadata:
            raise ConfigError(
                f"data.split_by={key}: the question {record.question[:80]!r} has no {key!r} in its "
                f"metadata (it has: {', '.join(metadata) or 'none'})",
                code="missing_column",
            )
        groups.setdefault(json.dumps(metadata[key], sort_keys=True), []).append(record)
    rng = random.Random(f"{seed}/groups")
    splits: dict[str, list[Any]] = {}
    for _ in range(MAX_SHUFFLES):
        splits = _deal_groups(groups, sizes, rng)
        if all(len(splits[split]) >= count for split, count in sizes.items()):
            return {split: rng.sample(splits[split], count) for split, count in sizes.items()}
    counts = ", ".join(f"{split} {len(records)}" for split, records in splits.items())
    raise ConfigError(
        f"data.split_by={key}: {len(groups)} values, dealt out {MAX_SHUFFLES} times, never gave "
        f"each split its questions (at last {counts}); lower data.train, data.val or data.test, or "
        "name a key with more values",
        code="too_few_questions",
    )


def _deal_groups(
    groups: dict[str, list[Any]], sizes: dict[str, int], rng: random.Random
) -> dict[str, list[Any]]:
    """Give each group, in random order, to the split that lacks the largest share."""
    order = sorted(groups)
    rng.shuffle(order)
    splits: dict[str, list[Any]] = {split: [] for split in sizes}
    for group in order:
        split = min(splits, key=lambda name: len(splits[name]) / sizes[name])
        splits[split] += groups[group]
    return splits


def split_two(
    config: DataConfig, seed: int, train: list[Any], test: list[Any], omissions: list[str]
) -> dict[str, list[Any]]:
    """Draw train and val from the training set; test is the published validation set."""
    train = different(train, omissions, test)
    sample = _draw(train, config.train + config.val, f"{seed}/train", "train and val")
    if config.test:
        test = _draw(test, config.test, f"{seed}/test", "test")
    return {"train": sample[: config.train], "val": sample[config.train :], "test": test}


def _draw(records: list[Any], count: int, seed: str, splits: str) -> list[Any]:
    if count > len(records):
        raise ConfigError(
            f"the source has {len(records)} questions and {splits} take {count}; lower data.train, "
            "data.val or data.test",
            code="too_few_questions",
        )
    return random.Random(seed).sample(records, count)


def share_out(count: int, wanted: dict[str, int]) -> dict[str, int] | None:
    """Return the sizes of disjoint splits, or None if one would be empty.

    Enough tasks give the sizes that are wanted; fewer are shared out in that proportion.
    """
    total = sum(wanted.values())
    if count >= total:
        return wanted
    if count < len(wanted):
        return None
    sizes = {split: max(1, count * size // total) for split, size in wanted.items()}
    while sum(sizes.values()) > count:
        sizes[max(sizes, key=lambda split: sizes[split])] -= 1
    last = list(sizes)[-1]
    sizes[last] += count - sum(sizes.values())
    return sizes
