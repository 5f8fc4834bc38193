"""Make a catalogue of papers that cite each other, and reward a list.

The papers are made up. A goal names a paper and a topic, and the list is right if it has the
papers on the topic which that paper cites. Precision, recall and F1 are those of paper search:

    precision = |list & wanted| / |list|    recall = |list & wanted| / |wanted|
    reward    = F1 = 2 precision recall / (precision + recall)

In: goals. Out: pages and a reward. Next: `pages.py` plays them.
"""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agent_r1_recipes.catalogues.matching import Ranking
from agent_r1_recipes.catalogues.products import CHECKSUMS

PAPERS = 1000
HAND_IN = "Hand In"
TOPICS = """
fog rain snow wind ice sand salt clay coal iron moss fern wheat rice bees ants owls eels tides
stars
""".split()  # noqa: SIM905 - a list would be a page of quotes
HEADS = """
Bac Bek Cor Cud Dav Dop Fam Fig Gev Gom Hax Hin Jor Jut Kad Ket Lin Lug Mov Mib Pog Pem Rak Rup
""".split()  # noqa: SIM905 - a list would be a page of quotes
TAILS = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aio"]
"""Second halves of a name. A pair of letters across the two halves is rarer than either half, so
the tokenizer of a tiny model cuts each name between them."""
CITATIONS = (2, 2, 1)
"""A paper cites this many papers on each of three topics. One on a topic would be no list."""


@dataclass(frozen=True)
class Paper:
    code: str
    """Its author, by whom a search finds it."""
    topic: str
    cites: tuple[str, ...]


class Papers:
    """A catalogue in which one collects papers."""

    finish = HAND_IN
    window = 5
    subpages: tuple[str, ...] = ()
    # No demonstration has a refusal, so a clone cannot go on from a page with one. From the same
    # page it can.
    explains = False

    def __init__(self, papers: list[Paper]):
        self.items = {paper.code: paper for paper in papers}
        self.ranking = Ranking({paper.code: self.line(paper.code) for paper in papers})

    def line(self, code: str) -> str:
        return f"{code} on {self.items[code].topic}"

    def page(self, code: str) -> str:
        return f"{self.line(code)} cites"

    def subpage(self, code: str, name: str) -> str:
        raise LookupError(name)  # there is none, so no page has a link to it

    def options(self, code: str) -> dict[str, tuple[str, ...]]:
        return {}

    def links(self, code: str) -> dict[str, str]:
        """Return the papers that a paper cites, by their titles and authors."""
        cites = self.items[code].cites
        return {f"On {self.items[other].topic}, by {other}": other for other in cites}

    def wanted(self, goal: dict[str, Any]) -> list[str]:
        """Return the right list."""
        cites = self.items[goal["code"]].cites
        return [code for code in cites if self.items[code].topic == goal["topic"]]

    def reward(
        self, goal: dict[str, Any], code: str | None, chosen: dict[str, str], kept: list[str]
    ) -> dict[str, float]:
        targets = set(self.wanted(goal))
        right = len(targets & set(kept))
        precision = right / len(kept) if kept else 0.0
        recall = right / len(targets)
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        return {"reward": f1, "precision": precision, "recall": recall}


def _draw_others(
    code: str, cites: list[str], papers: list[str], count: int, rng: random.Random
) -> list[str]:
    """Draw papers that a paper cites. No two names on its page begin with the same syllable."""
    chosen: list[str] = []
    while len(chosen) < count:
        other = rng.choice(papers)
        heads = {name[:3] for name in (code, *cites, *chosen)}
        if other[:3] not in heads:
            chosen.append(other)
    return chosen


@functools.cache
def make_papers() -> Papers:
    """Make the 1,000 papers and their citations, always the same ones."""
    rng = random.Random("catalogues/papers")
    codes = [head + tail for head in HEADS for tail in TAILS]
    rng.shuffle(codes)
    codes = codes[:PAPERS]
    topics = {code: TOPICS[number % len(TOPICS)] for number, code in enumerate(codes)}
    by_topic = {topic: [code for code in codes if topics[code] == topic] for topic in TOPICS}
    papers = []
    for code in codes:
        cites: list[str] = []
        for topic, count in zip(rng.sample(TOPICS, len(CITATIONS)), CITATIONS, strict=True):
            cites += _draw_others(code, cites, by_topic[topic], count, rng)
        rng.shuffle(cites)
        papers.append(Paper(code, topics[code], tuple(cites)))
    return Papers(papers)


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different goals of a split. No paper is asked about in two splits."""
    catalogue = make_papers()
    goals = []
    for code, paper in catalogue.items.items():
        if zlib.crc32(code.encode()) % 5 not in CHECKSUMS[split]:
            continue
        cited_topics = [catalogue.items[other].topic for other in paper.cites]
        for topic in sorted(set(cited_topics)):
            if cited_topics.count(topic) > 1:
                goals.append({"code": code, "topic": topic})
    for goal in rng.sample(goals, count):
        yield {
            "question": f"List the papers on {goal['topic']} that {goal['code']} cites",
            "metadata": {"catalogue": "papers", "goal": json.dumps(goal)},
        }
