"""Make TinyHop: a small random world, and questions that need one to five searches.

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
    """(entity, relation) -> values.

    `make_world` gives each one value; the list lets `solve` see it if not.
    """

    @property
    def size(self) -> int:
        return sum(len(names) for names in self.entities.values())

    def value(self, entity: str, relation: str) -> str:
        return self.facts[entity, relation][0]

    def mentions(self, entity: str) -> set[str]:
        """Return the names in the passage of `entity`, including its own."""
        names = {entity}
        for relation in RELATIONS:
            names.update(self.facts.get((entity, relation), ()))
        return names

    def passages(self) -> list[Passage]:
        """Write a passage per entity. Its unique name is title and id."""
        passages = []
        for kind, names in self.entities.items():
            passages += [Passage(name, name, self._text(kind, name)) for name in names]
        return passages

    def _text(self, kind: str, name: str) -> str:
        facts = {"x": name}
        for key, relation in RELATIONS.items():
            if relation.subject == kind:
                facts[key] = " and ".join(self.facts[name, key])
        return PASSAGES[kind].format_map(facts)


def make_world(rng: random.Random, entities: int, used_names: set[str]) -> World:
    """Make a world of `entities` entities with new names, and add these to `used_names`.

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
    names = iter(_make_names(rng, entities, used_names))
    world = World(entities={}, facts={})
    for kind, count in counts.items():
        world.entities[kind] = list(itertools.islice(names, count))
    for (entity, relation), value in _make_facts(rng, world.entities):
        world.facts[entity, relation] = [value]
    return world


