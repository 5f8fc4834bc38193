"""Read TinyHop's texts: the chain in a question, the facts in a passage.

In: words. Out: names and relations. The demonstrators read what the agent reads. Next: they decide
what to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent_r1_recipes.laptop.tinyhop_words import PASSAGES, RELATIONS

ENTITY_NAME = re.compile(r"[A-Z]\w*(?:[ '-][A-Z]\w*)*")
"""What a name looks like: words with capitals, side by side."""
WORDS_AND_NAME = re.compile(rf"(?<=[a-z])( [a-z ]*({ENTITY_NAME.pattern}))")
"""A name, and the small words between it and the name before: ` is a book by Dirtax`."""


def read_question(text: str) -> tuple[str, list[str]]:
    """Read a question as a chain: its first entity, and the relations in order.

    Raises ValueError if the question is no chain, or has several readings.
    """
    readings = list(_read_question(text))
    if len(readings) != 1:
        raise ValueError(f"{text!r} has {len(readings)} readings as a chain of relations")
    return readings[0]


def _read_question(text: str) -> Iterator[tuple[str, list[str]]]:
    for name, relation in RELATIONS.items():
        for template in relation.asks:
            for entity, inner_relations in _read_phrase(_inside(template, text), relation.subject):
                yield entity, [*inner_relations, name]


def _read_phrase(text: str, kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each reading of a noun phrase for an entity of the type `kind`."""
    if not text:
        return
    if ENTITY_NAME.fullmatch(text):
        yield text, []
    for name, relation in RELATIONS.items():
        if relation.value != kind:
            continue
        for template in relation.phrases:
            for entity, inner_relations in _read_phrase(_inside(template, text), relation.subject):
                yield entity, [*inner_relations, name]


def _inside(template: str, text: str) -> str:
    """Return the words at the place of {x}; nothing if the template does not fit."""
    before, after = template.split("{x}")
    if text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return ""


def find_passage(result: str, entity: str) -> re.Match[str] | None:
    """Find the passage of `entity` in a search result. Its groups: relation -> value."""
    for template in PASSAGES.values():
        pattern = re.escape(template).replace(r"\{x\}", re.escape(entity))
        for relation in RELATIONS:
            slot = re.escape(f"{{{relation}}}")
            pattern = pattern.replace(slot, f"(?P<{relation}>{ENTITY_NAME.pattern})")
        passage = re.search(pattern, result)
        if passage:
            return passage
    return None


def read_facts(result: str, entity: str) -> dict[str, str]:
    """Read the passage of `entity`: relation -> value. None found: empty."""
    passage = find_passage(result, entity)
    return passage.groupdict() if passage else {}


def quote(passage: str, name: str) -> str:
    """Quote `name`, with the words that lead to it: ` is a book by Dirtax`.

    They begin after another name. Return only `name` if no words stand before it.
    """
    for match in WORDS_AND_NAME.finditer(passage):
        if match[2] == name:
            return match[1]
    return name
