"""Print styled text whose words may be a stranger's.

In: anything that rich renders. Out: the same on a terminal, with marks instead of control
characters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agent_r1.ground.clean import clean

if TYPE_CHECKING:
    from rich.segment import Segment


class CleanConsole(Console):
    """A console that `clean`s whatever it prints.

    rich removes five control characters from text, and ESC is not one of them. Its own colours and
    cursor movements are no text, so they stay.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))
