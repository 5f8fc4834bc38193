"""From worlds to files: three splits of questions as parquet, all passages as one corpus, and a manifest over both.

In: `DataConfig` and a seed. Out: a folder with train, val, test and cold.parquet, corpus.jsonl and manifest.json, the same
bytes for the same seed and configuration. Next: `search/` indexes corpus.jsonl; the trainer and the evaluation read
the rows.

The corpus holds the passages of *all* worlds: one index serves all splits, and the agent has to find its
passages among those of worlds that it is not asked about.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_r1.config import DataConfig
from agent_r1.data.folder import make_folder, verify_folder
from agent_r1.data.prompts import messages
from agent_r1.data.rows import Passage, write_corpus, write_rows
from agent_r1.data.tinyhop import KINDS, Question, make_questions, make_world
from agent_r1.errors import ConfigError
from agent_r1.types import Row

SPLITS = ("train", "val", "test", "cold")
"""`cold` is for the cold start alone: RL must not meet questions whose answers have been demonstrated."""
FILES = (*(f"{split}.parquet" for split in SPLITS), "corpus.jsonl")


def build(config: DataConfig, seed: int, out: Path, agent_name: str = "hermes") -> dict[str, Any]:
    """Make the data set in the new folder `out` and return its manifest.

    Raises ConfigError for sizes that cannot be, AgentR1Error if `out` exists or cannot be written.
    """
    for split in SPLITS:
        if getattr(config, split) < 1:
            raise ConfigError(f"data.{split}={getattr(config, split)}: each split needs at least one question")
    return make_folder(out, lambda place: _write(config, seed, place, agent_name), FILES)


def verify(out: Path) -> dict[str, Any]:
    """Hash every file of a data set again and return its manifest. Raises AgentR1Error naming what does not fit."""
    return verify_folder(out, FILES)


def _write(config: DataConfig, seed: int, folder: Path, agent_name: str) -> dict[str, Any]:
    """The data files; what the manifest says of them. Each split draws from its own generator, seeded with its own name."""
    taken: set[str] = set()
    corpus: list[Passage] = []
    splits: dict[str, Any] = {}
    for split in SPLITS:
        rng = random.Random(f"{seed}/{split}")
        count = getattr(config, split)
        world = make_world(rng, _world_size(config, split), taken)
        questions = make_questions(world, rng, count, _mix(config, split))
        rows = [_row(question, index, split, agent_name) for index, question in enumerate(questions)]
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


def _row(question: Question, index: int, split: str, agent_name: str) -> Row:
    """verl's keys."""
    return {
        "data_source": "tinyhop",
        "prompt": messages("tinyhop", question.text),
        "ability": "multi-hop-qa",
        "reward_model": {"style": "rule", "ground_truth": [question.answer]},
        "extra_info": {
            "index": index,
            "split": split,
            "kind": question.kind,
            "hops": question.hops,
            "lookups": [asdict(lookup) for lookup in question.lookups],
        },
        "agent_name": agent_name,
        "env_kwargs": {"tools": None},  # those of env.tools; a list here would narrow them
    }
