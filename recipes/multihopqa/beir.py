"""Load BEIR's corpus of HotpotQA: 5.2 million abstracts of Wikipedia, October 2017."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from agent_r1 import Passage, published_passages

PUBLISHERS = {
    "BeIR/hotpotqa@refs/convert/parquet": "corpus/corpus/*.parquet",
    "mteb/hotpotqa@ab518f4d6fcca38d87c25209f94beba119d02014": "corpus.jsonl",
}
"""The same passages, by two publishers of the hub: repository, and its files."""
COUNT = 5_233_329


def passages(records: Iterable[Any] = (), count: int = COUNT) -> Iterator[Passage]:
    """Yield the corpus; it is the same whatever the questions are."""
    otherwise = "download BEIR's hotpotqa yourself and name its corpus.jsonl, or the folder, with data.corpus=PATH"
    return published_passages(PUBLISHERS, count, otherwise)
