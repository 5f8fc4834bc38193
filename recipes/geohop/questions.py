"""Make GeoHop's questions, with the passages that answer them.

    What is the capital of Peru?                                       one hop
    Which currency is used in the country where Arequipa lies?         two hops: city, country
    Which country has borders with both Ghana and Mali?                two hops: two passages
    Which city has more inhabitants, Arequipa or Trujillo?             comparison

Every country belongs to one split, with all of its cities. A question names, passes through and
leads to places of its own split only; currencies and languages may occur in several. Within each
kind answers take turns, so that no answer is right more often than others while there are others.
`questions_with_reading` adds open-book questions, whose passages stand above the question. Read
next: solver.py finds the answers in passages, and demonstrator.py plays the questions with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
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
TRAINING_KINDS = {
    "1-hop country": 0.08, "1-hop capital": 0.03, "1-hop currency": 0.03, "1-hop language": 0.03,
    "2-hop capital": 0.08, "2-hop currency": 0.08, "2-hop language": 0.08, "2-hop neighbour": 0.06,
    "compare cities": 0.06, "compare countries": 0.04,
    "read cities": 0.19, "read countries": 0.15, "read neighbours": 0.09,
}  # fmt: skip
"""The training split's shares in `questions_with_reading`."""
READING = {
    "read cities": "compare cities",
    "read countries": "compare countries",
    "read neighbours": "2-hop neighbour",
}
"""Kind of open-book question -> kind of question with the same words and answer."""
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
    """Hold a question without its words."""

    phrases: tuple[str, ...]
    """What it names, as in a sentence: "the Philippines", "the country where Arequipa lies"."""
    asked: tuple[str, ...]
    """The same places as keys of the solver: "Philippines", "Arequipa"."""
    path: tuple[str, ...]
    """Relations from `asked` to the answer."""
    answer: Place
    passages: tuple[tuple[str, str], ...]
    """(title, text) of all passages that it takes."""


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` questions of a split, or as many as there are."""
    yield from _mix(_streams(hops_of(split, rng), rng), KINDS, count, rng)


def questions_with_reading(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the same for val and test, and for training open-book questions, too.

    There the passages stand above the question, and there is no tool. To choose the larger of two
    numbers takes a pretrained model of 135 M parameters a few hundred examples. An open-book one
    has 110 to 140 tokens, an episode with two searches about three times as many. So the hard part
    is learned where it is cheap.
    """
    streams = _streams(hops_of(split, rng), rng)
    if split != "train":
        yield from _mix(streams, KINDS, count, rng)
        return
    hops = hops_of(split, rng)  # again, because it samples other pairs of cities
    for reading, kind in READING.items():
        questions = []
        for question in _write_questions(kind, hops[kind], rng):
            questions.append(_open_book(question, reading, rng))
        streams[reading] = _take_answers_in_turn(questions, rng)
    yield from _mix(streams, TRAINING_KINDS, count, rng)


def _streams(
    hops_by_kind: dict[str, list[Hop]], rng: random.Random
) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the questions of each kind, those with different answers in turn."""
    streams = {}
    for kind, hops in hops_by_kind.items():
        streams[kind] = _take_answers_in_turn(_write_questions(kind, hops, rng), rng)
    return streams


def _open_book(question: dict[str, Any], kind: str, rng: random.Random) -> dict[str, Any]:
    """Put the passages above the question, in any order, and take the tools away."""
    texts = [passage["text"] for passage in question["passages"]]
    rng.shuffle(texts)
    return question | {"kind": kind, "tools": [], "context": "\n".join(texts)}


def _mix(
    streams: dict[str, Iterator[dict[str, Any]]],
    kinds: dict[str, float],
    count: int,
    rng: random.Random,
) -> Iterator[dict[str, Any]]:
    """Take `count` questions, each of a random kind, until all streams are empty."""
    shares = dict(kinds)
    while count and shares:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        question = next(streams[kind], None)
        if question is None:
            del shares[kind]
            continue
        yield question
        count -= 1


def countries_of(split: str) -> list[Country]:
    """List the countries that a split asks about."""
    countries = list(geography().countries.values())
    random.Random(3).shuffle(countries)
    start, end = SPLIT_SHARES[split]
    return countries[round(start * len(countries)) : round(end * len(countries))]


def hops_of(split: str, rng: random.Random) -> dict[str, list[Hop]]:
    """List all questions of a split by kind, with a sample of the many comparisons."""
    countries = countries_of(split)
    hops: dict[str, list[Hop]] = {kind: [] for kind in KINDS}
    city_pages: dict[Place, tuple[str, str]] = {}
    for country in countries:
        for word in ("capital", "currency", "language"):
            answer = getattr(country, word)
            if answer is None:  # disputed or ambiguous: `facts.py` leaves it out
                continue
            relation = "official language" if word == "language" else word
            page = country_passage(country)
            hops[f"1-hop {word}"].append(
                Hop((country.phrase,), (country.name,), (relation,), answer, (page,))
            )
            for city in geography().cities[country.code]:
                # Not "What is the capital of the country where Lima lies?": the question has the
                # answer in it.
                if city.name != answer.name:
                    pages = (city_passage(city, country), page)
                    phrase = THROUGH.format(city.name)
                    hops[f"2-hop {word}"].append(
                        Hop((phrase,), (city.name,), ("country", relation), answer, pages)
                    )
        for city in geography().cities[country.code]:
            page = city_passage(city, country)
            city_pages[city] = page
            hops["1-hop country"].append(
                Hop((city.name,), (city.name,), ("country",), country, (page,))
            )
    hops["2-hop neighbour"] = list(_neighbours(countries))
    hops["compare cities"] = list(_pairs(city_pages, rng))
    country_pages = {country: country_passage(country) for country in countries}
    hops["compare countries"] = list(_pairs(country_pages, rng))
    return hops


def _neighbours(countries: list[Country]) -> Iterator[Hop]:
    """Ask for the only shared neighbour of two countries, within the split."""
    by_name = {country.name: country for country in countries}
    for i, a in enumerate(countries):
        for b in countries[i + 1 :]:
            common = set(a.neighbours) & set(b.neighbours)
            if len(common) != 1:
                continue
            answer = by_name.get(common.pop())  # None: a country of another split
            if answer:
                pages = (border_passage(a), border_passage(b))
                yield Hop((a.phrase, b.phrase), (a.name, b.name), ("both",), answer, pages)


def _pairs(pages: dict[Any, tuple[str, str]], rng: random.Random) -> Iterator[Hop]:
    """Yield comparisons from four rounds; no two places meet twice.

    In a round every place meets another one. One of the two has at least twice the inhabitants: the
    numbers are of various years.
    """
    places = list(pages)
    pairs = set()
    for _ in range(4):
        rng.shuffle(places)
        for a, b in zip(places[::2], places[1::2], strict=False):
            few, many = sorted((a, b), key=attrgetter("inhabitants"))
            if many.inhabitants >= 2 * few.inhabitants > 0 and (few, many) not in pairs:
                pairs.add((few, many))
                yield Hop(
                    (a.phrase, b.phrase), (a.name, b.name), ("more",), many, (pages[a], pages[b])
                )


def _write_questions(kind: str, hops: list[Hop], rng: random.Random) -> list[dict[str, Any]]:
    """Write those that the passages alone decide, each in words of one of its forms."""
    questions = []
    for hop in hops:
        passages = []
        for title, text in hop.passages:
            passages.append({"title": title, "text": text})
        facts = read_facts(passage["text"] for passage in passages)
        answers, missing_fact = solve(list(hop.asked), list(hop.path), facts)
        if missing_fact is not None or answers != {hop.answer.name}:
            continue
        form_key = hop.path[-1]
        if form_key == "more":
            form_key = kind.split()[1]  # "compare cities" -> "cities"
        question = rng.choice(PHRASINGS[form_key]).format(*hop.phrases)
        questions.append(
            {
                "question": question[0].upper() + question[1:],
                "answer": hop.answer.answers,
                "kind": kind,
                "supporting": [passage["title"] for passage in passages],
                "metadata": {"asked": list(hop.asked), "path": list(hop.path)},
                "passages": passages,
            }
        )
    return questions


def _take_answers_in_turn(
    questions: list[dict[str, Any]], rng: random.Random
) -> Iterator[dict[str, Any]]:
    """Yield a question of each answer, then a second of each, and so on."""
    by_answer: dict[str, list[dict[str, Any]]] = {}
    rng.shuffle(questions)
    for question in questions:
        by_answer.setdefault(question["answer"][0], []).append(question)
    while by_answer:
        for answer in rng.sample(list(by_answer), len(by_answer)):
            yield by_answer[answer].pop()
            if not by_answer[answer]:
                del by_answer[answer]
