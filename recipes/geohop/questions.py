"""Make GeoHop's questions, with the passages that answer them.

    What is the capital of Peru?                                       one hop
    Which currency is used in the country where Arequipa lies?         two hops: the city, then its country
    Which country has borders with both Ghana and Mali?                two hops: what two passages share
    Which city has more inhabitants, Arequipa or Trujillo?             comparison

Every country belongs to one split, with all of its cities. A question names, passes through and
leads to places of its own split only; currencies and languages may occur in several. Within each
kind answers take turns, so that no answer is right more often than others while there are others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agent_r1_recipes.geohop.facts import (
    Country,
    Place,
    border_passage,
    city_passage,
    country_passage,
    geography,
)
from agent_r1_recipes.geohop.solver import read_facts, solve

KINDS = {
    "1-hop country": 0.1, "1-hop capital": 0.1, "1-hop currency": 0.1, "1-hop language": 0.05,
    "2-hop capital": 0.15, "2-hop currency": 0.15, "2-hop language": 0.15, "2-hop neighbour": 0.05,
    "compare cities": 0.1, "compare countries": 0.05,
}  # fmt: skip
"""Kind of question -> share of it; where a kind runs out, the others take its place."""
SPLIT_SHARES = {"train": (0.0, 0.55), "val": (0.55, 0.65), "test": (0.65, 1.0)}
"""Which of the countries, in one order for all seeds."""
PHRASINGS = {
    "country": ("In which country is {0}?", "Which country does the city of {0} belong to?"),
    "capital": ("What is the capital of {0}?", "Which city is the capital of {0}?"),
    "currency": ("What is the currency of {0}?", "Which currency is used in {0}?"),
    "official language": (
        "What is the official language of {0}?",
        "Which language is official in {0}?",
    ),
    "both": (
        "Which country has borders with both {0} and {1}?",
        "{0} and {1} are both neighbours of which country?",
    ),
    "cities": (
        "Which city has more inhabitants, {0} or {1}?",
        "Do more people live in {0} or in {1}?",
    ),
    "countries": (
        "Which country has more inhabitants, {0} or {1}?",
        "Do more people live in {0} or in {1}?",
    ),
}
THROUGH = "the country where {0} lies"


@dataclass(frozen=True)
class Hop:
    """A question without its words."""

    named: tuple[str, ...]
    """What it names, as in a sentence."""
    asked: tuple[str, ...]
    path: tuple[str, ...]
    answer: Place
    passages: tuple[tuple[str, str], ...]
    """(title, text) of all that it takes."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """`count` questions of a split, or as many as there are."""
    kinds = {
        kind: _by_turns(_asked(kind, hops, rng), rng) for kind, hops in hops_of(split, rng).items()
    }
    shares = dict(KINDS)
    while count and shares:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if (question := next(kinds[kind], None)) is None:
            del shares[kind]
            continue
        yield question
        count -= 1


def countries_of(split: str) -> list[Country]:
    """List the countries that a split asks about."""
    found = list(geography().countries.values())
    random.Random(3).shuffle(found)
    first, last = (round(share * len(found)) for share in SPLIT_SHARES[split])
    return found[first:last]


def hops_of(split: str, rng: random.Random) -> dict[str, list[Hop]]:
    """List all questions of a split by kind, with a sample of the many comparisons."""
    countries = countries_of(split)
    cities = {city: c for c in countries for city in geography().cities[c.code]}
    found: dict[str, list[Hop]] = {kind: [] for kind in KINDS}
    for country in countries:
        for word in ("capital", "currency", "language"):
            what, relation = (
                getattr(country, word),
                "official language" if word == "language" else word,
            )
            if what is None:
                continue
            page = country_passage(country)
            found[f"1-hop {word}"].append(
                Hop((country.named,), (country.name,), (relation,), what, (page,))
            )
            for city in geography().cities[country.code]:
                if city.name != what.name:
                    pages = (city_passage(city, country), page)
                    through = (THROUGH.format(city.name),)
                    found[f"2-hop {word}"].append(
                        Hop(through, (city.name,), ("country", relation), what, pages)
                    )
    for city, country in cities.items():
        found["1-hop country"].append(
            Hop((city.name,), (city.name,), ("country",), country, (city_passage(city, country),))
        )
    found["2-hop neighbour"] = list(_neighbours(countries))
    for kind, pages in (
        ("cities", {city: city_passage(city, country) for city, country in cities.items()}),
        ("countries", {country: country_passage(country) for country in countries}),
    ):
        found[f"compare {kind}"] = list(_pairs(pages, rng))
    return found


def _neighbours(countries: list[Country]) -> Iterator[Hop]:
    """Ask for the only shared neighbour of two countries, within the split."""
    by_name = {country.name: country for country in countries}
    for i, a in enumerate(countries):
        for b in countries[i + 1 :]:
            shared = set(a.neighbours) & set(b.neighbours)
            if len(shared) == 1 and (answer := by_name.get(*shared)):
                pages = (border_passage(a), border_passage(b))
                yield Hop((a.named, b.named), (a.name, b.name), ("both",), answer, pages)


def _pairs(pages: dict[Any, tuple[str, str]], rng: random.Random) -> Iterator[Hop]:
    """Four rounds, in each of which every place meets another, no two twice. Only what is plain is
    asked."""
    places, met = list(pages), set()
    for _ in range(4):
        rng.shuffle(places)
        for a, b in zip(places[::2], places[1::2], strict=False):
            few, many = sorted((a, b), key=lambda place: place.inhabitants)
            if many.inhabitants >= 2 * few.inhabitants > 0 and (few, many) not in met:
                met.add((few, many))
                named = tuple(getattr(place, "named", place.name) for place in (a, b))
                yield Hop(named, (a.name, b.name), ("more",), many, (pages[a], pages[b]))


def _asked(kind: str, hops: list[Hop], rng: random.Random) -> list[dict[str, Any]]:
    """Those that the passages alone decide, each in words of one of its forms."""
    found = []
    for hop in hops:
        alone, missing = solve(
            list(hop.asked), list(hop.path), read_facts(text for _, text in hop.passages)
        )
        if missing is None and alone == {hop.answer.name}:
            form = rng.choice(PHRASINGS[kind.split()[1] if hop.path == ("more",) else hop.path[-1]])
            text = form.format(*hop.named)
            found.append(
                {
                    "question": text[0].upper() + text[1:],
                    "answer": hop.answer.answers,
                    "kind": kind,
                    "supporting": [title for title, _ in hop.passages],
                    "metadata": {"asked": list(hop.asked), "path": list(hop.path)},
                    "passages": [{"title": title, "text": text} for title, text in hop.passages],
                }
            )
    return found


def _by_turns(found: list[dict[str, Any]], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield a question of each answer, then a second of each, and so on."""
    by_answer: dict[str, list[dict[str, Any]]] = {}
    rng.shuffle(found)
    for question in found:
        by_answer.setdefault(question["answer"][0], []).append(question)
    while by_answer:
        for answer in rng.sample(list(by_answer), len(by_answer)):
            yield by_answer[answer].pop()
            if not by_answer[answer]:
                del by_answer[answer]
