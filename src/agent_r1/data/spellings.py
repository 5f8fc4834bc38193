"""Compare titles and questions that are equal in spite of different bytes.

In: a title or a question. Out: a key, which is equal for equal texts. Used by `build.py`,
`env/questions.py`, `search/index.py` and demonstrators.
"""

from __future__ import annotations

import html
import unicodedata


def question_key(text: str) -> str:
    """Normalise a text: composed Unicode (NFC), single blanks."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def title_key(title: str) -> str:
    """Normalise a title as Wikipedia spells it.

    Dumps differ in decomposed accents, HTML entities, underscores or a small first letter. Case
    beyond the first letter distinguishes titles.
    """
    key = question_key(html.unescape(title).replace("_", " "))
    return key[:1].upper() + key[1:]
