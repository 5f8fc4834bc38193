"""Find the names in questions, to say which of a test are new to training.

In: texts of questions. Out: names. Next: `workspace.py` counts them after `agent-r1 data`, and the
chat warns of an unknown one.

A score on names that training had says nothing about others. A shop's agent scored .975 on its own
items, and invented an answer for 14 of 16 items that the shop does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NAME = re.compile(r"\b[^\W\d_a-z][^\W\d_]+")
"""A capitalised word of at least two letters, in any script that has capitals."""
SENTENCE_END = (".", "!", "?", ":", "\n")


def names_in(text: str) -> set[str]:
    """Return the capitalised words of a text. The first word of a sentence is none."""
    names: set[str] = set()
    for match in NAME.finditer(text):
        before = text[: match.start()].rstrip(" \t\"'(")
        if before and not before.endswith(SENTENCE_END) and match[0][0].isupper():
            names.add(match[0])
    return names


def count_new_names(train: Iterable[str], test: Iterable[str]) -> tuple[int, int]:
    """Count the names of the test that are new to training, and all its names."""
    words: set[str] = set()
    for text in train:
        words.update(NAME.findall(text))
    names: set[str] = set()
    for text in test:
        names |= names_in(text)
    return len(names - words), len(names)


def describe_new_names(train: Iterable[str], test: Iterable[str]) -> str:
    """Describe what a test tells about new names; "" if it has no name."""
    new, count = count_new_names(train, test)
    if not count:
        return ""
    line = f"names of the test that are new to training: {new} of {count}"
    if not new:
        line += (
            ": this score says nothing about new names (data.split_by=KEY keeps the questions "
            "of one metadata value together)"
        )
    return line
