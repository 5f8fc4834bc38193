"""Derive answers from passages alone.

In: passages as text, the places that a question names (`asked`), and the relations from them to its
answer (`path`). Out: all answers that the passages allow, or what to look up next. Next:
`questions.py` keeps a question only if it has one answer; `demonstrator.py` plays the solver's
path; the tests compare the passages with the packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FACT_PATTERNS = {
    "country": r"^(?P<of>[^:]+?) is a city in (?:the )?(?P<is>.+?) with about",
    "inhabitants": r"(?:^|: )(?:The )?(?P<of>[^:]+?) is a (?:city in .+?|country) "
    r"with about (?P<is>[\d.]+(?: million| thousand)?) inhabitants",
    "capital": r"The capital of (?:the )?(?P<of>.+?) is (?P<is>.+?)\.",
    "currency": r"The currency of (?:the )?(?P<of>.+?) is the (?P<is>.+?)\.",
    "official language": r"The official language of (?:the )?(?P<of>.+?) is (?P<is>.+?)\.",
    "borders": r"(?:^|: )(?:The )?(?P<of>[^:]+?) has borders with (?P<is>.+)\.",
}
"""Relation -> the sentence that states it, at its place in a line of a search result: `title:
text`, or the text alone."""
ReadFacts = dict[tuple[str, str], set[str]]
"""(relation, place) -> what was read of it."""


def read_facts(passages: Iterable[str]) -> ReadFacts:
    """Parse the facts in passages, one per line."""
    facts: ReadFacts = {}
    for line in passages:
        for relation, pattern in FACT_PATTERNS.items():
            for match in re.finditer(pattern, line):
                values = [match["is"]]
                if relation == "borders":  # the only relation with several values
                    values = match["is"].split(", ")
                facts.setdefault((relation, match["of"]), set()).update(values)
    return facts


def solve(
    relations: list[str], path: list[str], facts: ReadFacts
) -> tuple[set[str], tuple[str, str] | None]:
    """Return (answers, what is missing): answers once nothing is missing, else the next fact.

    A path is followed from relation to relation. Two paths compare what is asked: `more` takes the
    place with the most inhabitants, `both` what the borders of all places share.
    """
    relation = {"more": "inhabitants", "both": "borders"}.get(path[0])
    if relation is None:
        places = set(relations)
        for step in path:
            next_places: set[str] = set()
            for place in sorted(places):  # sorted: a set of names has another order in each process
                if (step, place) not in facts:
                    return set(), (step, place)
                next_places |= facts[step, place]
            places = next_places
        return places, None
    for place in relations:
        if (relation, place) not in facts:
            return set(), (relation, place)
    values = [facts[relation, place] for place in relations]
    if path == ["both"]:
        return set.intersection(*values), None
    numbers = [read_number(max(inhabitants)) for inhabitants in values]
    most = max(numbers)
    return {place for place, number in zip(relations, numbers, strict=True) if number == most}, None


def read_number(words: str) -> float:
    """Return the number that `facts.in_words` wrote: `2.5 million` -> 2500000.0."""
    digits, _, unit = words.partition(" ")
    return float(digits) * {"": 1, "thousand": 1000, "million": 10**6}[unit]


def query(relation: str, place: str) -> str:
    """Return the solver's search query for a fact."""
    # The place has a blank in front, as in the question. To a pretrained tokenizer " Siem Reap" and
    # "Siem Reap" differ, and a query `Siem Reap city` was misspelt now and then.
    return f"{relation} of {place}"
