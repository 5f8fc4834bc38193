"""Keep an API's key out of everything that is written or printed.

In: text, or decoded JSON, from a server that may repeat the key. Out: the same without the key.
`client.py` calls it before anything is kept.

A key is found in each spelling that JSON, a URL or HTML has for a letter, such as `sk\\/` and
`\\u0073k-`. A server that encodes the key in a way of its own is not found out.
"""

from __future__ import annotations

import os
import re
from html.entities import html5
from typing import Any

from agent_r1 import ConfigError

SHORTEST = 8
"""Letters of a key. A shorter one is none, or `none`: a word that texts may have."""
DECODINGS = 3
"""A call's arguments are JSON in JSON, and may hold JSON."""
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([/\"'\\]))")


def key_from(variable: str) -> str:
    """Return the API's key; empty for a server without keys. Raise ConfigError if it is broken."""
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        # Said here, because an HTTP library would print the header, and with it the key.
        raise ConfigError(
            f"the environment variable {variable} holds no key: it has blanks or letters that a "
            "header cannot have",
            code="bad_key",
        )
    return key


class KeyFilter:
    """Replace one key by a mark."""

    def __init__(self, key: str, variable: str):
        self.mark = f"[{variable}]"
        self.pattern: re.Pattern[str] | None = None
        if len(key) >= SHORTEST:
            # At most eight backslashes, and none before the first letter: a text that consists of
            # backslashes would take quadratic time.
            self.pattern = re.compile(r"\\{0,8}".join(_spellings(letter) for letter in key))

    def text(self, text: str) -> str:
        """Return `text` without the key."""
        if self.pattern is None:
            return text
        text = self.pattern.sub(lambda match: self.mark, text)
        decoded_text = text
        for _ in range(DECODINGS):
            if "\\" not in decoded_text:
                break
            decoded_text = ESCAPE.sub(_letter, decoded_text)
            if self.pattern.search(decoded_text):
                return self.mark  # no one spelling to replace: a part of an escape is escaped
        return text

    def value(self, value: Any) -> Any:
        """Return decoded JSON without the key, in names as in values."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(entry) for entry in value]
        if isinstance(value, dict):
            return {self.text(name): self.value(entry) for name, entry in value.items()}
        return value


def _spellings(letter: str) -> str:
    """Return a pattern of one letter: itself, its number after a backslash, % or &#, its name."""
    code = ord(letter)
    spellings = [re.escape(letter)]
    spellings.append(rf"\\(?:u00|x)(?i:{code:02x})")
    spellings.append(rf"%(?i:{code:02x})")
    spellings.append(rf"&#0{{0,4}}{code};|&#[xX]0{{0,4}}(?i:{code:x});")
    # As `&sol;` for a slash.
    spellings += [f"&{name}" for name, text in html5.items() if text == letter and name[-1] == ";"]
    return f"(?:{'|'.join(spellings)})"


def _letter(match: re.Match[str]) -> str:
    """Return the letter of one escape."""
    number = match[1] or match[2]
    return chr(int(number, 16)) if number else match[3]
