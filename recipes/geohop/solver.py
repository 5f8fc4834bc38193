"""Derive answers from passages alone.

In: passages as text, the places that a question names (`asked`), and the relations from them to its
answer (`path`).
Out: all answers that the passages allow, or what to look up next. Next: `questions.py` keeps a
question only if it has one answer; `demonstrator.py` plays the solver's path; the tests compare the
passages with the packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FACT_PATTERNS = {
    "country": r"^(?P<of>[^:]+?) is a city in (?:the )?(?P<is>.+?) with about",
    "inhabitants": r"(?:^|: )(?:The )?(?P<of>[^:]+?) is a (?:city in .+?|country) with about (?P<is>[\d,]+) inhabitants",
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
    known: ReadFacts = {}
    for line in passages:
        for relation, pattern in FACT_PATTERNS.items():
            for found in re.finditer(pattern, line):
                values = found["is"].split(", ") if relation == "borders" else [found["is"]]
                known.setdefault((relation, found["of"]), set()).update(values)
    return known


def solve(
    asked: list[str], path: list[str], known: ReadFacts
) -> tuple[set[str], tuple[str, str] | None]:
    """Return (answers, what is missing): answers once nothing is missing, else the next fact.

    A path is followed from relation to relation. Two paths compare what is asked: `more` takes the
    place with the most inhabitants, `both` what the borders of all places share.
    """
    relation = {"more": "inhabitants", "both": "borders"}.get(path[0])
    if relation is None:
        at = set(asked)
        for step in path:
            if missing := [place for place in sorted(at) if (step, place) not in known]:
                return set(), (step, missing[0])
            at = set().union(*(known[step, place] for place in at))
        return at, None
    if missing := [place for place in asked if (relation, place) not in known]:
        return set(), (relation, missing[0])
    found = [known[relation, place] for place in asked]
    if path == ["both"]:
        return set.intersection(*found), None
    numbers = {place: int(max(f).replace(",", "")) for place, f in zip(asked, found, strict=True)}
    return {place for place in asked if numbers[place] == max(numbers.values())}, None


def query(relation: str, place: str) -> str:
    """Return the solver's search query for a fact."""
    return f"{place} city" if relation == "country" else f"{relation} of {place}"
