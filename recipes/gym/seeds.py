"""Rows without questions: each is a seed, from which an environment makes its task.

In: `data.train`, `data.val`, `data.test` as counts. Out: rows with `metadata.seed`, different in
all splits. Next: `environment.py` resets with the seed.
"""

from __future__ import annotations

import random

from agent_r1 import Asked, ConfigError, DataConfig, Made, Source

MAX_SEED = 2**31
"""Gymnasium takes any integer from 0; NumPy's older generators take 32 bits."""


class Seeds(Source):
    """A data set of numbers."""

    ability = "environment"

    def title(self, config: DataConfig) -> str:
        return "seeds of your environment"

    def make(self, config: DataConfig, seed: int) -> Made:
        counts = {split: getattr(config, split) for split in self.splits}
        for split, count in counts.items():
            if count < 1:
                raise ConfigError(
                    f"data.{split}={count}: the rows of data.name=seeds are drawn, so their number "
                    "is at least 1",
                    code="too_few_questions",
                )
        # One sample for all splits, so that no seed is in two of them.
        numbers = random.Random(f"{seed}/seeds").sample(range(MAX_SEED), sum(counts.values()))
        splits = {}
        sizes = {}
        start = 0
        for split, count in counts.items():
            split_numbers = numbers[start : start + count]
            splits[split] = [
                Asked("", [], {"metadata": {"seed": number}}) for number in split_numbers
            ]
            sizes[split] = {"questions": count, "kinds": {}}
            start += count
        return Made(splits, [], {"sources": {}, "skipped": [], "splits": sizes})


SEEDS = Seeds()
