"""Build the TinyHop data set: a world for each split, and its questions.

The corpus holds the passages of *all* worlds, and one index serves all splits. The agent has to
find its passages among those of other worlds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from agent_r1 import (
    Asked,
    ConfigError,
    DataConfig,
    Made,
    Passage,
    Source,
)
from agent_r1_recipes.laptop.settings import TinyHopSettings
from agent_r1_recipes.laptop.tinyhop import (
    KINDS,
    Question,
    World,
    make_questions,
    make_shares,
    make_world,
)


class TinyHop(Source):
    """Make questions about generated worlds."""

    splits = (*Source.splits, "cold")
    """`cold` is for the cold start: RL must not meet questions that were demonstrated."""
    ability = "multi-hop-qa"

    def check_settings(self, config: TinyHopSettings, seed: int) -> None:
        for split in self.splits:
            make_shares(1, _mix(config, split))

    def title(self, config: DataConfig) -> str:
        return "a world made from nothing"

    def summary(self, config: DataConfig, manifest: dict[str, Any]) -> str:
        texts = []
        for name, split in manifest["splits"].items():
            texts.append(f"{name} {split['questions']} questions in a world of {split['entities']}")
        return ", ".join(texts)

    def make(self, config: TinyHopSettings, seed: int) -> Made:
        """Make the questions of each split about its own world."""
        if not config.test:
            raise ConfigError(
                "data.test=0: TinyHop has no published validation set; give a number of questions",
                code="no_validation_set",
            )
        corpus: list[Passage] = []
        splits = {}
        manifest = {}
        for split, rng, world in worlds(config, seed):
            count = getattr(config, split)
            questions = make_questions(world, rng, count, _mix(config, split))
            splits[split] = [to_asked(question) for question in questions]
            corpus += world.passages()
            counts = Counter(question.kind for question in questions)
            kinds = {kind: counts[kind] for kind in KINDS if counts[kind]}
            manifest[split] = {"questions": count, "entities": world.size, "kinds": kinds}
        return Made(splits, corpus, {"splits": manifest})


TINYHOP = TinyHop()


def worlds(config: TinyHopSettings, seed: int) -> Iterator[tuple[str, random.Random, World]]:
    """Make the world of each split, from a generator of its own.

    It is seeded with the split's name, so more training questions change no test question.
    """
    used_names: set[str] = set()
    for split in TinyHop.splits:
        rng = random.Random(f"{seed}/{split}")
        yield split, rng, make_world(rng, _world_size(config, split), used_names)


def to_asked(question: Question) -> Asked:
    """Convert a question to the form of all sources."""
    lookups = [asdict(lookup) for lookup in question.lookups]
    facts = {"kind": question.kind, "hops": question.hops, "lookups": lookups}
    return Asked(question.text, [question.answer], facts)


def _world_size(config: TinyHopSettings, split: str) -> int:
    """Count the entities of a split's world.

    Held-out worlds grow with their questions: 0.6 entities per question allow any mix.
    """
    sizes = {"train": config.entities, "cold": config.cold_entities}
    return sizes.get(split) or max(150, math.ceil(0.6 * getattr(config, split)))


def _mix(config: TinyHopSettings, split: str) -> dict[str, float]:
    """Return the mix of a split.

    The cold start has more one-hop questions, because its first phase only learns copying. It has
    twice the share of the longest chains, which need the most examples.
    """
    if split == "train":
        return config.train_mix or config.mix
    if split != "cold":
        return config.mix
    mix = config.mix | {"1-hop": config.mix.get("1-hop", 0.0) + sum(config.mix.values())}
    return mix | {"3-hop": 2 * mix.get("3-hop", 0.0)}
