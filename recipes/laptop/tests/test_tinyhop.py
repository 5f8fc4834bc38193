"""TinyHop (room 1): the world is sound, each question has exactly one answer, and its files are
what they claim to be.

The answers are checked by a second solver that shares nothing with the first: it reads the
*published* text, passages and questions, with patterns of its own, and tries every fact.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from building import build_data, manifest_of, passages_in, rows_in
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1 import ConfigError, Passage, load_config
from agent_r1_recipes.laptop import tinyhop
from agent_r1_recipes.laptop.settings import KIND_NAMES, TinyHopSettings
from agent_r1_recipes.laptop.tinyhop import (
    KINDS,
    RELATIONS,
    Chain,
    Same,
    Which,
    World,
    make_questions,
    make_world,
    solve,
)
from agent_r1_recipes.laptop.tinyhop_source import TINYHOP, _world_size

FILES = (*(f"{split}.parquet" for split in TINYHOP.splits), "corpus.jsonl")
SMALL = TinyHopSettings(train=600, val=60, test=100, entities=160, cold=400, cold_entities=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_data(SMALL, tmp_path_factory.mktemp("tinyhop") / "data", seed=3)


@pytest.fixture(scope="module")
def rows(folder) -> dict[str, list[dict]]:
    return rows_in(folder)


@pytest.fixture(scope="module")
def passages(folder) -> dict[str, Passage]:
    return {passage.id: passage for passage in passages_in(folder)}


def question_of(row: dict) -> str:
    return row["prompt"][0]["content"]


def names_in(text: str) -> set[str]:
    """Names are the only capitalised words of a passage; in a question, the first word is one
    too."""
    return {word for word in re.findall(r"[A-Za-z]+", text) if word[0].isupper()} - {
        "Who", "Which", "Where", "What", "In", "Were", "Are", "Do", "Did"
    }  # fmt: skip


# ------------------------------------------------------------------------- the second, naive solver

FACTS = {
    r"(\w+) from (\w+) works for (\w+) and married (\w+)\.": ("birthplace", "employer", "spouse"),
    r"(\w+) in (\w+) has mayor (\w+)\.": ("country", "mayor"),
    r"(\w+) has capital (\w+)\.": ("capital",),
    r"(\w+) in (\w+) was founded by (\w+)\.": ("headquarters", "founder"),
    r"(\w+) is a film by (\w+) starring (\w+)\.": ("director", "star"),
    r"(\w+) is a book by (\w+) from (\w+)\.": ("author", "publisher"),
}
NOUNS = ["birthplace", "employer", "spouse", "country", "mayor", "capital"]
NOUNS += ["founder", "headquarters", "director", "star", "author", "publisher"]
PHRASES = {rf"the {noun} of (.+)": noun for noun in NOUNS} | {
    r"the city where (.+) was born": "birthplace",
    r"the company that (.+) works for": "employer",
    r"the person married to (.+)": "spouse",
    r"the country that (.+) is in": "country",
    r"the person who founded (.+)": "founder",
    r"the city where (.+) is based": "headquarters",
    r"the person who directed (.+)": "director",
    r"the person who wrote (.+)": "author",
    r"the company that published (.+)": "publisher",
}
ASKS = {rf"(?:Who|What|Which \w+) is (?:the )?{noun} of (.+)": noun for noun in NOUNS} | {
    r"Where was (.+) born": "birthplace",
    r"In which city was (.+) born": "birthplace",
    r"Which city is (.+) from": "birthplace",
    r"Which company does (.+) work for": "employer",
    r"Who is married to (.+)": "spouse",
    r"In which country is (.+)": "country",
    r"Which country is (.+) in": "country",
    r"Who founded (.+)": "founder",
    r"(?:Where|In which city) is (.+) based": "headquarters",
    r"Who directed (.+)": "director",
    r"Who stars in (.+)": "star",
    r"Who wrote (.+)": "author",
    r"(?:Who|Which company) published (.+)": "publisher",
}
PAIR = r"(\w+) and (\w+)"
SAMES = {rf"Do {PAIR} have the same {noun}": noun for noun in NOUNS} | {
    rf"Were {PAIR} born in the same city": "birthplace",
    rf"Are {PAIR} from the same city": "birthplace",
    rf"Do {PAIR} work for the same company": "employer",
    rf"Are {PAIR} in the same country": "country",
    rf"Were {PAIR} founded by the same person": "founder",
    rf"Are {PAIR} based in the same city": "headquarters",
    rf"Did the same person direct {PAIR}": "director",
    rf"Did the same person write {PAIR}": "author",
}
WHICHES = {
    r"Who (?:was born in|is from) (\w+)": "birthplace",
    r"Who works for (\w+)": "employer",
    r"Which city is in (\w+)": "country",
    r"Which city has mayor (\w+)": "mayor",
    r"Which company (?:was founded by|did) (\w+)(?: found)?": "founder",
    r"Which company is based in (\w+)": "headquarters",
    r"Which film (?:was directed by|did) (\w+)(?: direct)?": "director",
    r"Which film stars (\w+)": "star",
    r"Which book (?:was written by|did) (\w+)(?: write)?": "author",
    r"Which book was published by (\w+)": "publisher",
}


def read_facts(texts) -> list[tuple[str, str, str]]:
    facts = []
    for text in texts:
        (match, relations), *more = [
            (m, r) for p, r in FACTS.items() if (m := re.fullmatch(p, text))
        ]
        assert not more, f"two readings of {text}"
        entity, *values = match.groups()
        facts += [
            (entity, relation, value) for relation, value in zip(relations, values, strict=True)
        ]
    return facts


def readings(phrase: str, patterns: dict[str, str]) -> list[tuple[str, ...]]:
    """All ways to read a phrase, each as (start, first relation, ..., last relation)."""
    if re.fullmatch(r"[A-Z]\w+", phrase):
        return [(phrase,)]
    inner = [(m[1], relation) for p, relation in patterns.items() if (m := re.fullmatch(p, phrase))]
    return sorted(
        {(*path, relation) for text, relation in inner for path in readings(text, PHRASES)}
    )


def brute_force(question: str, facts: list[tuple[str, str, str]]) -> set[str]:
    """Every answer to a question, by trying every fact at every hop."""

    def values(entities: set[str], relation: str) -> set[str]:
        return {o for s, r, o in facts if r == relation and s in entities}

    body = question.removesuffix("?")
    for pattern, relation in SAMES.items():
        if match := re.fullmatch(pattern, body):
            a, b = (values({name}, relation) for name in match.groups())
            assert len(a) == len(b) == 1
            return {"yes" if a == b else "no"}
    for pattern, relation in WHICHES.items():
        if match := re.fullmatch(pattern + r", (\w+) or (\w+)", body):
            value, *candidates = match.groups()
            return {name for name in candidates if (name, relation, value) in facts}
    (path,) = readings(body, ASKS)  # one reading: the English is unambiguous
    reached = {path[0]}
    for relation in path[1:]:
        reached = values(reached, relation)
    return reached


def test_every_question_has_exactly_its_answer(rows, passages):
    facts = read_facts(passage.text for passage in passages.values())
    for row in rows["train"] + rows["val"] + rows["test"]:
        assert brute_force(question_of(row), facts) == set(row["reward_model"]["ground_truth"]), (
            question_of(row)
        )


def test_the_lookups_lead_from_the_question_to_the_answer(rows, passages):
    for row in rows["train"] + rows["test"]:
        lookups, kind = row["extra_info"]["lookups"], row["extra_info"]["kind"]
        facts = read_facts(passages[lookup["passage_id"]].text for lookup in lookups)
        assert all((look["entity"], look["relation"], look["value"]) in facts for look in lookups)
        (answer,) = row["reward_model"]["ground_truth"]
        values = [lookup["value"] for lookup in lookups]
        if kind == "yes-no":
            assert len(lookups) == 2 and answer == ("yes" if values[0] == values[1] else "no")
        elif kind == "which":
            value, first, second = re.findall(r"[A-Z]\w+", question_of(row))[1:]
            assert [lookup["entity"] for lookup in lookups] == (
                [first] if answer == first else [first, second]
            )
            assert values[-1] == value and lookups[-1]["entity"] == answer
        else:
            assert (
                len(lookups) == row["extra_info"]["hops"] == int(kind[0]) and values[-1] == answer
            )
            assert {lookups[0]["entity"]} == names_in(question_of(row))
            assert [look["entity"] for look in lookups[1:]] == values[:-1]


def test_no_hop_can_be_skipped(rows, passages):
    chains = [r for r in rows["train"] if r["extra_info"]["kind"] in ("2-hop", "3-hop")]
    assert chains
    for row in chains:
        lookups = row["extra_info"]["lookups"]
        path = [lookups[0]["entity"], *(lookup["value"] for lookup in lookups)]
        assert len(set(path)) == len(path)
        for i, entity in enumerate(path[:-2]):
            assert not names_in(passages[entity].text) & set(path[i + 2 :]), question_of(row)


# ---------------------------------------------------------------------------------------- the world


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9), entities=st.integers(tinyhop.MIN_ENTITIES, 120))
def test_any_world_is_complete_and_consistent(seed, entities):
    taken = {"Bandel", "Vosmir"}
    world = make_world(random.Random(seed), entities, taken)
    names = [name for group in world.entities.values() for name in group]
    assert len(names) == len(set(names)) == world.size == entities
    assert not {"Bandel", "Vosmir"} & set(names) and taken == {"Bandel", "Vosmir", *names}
    for relation, spec in RELATIONS.items():
        for entity in world.entities[spec.subject]:
            (value,) = world.facts[entity, relation]
            assert value in world.entities[spec.value] and value != entity
    assert all(
        world.value(world.value(p, "spouse"), "spouse") == p for p in world.entities["person"]
    )
    assert all(
        world.value(world.value(c, "capital"), "country") == c for c in world.entities["country"]
    )
    assert all(world.value(f, "director") != world.value(f, "star") for f in world.entities["film"])


def test_passages_are_short_ascii_and_begin_with_their_name(passages):
    for passage in passages.values():
        assert (
            passage.text.isascii()
            and passage.text.startswith(passage.title + " ")
            and passage.id == passage.title
        )
        assert re.fullmatch(r"[A-Z][a-z]{5}", passage.title)  # two syllables of three letters
        assert len(passage.text.split()) <= 9
    words = {
        word
        for p in passages.values()
        for word in re.findall(r"\w+", p.text)
        if word not in passages
    }
    assert all(word.islower() for word in words) and not words & {name.lower() for name in passages}


def test_names_grow_to_three_syllables_and_then_end(monkeypatch):
    monkeypatch.setattr(tinyhop, "HEADS", ("ban", "del", "mir", "vos", "zum"))
    monkeypatch.setattr(
        tinyhop, "TAILS", ("fan", "gel", "kir", "los")
    )  # 20 names of two syllables, 80 of three
    taken: set[str] = set()
    make_world(random.Random(0), 20, taken)
    assert {len(name) for name in taken} == {6}
    make_world(random.Random(1), 70, taken)
    assert Counter(map(len, taken)) == {6: 20, 9: 70}
    with pytest.raises(ConfigError, match="10 names left, and 20 more entities need one each"):
        make_world(random.Random(2), 20, taken)


def test_no_name_is_an_ordinary_word(monkeypatch):
    monkeypatch.setattr(tinyhop, "HEADS", ("ban", "del", "fat", "mir", "vos", "zum"))
    monkeypatch.setattr(tinyhop, "TAILS", ("fan", "gel", "her", "kir", "los"))
    monkeypatch.setitem(tinyhop.PASSAGES, "city", "{x} in {country} has father {mayor}.")
    taken: set[str] = set()
    make_world(random.Random(0), 29, taken)  # all 6 x 5 but one
    assert len(taken) == 29 and "Father" not in taken and {len(name) for name in taken} == {6}


# ------------------------------------------------------------------------------------ the questions


def hand_made_world() -> World:
    """Two films by one director; the third has, against all rules, two."""
    facts = {("A", "director"): ["P"], ("B", "director"): ["P"], ("C", "director"): ["P", "Q"]}
    facts |= {("P", "spouse"): ["Q"], ("Q", "spouse"): ["P"]}
    return World({"film": ["A", "B", "C"], "person": ["P", "Q"]}, facts)


def test_solver_by_hand():
    world = hand_made_world()
    assert solve(world, Chain("A", ("director",))) == {"P"}
    assert solve(world, Chain("A", ("director", "spouse"))) == {"Q"}
    assert solve(world, Chain("C", ("director",))) == {"P", "Q"}
    assert solve(world, Chain("A", ("star",))) == set()
    assert solve(world, Same("director", "A", "B")) == {"yes"}
    assert solve(world, Same("director", "A", "C")) == {"yes", "no"}
    assert solve(world, Which("director", "Q", "A", "C")) == {"C"}
    assert solve(world, Which("director", "P", "A", "B")) == {"A", "B"}


def test_questions_with_two_answers_are_refused():
    world, rng = make_world(random.Random(0), 60, set()), random.Random(1)
    film = world.entities["film"][0]
    known = world.mentions(
        world.value(film, "director")
    )  # a rival who differs in all that could be asked about him
    rival = next(p for p in world.entities["person"] if not world.mentions(p) & known)

    def about_its_director(kind: str) -> list[str]:
        questions = KINDS[kind](world, rng)
        return [
            q.answer for q in questions if film in q.text and q.lookups[0].relation == "director"
        ]

    assert len(about_its_director("1-hop")) == 1 and about_its_director("2-hop")
    assert set(about_its_director("yes-no")) == {"yes", "no"}
    world.facts[film, "director"].append(rival)
    assert not about_its_director("1-hop") and not about_its_director("2-hop")
    # "Same as that of a film by the first director?" is now both; "as that of a film by a third
    # one?" is still no.
    assert set(about_its_director("yes-no")) == {"no"}


def test_mix_is_met_exactly_and_yes_equals_no(rows):
    for split, count in (("train", 600), ("val", 60), ("test", 100)):
        kinds = Counter(row["extra_info"]["kind"] for row in rows[split])
        assert kinds == {kind: round(share * count) for kind, share in SMALL.mix.items()}
        yes_no = [row for row in rows[split] if row["extra_info"]["kind"] == "yes-no"]
        answers = Counter(row["reward_model"]["ground_truth"][0] for row in yes_no)
        assert answers["yes"] == answers["no"] == kinds["yes-no"] / 2
    which = [row for row in rows["train"] if row["extra_info"]["kind"] == "which"]
    assert 0.3 < sum(len(row["extra_info"]["lookups"]) == 1 for row in which) / len(which) < 0.7


def test_relations_are_balanced():
    world = make_world(random.Random(0), 600, set())
    one = make_questions(world, random.Random(1), 120, {"1-hop": 1})
    assert Counter(q.lookups[0].relation for q in one) == dict.fromkeys(RELATIONS, 10)
    yes_no = make_questions(world, random.Random(1), 180, {"yes-no": 1})
    asked = Counter((q.lookups[0].relation, q.answer) for q in yes_no)
    assert len(asked) == 18 and set(asked.values()) == {10}
    two = make_questions(world, random.Random(1), 240, {"2-hop": 1})
    last = Counter(q.lookups[-1].relation for q in two)
    assert len(last) == 8 and set(last.values()) == {30}


def test_questions_are_distinct_and_streams_end():
    world = make_world(random.Random(5), tinyhop.MIN_ENTITIES, set())
    for kind, stream in KINDS.items():
        every = list(stream(world, random.Random(0)))
        assert every and len({q.text for q in every}) == len(every)
        assert make_questions(world, random.Random(0), len(every), {kind: 1.0})
        with pytest.raises(
            ConfigError, match=f"only {len(every)} different {kind} questions.*data.entities"
        ):
            make_questions(world, random.Random(0), len(every) + 1, {kind: 1.0})


def test_held_out_worlds_are_large_enough_for_any_single_kind():
    for kind in KINDS:
        for split in ("val", "test"):
            world = make_world(random.Random(1), _world_size(SMALL, split), set())
            assert len(make_questions(world, random.Random(1), getattr(SMALL, split), {kind: 1.0}))


# ---------------------------------------------------------------------------------------- the files


def test_splits_share_no_name_and_no_question(folder, rows):
    worlds = {
        split: set().union(*(names_in(question_of(row)) for row in rows[split]))
        for split in TINYHOP.splits
    }
    for a, b in combinations(TINYHOP.splits, 2):
        assert worlds[a] and not worlds[a] & worlds[b]
    texts = [question_of(row) for split in TINYHOP.splits for row in rows[split]]
    assert len(texts) == len(set(texts)) == 760 + 400
    sizes = [split["entities"] for split in manifest_of(folder)["splits"].values()]
    assert sizes == [160, 150, 150, 300]
    titles = [passage.title for passage in passages_in(folder)]
    assert len(titles) == len(set(titles)) == sum(sizes)


def test_same_seed_same_bytes(folder, tmp_path):
    """Also in another process with another order of sets."""
    script = (
        "import sys; from pathlib import Path; from building import build_data; from test_tinyhop "
        "import SMALL\n"
        "build_data(SMALL, Path(sys.argv[1]), seed=3)"
    )
    env = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "again")], check=True, env=env)
    for name in (*FILES, "manifest.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    other = manifest_of(build_data(SMALL, tmp_path / "other", seed=4))
    assert not set(other["files"].values()) & set(manifest_of(folder)["files"].values())


@pytest.mark.parametrize(
    "config, message",
    [
        (TinyHopSettings(test=0), "data.test=0"),
        (TinyHopSettings(entities=5), "set data.entities to 20"),
        (TinyHopSettings(train=5000, entities=50), "raise data.entities"),
        (TinyHopSettings(cold=9000, cold_entities=500), "data.cold_entities"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        build_data(config, tmp_path / "data")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["data", "train"])
def test_a_kind_that_does_not_exist_is_refused_before_anything_is_made(command):
    """A dry run asks for the configuration only, so it has to refuse what the data refuse."""
    with pytest.raises(ConfigError, match=r"data.mix='6-hop' is unknown.*choose from 1-hop"):
        load_config("discover", ["data.mix={6-hop: 1}"], trains=command == "train")
    assert load_config("discover", ["data.mix={4-hop: 1, 5-hop: 1}"]).data.mix["4-hop"] == 1


def test_the_settings_name_the_kinds_that_there_are():
    assert tuple(tinyhop.KINDS) == KIND_NAMES
