"""List TinyHop's words: relations, ways to ask for them, passages, syllables of names.

Tables and nothing else. `tinyhop.py` makes worlds and questions from them; the cold start trains
the tokenizer on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """Hold one kind of fact, and every way in which questions mention it."""

    subject: str
    """Type of the entity that has it ..."""
    value: str
    """... and of the entity that it leads to."""
    phrases: tuple[str, ...]
    """Noun phrases for the value of {x}; they nest: the spouse of the founder of Vandel."""
    asks: tuple[str, ...]
    """Questions for the value of {x}."""
    same: tuple[str, ...] = ()
    """Yes-no questions whether {a} and {b} have the same value; none where that is always no.

    A city has a mayor of its own. Other questions would be odd.
    """
    which: tuple[str, ...] = ()
    """Which of {a} and {b} has the value {v}?

    None for spouse and capital: there the passage of {v} itself tells.
    """


RELATIONS = {
    "birthplace": Relation(
        "person",
        "city",
        ("the birthplace of {x}", "the city where {x} was born"),
        ("Where was {x} born?", "In which city was {x} born?", "Which city is {x} from?"),
        ("Were {a} and {b} born in the same city?", "Are {a} and {b} from the same city?"),
        ("Who was born in {v}, {a} or {b}?", "Who is from {v}, {a} or {b}?"),
    ),
    "employer": Relation(
        "person",
        "company",
        ("the employer of {x}", "the company that {x} works for"),
        ("Which company does {x} work for?", "Who is the employer of {x}?"),
        ("Do {a} and {b} work for the same company?", "Do {a} and {b} have the same employer?"),
        ("Who works for {v}, {a} or {b}?",),
    ),
    "spouse": Relation(
        "person",
        "person",
        ("the spouse of {x}", "the person married to {x}"),
        ("Who is married to {x}?", "Who is the spouse of {x}?"),
    ),
    "country": Relation(
        "city",
        "country",
        ("the country of {x}", "the country that {x} is in"),
        ("In which country is {x}?", "Which country is {x} in?"),
        ("Are {a} and {b} in the same country?",),
        ("Which city is in {v}, {a} or {b}?",),
    ),
    "mayor": Relation(
        "city",
        "person",
        ("the mayor of {x}",),
        ("Who is the mayor of {x}?", "Which person is mayor of {x}?"),
        (),
        ("Which city has mayor {v}, {a} or {b}?",),
    ),
    "capital": Relation(
        "country",
        "city",
        ("the capital of {x}",),
        ("What is the capital of {x}?", "Which city is the capital of {x}?"),
    ),
    "founder": Relation(
        "company",
        "person",
        ("the founder of {x}", "the person who founded {x}"),
        ("Who founded {x}?", "Who is the founder of {x}?"),
        ("Were {a} and {b} founded by the same person?", "Do {a} and {b} have the same founder?"),
        (
            "Which company was founded by {v}, {a} or {b}?",
            "Which company did {v} found, {a} or {b}?",
        ),
    ),
    "headquarters": Relation(
        "company",
        "city",
        ("the headquarters of {x}", "the city where {x} is based"),
        ("Where is {x} based?", "In which city is {x} based?"),
        ("Are {a} and {b} based in the same city?",),
        ("Which company is based in {v}, {a} or {b}?",),
    ),
    "director": Relation(
        "film",
        "person",
        ("the director of {x}", "the person who directed {x}"),
        ("Who directed {x}?", "Who is the director of {x}?"),
        ("Did the same person direct {a} and {b}?", "Do {a} and {b} have the same director?"),
        ("Which film was directed by {v}, {a} or {b}?", "Which film did {v} direct, {a} or {b}?"),
    ),
    "star": Relation(
        "film",
        "person",
        ("the star of {x}",),
        ("Who stars in {x}?", "Who is the star of {x}?"),
        ("Do {a} and {b} have the same star?",),
        ("Which film stars {v}, {a} or {b}?",),
    ),
    "author": Relation(
        "book",
        "person",
        ("the author of {x}", "the person who wrote {x}"),
        ("Who wrote {x}?", "Who is the author of {x}?"),
        ("Did the same person write {a} and {b}?", "Do {a} and {b} have the same author?"),
        ("Which book was written by {v}, {a} or {b}?", "Which book did {v} write, {a} or {b}?"),
    ),
    "publisher": Relation(
        "book",
        "company",
        ("the publisher of {x}", "the company that published {x}"),
        ("Who published {x}?", "Which company published {x}?"),
        ("Do {a} and {b} have the same publisher?",),
        ("Which book was published by {v}, {a} or {b}?",),
    ),
}

# One passage states all facts of its entity. Within a type, each value follows its own word (from,
# for, married). A two-layer transformer can learn to look up this pattern.
PASSAGES = {
    "person": "{x} from {birthplace} works for {employer} and married {spouse}.",
    "city": "{x} in {country} has mayor {mayor}.",
    "country": "{x} has capital {capital}.",
    "company": "{x} in {headquarters} was founded by {founder}.",
    "film": "{x} is a film by {director} starring {star}.",
    "book": "{x} is a book by {author} from {publisher}.",
}

# A name is two syllables of three letters, consonant + rime: Ban-del. BPE merges frequent pairs. It
# should find syllables, so that new names are spelt like known ones. Rimes are few: they merge
# first. A tail's consonant has only half of them, so d+el (1 name in 42) is twice as frequent as
# an+d (1 in 84).
RIMES = ("an", "el", "ir", "os", "um", "ax")
CONSONANTS = "bdfgklmnprstvz"
HEADS = tuple(consonant + rime for consonant in CONSONANTS for rime in RIMES)
TAILS = tuple(
    consonant + RIMES[(i + j) % len(RIMES)]
    for i, consonant in enumerate(CONSONANTS)
    for j in (0, 1, 3)
)
