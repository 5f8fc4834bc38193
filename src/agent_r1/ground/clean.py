"""Make strangers' words safe to print.

In: text of a model, a server, a file or a class. Out: the same with marks for what would steer a
terminal. `ui.py` and `clean_console.py` print it.
"""

from __future__ import annotations

import re

# Characters that control the terminal or reorder the line: C0 and C1 controls (ESC, CR), zero-width
# and bidirectional marks. Lone surrogates are not valid UTF-8.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def clean(text: str) -> str:
    """Make text safe to print: control characters become visible marks."""
    return _ACTING.sub(lambda m: chr(0x2400 + ord(m[0])) if m[0] < " " else "\ufffd", text)
