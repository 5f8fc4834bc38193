"""Make TinyHop: a small random world, and questions that need one, two or three searches.

In: a random generator and sizes. Out: a `World` (its passages are the corpus) and `Question`s, each
with the lookups of an ideal agent. Its words are in `tinyhop_words.py`. Next: `build.py` writes
both to disk.

A generated world cannot be known by heart: each split has its own world, and no name occurs in two.
No training question and no demonstration is about the test world. Its passages are in the same
index, and training reads some of them next to the right ones (docs/laptop.md, "Data"). Passages
have few words, because on a laptop every token costs time in each episode.

A question is first a *logical form* (`Chain`, `Same`, `Which`) and then words. `solve` evaluates
the form over all facts of the world, independently of the walk that made it. A question stays only
if it has exactly one answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from agent_r1 import ConfigError, Passage
from agent_r1_recipes.laptop.tinyhop_words import HEADS, PASSAGES, RELATIONS, TAILS

T = TypeVar("T")

SHARES = {"city": 0.18, "country": 0.06, "company": 0.14, "film": 0.11, "book": 0.11}
"""Part of a world's entities that is of each type; the rest, two in five, are persons."""

MIN_ENTITIES = 20

# ---------------------------------------------------------------------------------------- the world


@dataclass
class World:
    """Hold entities and the facts about them."""

    entities: dict[str, list[str]]
    """Type -> names."""
    facts: dict[tuple[str, str], list[str]]
    """(entity, relation) -> values. `make_world` gives each one value; the list lets `solve` see it
    if not."""

    @property
    def size(self) -> int:
        return sum(len(names) for names in self.entities.values())

    def value(self, entity: str, relation: str) -> str:
        return self.facts[entity, relation][0]

    def mentions(self, entity: str) -> set[str]:
        """Return the names in the passage of `entity`, including its own."""
        return {entity}.union(*(self.facts.get((entity, relation), ()) for relation in RELATIONS))

    def passages(self) -> list[Passage]:
        """Write a passage per entity. Its unique name is title and id."""
        return [
            Passage(name, name, self._text(kind, name))
            for kind, names in self.entities.items()
            for name in names
        ]

    def _text(self, kind: str, name: str) -> str:
        facts = {
            r: " and ".join(self.facts[name, r])
            for r, relation in RELATIONS.items()
            if relation.subject == kind
        }
        return PASSAGES[kind].format(x=name, **facts)


def make_world(rng: random.Random, entities: int, taken: set[str]) -> World:
    """Make a world of `entities` entities with new names, and add these to `taken`.

    Raises ConfigError for fewer than MIN_ENTITIES, or more than there are names left.
    """
    if entities < MIN_ENTITIES:
        raise ConfigError(
            f"a TinyHop world of {entities} entities is too small; set data.entities to "
            f"{MIN_ENTITIES} or more",
            code="impossible_world",
        )
    counts = {kind: max(2, round(share * entities)) for kind, share in SHARES.items()}
    counts["person"] = entities - sum(counts.values())
    if counts["person"] % 2:  # everyone is married, so that every passage has all its facts
        counts["person"] -= 1
        counts["film"] += 1
    names = iter(_make_names(rng, entities, taken))
    world = World(
        {kind: list(itertools.islice(names, count)) for kind, count in counts.items()}, {}
    )
    for (entity, relation), value in _make_facts(rng, world.entities):
        world.facts[entity, relation] = [value]
    return world


