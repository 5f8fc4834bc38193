"""One text in several spellings: titles and questions that are equal although their bytes differ.

In: a title or a question. Out: a key; two texts with the same key are the same. Used wherever titles or questions are compared:
`build.py`, `env/hermes.py`, `search/index.py`, demonstrators.
"""

from __future__ import annotations

import html
import unicodedata


def question_key(text: str) -> str:
    """Return the text in composed Unicode (NFC), with single blanks."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def title_key(title: str) -> str:
    """Return the title as Wikipedia would spell it.

    Questions and corpora are made of different dumps: one has decomposed accents, HTML entities, underscores or a small first
    letter where the other has none. Case beyond the first letter distinguishes titles.
    """
    key = question_key(html.unescape(title).replace("_", " "))
    return key[:1].upper() + key[1:]
