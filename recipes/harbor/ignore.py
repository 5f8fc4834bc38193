"""List what a build context leaves out: the file environment/.dockerignore.

In: the text of the file, and the folder. Out: paths below the folder, which `container.py` deletes
from its own copy. The last pattern that fits a path or a folder above it decides, and `!` takes a
path back, as in https://docs.docker.com/build/concepts/context/.

A stranger writes the patterns, so none may take long. Their number and the depth are bounded. A
star never gives back what it took, unless it is the last one of a name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from agent_r1_recipes.harbor.packages import Refused

IGNORE = ".dockerignore"
MAX_PATTERNS = 100
MAX_DEPTH = 50


@dataclass(frozen=True)
class Pattern:
    """One line of the file."""

    names: list[re.Pattern[str]]
    """An expression for each name of a path."""
    anywhere: bool
    """It began with `**/`: any folders may stand before."""
    leaves_out: bool
    """It did not begin with `!`."""

    def fits(self, names: list[str]) -> bool:
        count = len(self.names)
        if len(names) < count or (len(names) > count and not self.anywhere):
            return False
        last = names[len(names) - count :]
        return all(one.fullmatch(name) for one, name in zip(self.names, last, strict=True))


def list_ignored(text: str, folder: Path) -> list[str]:
    """Return the paths to delete, files before their folders. Raises Refused."""
    patterns = read_patterns(text)
    left_out = []
    for place, folders, files in os.walk(folder, topdown=False):
        for name in [*files, *folders]:
            path = os.path.relpath(os.path.join(place, name), folder)
            if is_ignored(path, patterns):
                left_out.append(path)
    return left_out


def read_patterns(text: str) -> list[Pattern]:
    """Read the lines. Raises Refused for what is not in the subset."""
    patterns = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        word = os.path.normpath(line.removeprefix("!").strip()).strip("/")
        anywhere = word.startswith("**/")
        word = word.removeprefix("**/").removesuffix("/**")
        try:
            names = [re.compile(_translate(name)) for name in word.split("/")]
        except re.error as error:
            raise Refused(f"environment/{IGNORE}, line {number}: {error.msg}") from None
        patterns.append(Pattern(names, anywhere, not line.startswith("!")))
    if len(patterns) > MAX_PATTERNS:
        raise Refused(f"environment/{IGNORE}: more than {MAX_PATTERNS} patterns")
    return patterns


def is_ignored(path: str, patterns: list[Pattern]) -> bool:
    """Return whether a path is left out. Raises Refused if it is too deep."""
    names = path.split("/")
    if len(names) > MAX_DEPTH:
        raise Refused(f"environment/: more than {MAX_DEPTH} folders in each other")
    is_ignored = False
    for pattern in patterns:
        if any(pattern.fits(names[:count]) for count in range(1, len(names) + 1)):
            is_ignored = pattern.leaves_out
    return is_ignored


def _translate(pattern: str) -> str:
    """Return the pattern of one name as a regular expression."""
    if "**" in pattern:
        raise re.error("** is only read as `**/` at the start and `/**` at the end")
    chunks = [""]
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "*":
            chunks.append("")
        elif letter == "?":
            chunks[-1] += "."
        elif letter == "[":
            end = pattern.find("]", place + 2)
            if end < 0:
                raise re.error("a bracket without an end")
            letters = pattern[place + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            chunks[-1] += f"[{letters}]"
            place = end
        elif letter == "\\" and place + 1 < len(pattern):
            place += 1
            chunks[-1] += re.escape(pattern[place])
        else:
            chunks[-1] += re.escape(letter)
        place += 1
    first, *rest = chunks
    # A chunk has a fixed length, so its first place is as good as any later one.
    middle = "".join(f"(?>.*?{chunk})" for chunk in rest[:-1])
    return f"(?s:{first}{middle}{f'.*{rest[-1]}' if rest else ''})"