def _make_facts(
    rng: random.Random, of: dict[str, list[str]]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((entity, relation), value) for each entity and each relation of its type."""
    persons, cities, companies = of["person"], of["city"], of["company"]
    couples = rng.sample(persons, len(persons))
    for a, b in zip(couples[::2], couples[1::2], strict=True):
        yield (a, "spouse"), b
        yield (b, "spouse"), a
    for person in persons:
        yield (person, "birthplace"), rng.choice(cities)
        yield (person, "employer"), rng.choice(companies)
    mayors = rng.sample(persons, len(cities))
    for i, (city, mayor) in enumerate(zip(cities, mayors, strict=True)):
        country = of["country"][i % len(of["country"])]
        yield (city, "country"), country
        yield (city, "mayor"), mayor
        if i < len(
            of["country"]
        ):  # the first round gives each country its capital, which then lies in it
            yield (country, "capital"), city
    # Few people make many works. Otherwise two films would hardly ever share a director.
    founders, directors, stars, authors = (
        rng.sample(persons, max(2, len(of[kind]) // 3))
        for kind in ("company", "film", "film", "book")
    )
    for company in companies:
        yield (company, "founder"), rng.choice(founders)
        yield (company, "headquarters"), rng.choice(cities)
    for film in of["film"]:
        director = rng.choice(directors)
        yield (film, "director"), director
        yield (film, "star"), rng.choice([star for star in stars if star != director])
    for book in of["book"]:
        yield (book, "author"), rng.choice(authors)
        yield (book, "publisher"), rng.choice(companies)


def _make_names(rng: random.Random, count: int, taken: set[str]) -> list[str]:
    """Make `count` new names of two syllables, or three when those are used up."""
    names: list[str] = []
    words = _ordinary_words()
    for tails in (1, 2):
        every = ("".join(parts) for parts in itertools.product(HEADS, *[TAILS] * tails))
        free = [
            name.capitalize()
            for name in every
            if name not in words and name.capitalize() not in taken
        ]
        names += rng.sample(free, min(len(free), count - len(names)))
        if len(names) == count:
            taken.update(names)
            return names
    raise ConfigError(
        f"TinyHop has {len(names)} names left, and {count} more entities need one each; lower "
        "data.entities or data.cold_entities",
        code="impossible_world",
    )


def _ordinary_words() -> set[str]:
    """Collect the lower-case words of all templates: no name may look like one of them."""
    templates = [*PASSAGES.values(), *RELATIONS, *PASSAGES, "yes no"]
    templates += [
        text for r in RELATIONS.values() for text in (*r.phrases, *r.asks, *r.same, *r.which)
    ]
    return {word.strip("?,.{}").lower() for text in templates for word in text.split()}


# ------------------------------------------------------------------------------------ the questions


@dataclass(frozen=True)
class Lookup:
    """One hop of the ideal agent: search `entity`, read `relation` in its passage, learn
    `value`."""

    entity: str
    relation: str
    value: str
    passage_id: str


@dataclass(frozen=True)
class Question:
    """Hold a question with its only answer (a name, yes or no) and shortest solution."""

    text: str
    answer: str
    kind: str
    """One of KINDS."""
    hops: int
    """Relations on the chain, 1 to 3; yes-no and which compare two passages and count as 2."""
    lookups: list[Lookup]
    """In order. A which-question whose first candidate is right needs only that one."""


@dataclass(frozen=True)
class Chain:
    """Ask for the value of a chain of relations that starts at `start`."""

    start: str
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Same:
    """Ask whether `a` and `b` have the same value of `relation`."""

    relation: str
    a: str
    b: str


@dataclass(frozen=True)
class Which:
    """Ask which of `a` and `b` has `value` as its `relation`."""

    relation: str
    value: str
    a: str
    b: str


def solve(world: World, form: Chain | Same | Which) -> set[str]:
    """Return every answer that the facts of the world allow."""

    def values(entity: str, relation: str) -> set[str]:
        return set(world.facts.get((entity, relation), ()))

    match form:
        case Chain(start, relations):
            reached = {start}
            for relation in relations:
                reached = set().union(*(values(entity, relation) for entity in reached))
            return reached
        case Same(relation, a, b):
            return {
                "yes" if x == y else "no" for x in values(a, relation) for y in values(b, relation)
            }
        case Which(relation, value, a, b):
            return {candidate for candidate in (a, b) if value in values(candidate, relation)}


def make_questions(
    world: World, rng: random.Random, count: int, mix: dict[str, float]
) -> list[Question]:
    """Make `count` distinct questions in random order, with the kinds in proportions `mix`.

    Each kind goes through all its relations in turn, so none dominates before another is used up.
    Raises ConfigError for an impossible mix, or if the world is too small for so many different
    questions.
    """
    questions: list[Question] = []
    for kind, wanted in _split(count, mix).items():
        found = list(itertools.islice(KINDS[kind](world, rng), wanted))
        if len(found) < wanted:
            raise ConfigError(
                f"a world of {world.size} entities has only {len(found)} different {kind} "
                f"questions, not {wanted}; "
                "raise data.entities (data.cold_entities for the cold start), ask for fewer "
                f"questions or give {kind} a "
                "smaller share in data.mix",
                code="too_few_questions",
            )
        questions += found
    rng.shuffle(questions)
    return questions


def _split(count: int, mix: dict[str, float]) -> dict[str, int]:
    """Split `count` by the proportions of `mix` into whole numbers (largest remainders)."""
    for kind in mix:
        if kind not in KINDS:
            raise ConfigError.unknown("data.mix", kind, KINDS)
    total = sum(mix.values())
    exact = {kind: count * mix.get(kind, 0) / total for kind in KINDS}
    whole = {kind: int(share) for kind, share in exact.items()}
    by_remainder = sorted(KINDS, key=lambda kind: whole[kind] - exact[kind])
    for kind in by_remainder[: count - sum(whole.values())]:
        whole[kind] += 1
    return whole


def _bridges(hops: int) -> Callable[[World, random.Random], Iterator[Question]]:
    """Yield chains of `hops` relations, balanced by the last relation, then by the others."""

    def fits(relations: tuple[str, ...]) -> bool:
        return all(
            RELATIONS[r].value == RELATIONS[s].subject for r, s in itertools.pairwise(relations)
        )

    def stream(world: World, rng: random.Random) -> Iterator[Question]:
        patterns = _shuffled(filter(fits, itertools.product(RELATIONS, repeat=hops)), rng)
        by_last = [[p for p in patterns if p[-1] == last] for last in _shuffled(RELATIONS, rng)]
        return _take_turns(_take_turns(_chains(world, rng, p) for p in group) for group in by_last)

    return stream


def _chains(world: World, rng: random.Random, relations: tuple[str, ...]) -> Iterator[Question]:
    """Yield all questions of one pattern of relations, from each start that needs every hop."""
    for start in _shuffled(world.entities[RELATIONS[relations[0]].subject], rng):
        lookups: list[Lookup] = []
        for relation in relations:
            lookups.append(_look_up(world, lookups[-1].value if lookups else start, relation))
        path = [start, *(lookup.value for lookup in lookups)]
        if solve(world, Chain(start, relations)) != {path[-1]} or not _needs_every_hop(world, path):
            continue
        phrase = start
        for relation in relations[:-1]:
            phrase = rng.choice(RELATIONS[relation].phrases).format(x=phrase)
        text = rng.choice(RELATIONS[relations[-1]].asks).format(x=phrase)
        yield Question(text, path[-1], f"{len(relations)}-hop", len(relations), lookups)


def _needs_every_hop(world: World, path: list[str]) -> bool:
    """Return False if an entity occurs twice, or a passage names a later entity early.

    Such a question ("the country of the capital of X") teaches an agent to stop searching too
    early.
    """
    return len(set(path)) == len(path) and not any(
        later in world.mentions(entity) for i, entity in enumerate(path) for later in path[i + 2 :]
    )


def _yes_no(world: World, rng: random.Random) -> Iterator[Question]:
    """Yield same-or-not questions, yes and no in turn, so that a constant answer gains nothing."""
    relations = _shuffled((r for r in RELATIONS if RELATIONS[r].same), rng)
    yes = _take_turns(_same(world, rng, r, _equal_pairs(world, rng, r), "yes") for r in relations)
    no = _take_turns(_same(world, rng, r, _unequal_pairs(world, rng, r), "no") for r in relations)
    return itertools.chain.from_iterable(zip(yes, no, strict=False))


def _same(
    world: World, rng: random.Random, relation: str, pairs: Iterable[tuple[str, str]], answer: str
) -> Iterator[Question]:
    for a, b in pairs:
        if solve(world, Same(relation, a, b)) == {answer}:
            text = rng.choice(RELATIONS[relation].same).format(a=a, b=b)
            yield Question(
                text,
                answer,
                "yes-no",
                2,
                [_look_up(world, a, relation), _look_up(world, b, relation)],
            )


def _which(world: World, rng: random.Random) -> Iterator[Question]:
    """Yield which-of-two questions. The right one is named first in half of them, at random."""
    relations = _shuffled((r for r in RELATIONS if RELATIONS[r].which), rng)
    return _take_turns(_one_of_two(world, rng, r) for r in relations)


def _one_of_two(world: World, rng: random.Random, relation: str) -> Iterator[Question]:
    for right, wrong in _unequal_pairs(world, rng, relation):
        value = world.value(right, relation)
        a, b = rng.sample((right, wrong), 2)
        if solve(world, Which(relation, value, a, b)) == {right}:
            text = rng.choice(RELATIONS[relation].which).format(v=value, a=a, b=b)
            read = [a] if a == right else [a, b]
            yield Question(
                text, right, "which", 2, [_look_up(world, entity, relation) for entity in read]
            )


KINDS: dict[str, Callable[[World, random.Random], Iterator[Question]]] = {
    "1-hop": _bridges(1),
    "2-hop": _bridges(2),
    "3-hop": _bridges(3),
    "yes-no": _yes_no,
    "which": _which,
}
"""Kind of question -> an iterator over all different ones that a world has. Lazy: only those asked
for are made."""


def _look_up(world: World, entity: str, relation: str) -> Lookup:
    return Lookup(entity, relation, world.value(entity, relation), passage_id=entity)


def _equal_pairs(world: World, rng: random.Random, relation: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of entities that share their value, values in turn."""
    sharing: dict[str, list[str]] = {}
    for entity in world.entities[RELATIONS[relation].subject]:
        sharing.setdefault(world.value(entity, relation), []).append(entity)
    return _take_turns(_pairs(group, rng) for group in _shuffled(sharing.values(), rng))


def _unequal_pairs(world: World, rng: random.Random, relation: str) -> Iterator[tuple[str, str]]:
    pairs = _pairs(world.entities[RELATIONS[relation].subject], rng)
    return ((a, b) for a, b in pairs if world.value(a, relation) != world.value(b, relation))


def _pairs(names: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield every unordered pair once, lazily: by distance 1, 2, ... on a shuffled ring."""
    ring = _shuffled(names, rng)
    for distance in range(1, len(ring) // 2 + 1):
        # Opposite places on an even ring meet from both sides: half a turn is all of them.
        for i in range(distance if 2 * distance == len(ring) else len(ring)):
            yield ring[i], ring[(i + distance) % len(ring)]


def _take_turns(streams: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield one item of each stream in turn, until all are exhausted."""
    streams = list(streams)
    while streams:
        still_running = []
        for stream in streams:
            for item in itertools.islice(stream, 1):
                yield item
                still_running.append(stream)
        streams = still_running


def _shuffled(items: Iterable[T], rng: random.Random) -> list[T]:
    items = list(items)
    return rng.sample(items, len(items))
