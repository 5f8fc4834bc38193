"""Read an object from outside, and find the values that no reader asked for.

In: a JSON object that someone else wrote. Out: its values, and the keys whose values were not read.
Next: `cold_start/recorded.py` and recipes refuse such a key, or count it if it does no harm.

A reader that ignores the keys that it does not know reads a *subset*, and says nothing. A log with
`reasoning_content` would teach an agent not to think. Here a dictionary remembers what was
asked for, so the reader's code is the list of its keys, and there is no second one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

EMPTY = (None, "")
"""What servers write for a key without a value."""


class Fields(dict[str, Any]):
    """An object whose read keys are known. Objects inside it are `Fields`, too."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__((key, _wrap(value)) for key, value in values.items())
        self._read: set[str] = set()
        self._whole: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Return a value. Of an object, each key has to be read as well."""
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def whole(self, key: str, default: Any = None) -> Any:
        """Return a value with all its keys, such as a schema or arguments."""
        self._whole.add(key)
        return super().get(key, default)

    def unread(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield path and value of each key that has a value which was not read.

        The elements of a list have one path: `messages.name` is a key of any message.
        """
        for key, value in self.items():
            path = f"{prefix}{key}"
            if key in self._whole or is_empty(value):
                continue
            if key not in self._read:
                yield path, value
                continue
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Fields):
                    yield from inner.unread(f"{path}.")

    def refuse_unread(self, harmless: Mapping[str, str], counts: Counter[str]) -> None:
        """Raise ValueError for the first value that was not read.

        One whose path is in `harmless` (path -> reason) is counted in `counts`.
        """
        for path, value in self.unread():
            if path not in harmless:
                raise ValueError(
                    f"{path!r} has the value {json.dumps(value, default=str)[:60]}, which is not "
                    "read; remove this key, or write its value where it is read"
                )
            counts[path] += 1


def is_empty(value: Any) -> bool:
    """Return whether a value is missing, as in {"refusal": null}."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(is_empty(element) for element in value)
    return value in EMPTY


def _wrap(value: Any) -> Any:
    if isinstance(value, dict):
        return Fields(value)
    if isinstance(value, list):
        return [_wrap(element) for element in value]
    return value


def describe_counts(counts: Counter[str], harmless: Mapping[str, str]) -> str:
    """Describe in one line what was not read of a file; "" for nothing."""
    parts = [f"{path} ({count}: {harmless[path]})" for path, count in sorted(counts.items())]
    return f"not read: {', '.join(parts)}" if parts else ""