def _make_facts(
    rng: random.Random, of: dict[str, list[str]]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield ((entity, relation), value) for each entity and each relation of its type."""
    persons = of["person"]
    cities = of["city"]
    companies = of["company"]
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
        # The first round gives each country its capital, which then lies in it.
        if i < len(of["country"]):
            yield (country, "capital"), city
    # Few people make many works. Otherwise two films would hardly ever share a director.
    founders = _sample_makers(rng, persons, len(companies))
    directors = _sample_makers(rng, persons, len(of["film"]))
    stars = _sample_makers(rng, persons, len(of["film"]))
    authors = _sample_makers(rng, persons, len(of["book"]))
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


def _sample_makers(rng: random.Random, persons: list[str], works: int) -> list[str]:
    """Choose one person per three works, and at least two, so that questions can compare."""
    return rng.sample(persons, max(2, works // 3))


def _make_names(rng: random.Random, count: int, used_names: set[str]) -> list[str]:
    """Make `count` new names of two syllables, or three when those are used up."""
    names: list[str] = []
    words = _ordinary_words()
    for tails in (1, 2):
        free = []
        # itertools.product(HEADS, TAILS): 84 heads x 42 tails = 3,528 names of two syllables.
        for syllables in itertools.product(HEADS, *[TAILS] * tails):
            word = "".join(syllables)
            name = word.capitalize()
            if word not in words and name not in used_names:
                free.append(name)
        names += rng.sample(free, min(len(free), count - len(names)))
        if len(names) == count:
            used_names.update(names)
            return names
    raise ConfigError(
        f"TinyHop has {len(names)} names left, and {count} more entities need one each; lower "
        "data.entities or data.cold_entities",
        code="impossible_world",
    )


def _ordinary_words() -> set[str]:
    """Collect the lower-case words of all templates: no name may look like one of them."""
    templates = [*PASSAGES.values(), *RELATIONS, *PASSAGES, "yes no"]
    for relation in RELATIONS.values():
        templates += [*relation.phrases, *relation.asks, *relation.same, *relation.which]
    return {word.strip("?,.{}").lower() for word in " ".join(templates).split()}


# ------------------------------------------------------------------------------------ the questions


@dataclass(frozen=True)
class Lookup:
    """One hop of the ideal agent.

    It searches `entity`, reads `relation` in its passage, and learns `value`.
    """

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
    """Relations on the chain, 1 to 5; yes-no and which compare two passages and count as 2."""
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
    """Return every answer that the facts of the world allow.

    The makers of questions know which answer they mean. This function does not: it follows all
    values, so a question with two right answers is seen and dropped.
    """

    def values(entity: str, relation: str) -> set[str]:
        return set(world.facts.get((entity, relation), ()))

    answers: set[str] = set()
    match form:
        case Chain(start, relations):
            answers = {start}
            for relation in relations:
                next_answers: set[str] = set()
                for entity in answers:
                    next_answers |= values(entity, relation)
                answers = next_answers
        case Same(relation, a, b):
            for x, y in itertools.product(values(a, relation), values(b, relation)):
                answers.add("yes" if x == y else "no")
        case Which(relation, value, a, b):
            for candidate in (a, b):
                if value in values(candidate, relation):
                    answers.add(candidate)
    return answers


def make_questions(
    world: World, rng: random.Random, count: int, mix: dict[str, float]
) -> list[Question]:
    """Make `count` distinct questions in random order, with the kinds in proportions `mix`.

    Each kind goes through all its relations in turn, so none dominates before another is used up.
    Raises ConfigError for an impossible mix, or if the world is too small for so many different
    questions.
    """
    questions: list[Question] = []
    for kind, number in make_shares(count, mix).items():
        questions_of_kind = list(itertools.islice(KINDS[kind](world, rng), number))
        if len(questions_of_kind) < number:
            raise ConfigError(
                f"a world of {world.size} entities has only {len(questions_of_kind)} different "
                f"{kind} questions, not {number}; raise data.entities (data.cold_entities for the "
                f"cold start), ask for fewer questions or give {kind} a smaller share in data.mix",
                code="too_few_questions",
            )
        questions += questions_of_kind
    rng.shuffle(questions)
    return questions


def make_shares(count: int, mix: dict[str, float]) -> dict[str, int]:
    """Split `count` by the proportions of `mix` into whole numbers (largest remainders)."""
    for kind in mix:
        if kind not in KINDS:
            raise ConfigError.unknown("data.mix", kind, KINDS)
    total = sum(mix.values())
    numbers = {}
    remainders = {}
    for kind in KINDS:
        exact = count * mix.get(kind, 0) / total
        numbers[kind] = int(exact)
        remainders[kind] = exact - int(exact)
    # `sorted` keeps the order of equal remainders, also when reversed: the same seed, the same mix.
    largest_first = sorted(KINDS, key=remainders.__getitem__, reverse=True)
    for kind in largest_first[: count - sum(numbers.values())]:
        numbers[kind] += 1
    return numbers


def _bridges(hops: int) -> Callable[[World, random.Random], Iterator[Question]]:
    """Yield chains of `hops` relations, balanced by the last relation, then by the others."""

    def fits(relations: tuple[str, ...]) -> bool:
        # The founder of a company is a person: "spouse" may follow, "capital" may not.
        pairs = itertools.pairwise(relations)
        return all(RELATIONS[first].value == RELATIONS[second].subject for first, second in pairs)

    def stream(world: World, rng: random.Random) -> Iterator[Question]:
        every = itertools.product(RELATIONS, repeat=hops)
        patterns = _shuffle((pattern for pattern in every if fits(pattern)), rng)
        groups = []
        for last in _shuffle(RELATIONS, rng):
            chains = [_chains(world, rng, pattern) for pattern in patterns if pattern[-1] == last]
            groups.append(_take_turns(chains))
        return _take_turns(groups)

    return stream


def _when_asked(
    stream: Callable[[World, random.Random], Iterator[Question]],
) -> Callable[[World, random.Random], Iterator[Question]]:
    """Draw nothing until a question is asked for: mixes without this kind keep their questions."""

    def lazily(world: World, rng: random.Random) -> Iterator[Question]:
        yield from stream(world, rng)

    return lazily


def _chains(world: World, rng: random.Random, relations: tuple[str, ...]) -> Iterator[Question]:
    """Yield all questions of one pattern of relations, from each start that needs every hop."""
    for start in _shuffle(world.entities[RELATIONS[relations[0]].subject], rng):
        lookups: list[Lookup] = []
        path = [start]
        for relation in relations:
            lookup = _look_up(world, path[-1], relation)
            lookups.append(lookup)
            path.append(lookup.value)
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
    if len(set(path)) < len(path):
        return False
    # The next entity, i + 1, is what the hop finds. From i + 2 on, a passage tells too much.
    return all(world.mentions(entity).isdisjoint(path[i + 2 :]) for i, entity in enumerate(path))


def _yes_no(world: World, rng: random.Random) -> Iterator[Question]:
    """Yield same-or-not questions, yes and no in turn, so that a constant answer gains nothing."""
    relations = _shuffle((r for r in RELATIONS if RELATIONS[r].same), rng)
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
    relations = _shuffle((r for r in RELATIONS if RELATIONS[r].which), rng)
    return _take_turns(_one_of_two(world, rng, r) for r in relations)


def _one_of_two(world: World, rng: random.Random, relation: str) -> Iterator[Question]:
    for right, wrong in _unequal_pairs(world, rng, relation):
        value = world.value(right, relation)
        a, b = rng.sample((right, wrong), 2)
        if solve(world, Which(relation, value, a, b)) == {right}:
            text = rng.choice(RELATIONS[relation].which).format(v=value, a=a, b=b)
            lookups = [_look_up(world, a, relation)]
            if a != right:
                lookups.append(_look_up(world, b, relation))
            yield Question(text, right, "which", 2, lookups)


KINDS: dict[str, Callable[[World, random.Random], Iterator[Question]]] = {
    "1-hop": _bridges(1),
    "2-hop": _bridges(2),
    "3-hop": _bridges(3),
    "yes-no": _yes_no,
    "which": _which,
    # In no preset: how far does an agent come that was trained on fewer?
    "4-hop": _when_asked(_bridges(4)),
    "5-hop": _when_asked(_bridges(5)),
}
"""Kind of question -> an iterator over all different ones that a world has.

Lazy: only those asked for are made.
"""


def _look_up(world: World, entity: str, relation: str) -> Lookup:
    return Lookup(entity, relation, world.value(entity, relation), passage_id=entity)


def _equal_pairs(world: World, rng: random.Random, relation: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of entities that share their value, values in turn."""
    sharing: dict[str, list[str]] = {}
    for entity in world.entities[RELATIONS[relation].subject]:
        sharing.setdefault(world.value(entity, relation), []).append(entity)
    return _take_turns(_pairs(group, rng) for group in _shuffle(sharing.values(), rng))


def _unequal_pairs(world: World, rng: random.Random, relation: str) -> Iterator[tuple[str, str]]:
    pairs = _pairs(world.entities[RELATIONS[relation].subject], rng)
    return ((a, b) for a, b in pairs if world.value(a, relation) != world.value(b, relation))


def _pairs(names: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield every unordered pair once, lazily: by distance 1, 2, ... on a shuffled ring."""
    ring = _shuffle(names, rng)
    for distance in range(1, len(ring) // 2 + 1):
        starts = len(ring)
        if 2 * distance == len(ring):
            # Opposite places on an even ring meet from both sides: half a turn is all of them.
            starts = distance
        for i in range(starts):
            yield ring[i], ring[(i + distance) % len(ring)]


def _take_turns(streams: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield one value of each stream in turn, until all are exhausted."""
    streams = list(streams)
    while streams:
        still_running = []
        for stream in streams:
            for value in itertools.islice(stream, 1):
                yield value
                still_running.append(stream)
        streams = still_running


def _shuffle(values: Iterable[T], rng: random.Random) -> list[T]:
    values = list(values)
    return rng.sample(values, len(values))
