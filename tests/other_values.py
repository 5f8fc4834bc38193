"""Change each value of an example in turn, to see that a reader reads it, refuses it, or names it
as harmless."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


def other_value(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + " other"
    return 7 if value is None else value + 1


def paths_of(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the place of each value that is no object and no list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, element in inner:
        if isinstance(element, dict | list):
            yield from paths_of(element, (*path, key))
        else:
            yield (*path, key)


def with_other_values(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each value, and a copy of the record in which only it is another."""
    for path in paths_of(record):
        other = copy.deepcopy(record)
        place = other
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = other_value(place[path[-1]])
        yield ".".join(key for key in path if isinstance(key, str)), other


def is_harmless(name: str, harmless: Any) -> bool:
    """Return whether a value or something around it stands in a reader's list."""
    words = name.split(".")
    return any(".".join(words[:end]) in harmless for end in range(1, len(words) + 1))
