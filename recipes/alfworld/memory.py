"""Keep what was seen in a household, and write the notes below an answer.

In: the answers of a game, one after another. Out: `Memory`, and the notes as a line of text. The
environment shows the notes to the agent, and the demonstrator plays from the same memory. Next:
`env.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from agent_r1_recipes.alfworld.household import LAMP, Quest


@dataclass
class Memory:
    """What an agent knows after the answers so far."""

    places: list[str]
    at: str = ""
    shut: set[str] = field(default_factory=set)
    """Places that were closed when last seen."""
    contents: dict[str, list[str]] = field(default_factory=dict)
    """What was seen in each place; a place that was never seen inside is missing."""
    held: str = ""
    taken: list[str] = field(default_factory=list)
    """All objects that were picked up, the first one first."""
    changed: dict[str, str] = field(default_factory=dict)
    """What was done to an object: `clean`, `heat` or `cool`, the last of them."""
    possible: list[str] = field(default_factory=list)
    """The commands below the last answer."""

    def read(self, text: str) -> None:
        """Take note of an answer: its first line. The last line has the commands."""
        answer, *_, commands = text.lower().split("\n")
        self.possible = commands.split(", ")
        if arrival := re.search(r"you arrive at ([^.]+)\.", answer):
            self.at = arrival[1]
        if re.search(r"is closed\.|you close the ", answer):
            self.shut.add(self.at)
        if listed := re.search(r"(?:on the [^,]+|in it), you see ([^.]+)\.", answer):
            self.shut.discard(self.at)
            self.contents[self.at] = re.findall(r"an? ([a-z]+ \d+)", listed[1])
        if picked := re.search(r"you pick up the ([a-z]+ \d+)", answer):
            self.held = picked[1]
            self.taken.append(self.held)
            self.contents[self.at].remove(self.held)
        if re.search(r"you move the ", answer):
            self.contents.setdefault(self.at, []).append(self.held)
            self.held = ""
        if change := re.search(r"you (clean|heat|cool) the ", answer):
            self.changed[self.held] = change[1]

    def unseen(self) -> list[str]:
        """Return the places that were never seen inside."""
        return [place for place in self.places if place not in self.contents]

    def wanted(self, quest: Quest) -> list[tuple[str, str]]:
        """Return the task's objects that were seen elsewhere than they belong, with places."""
        kinds = {quest.target, LAMP} if quest.kind == "look_at_obj_in_light" else {quest.target}
        found = []
        for place, contents in self.contents.items():
            # What lies there is where it should be, whether it is washed or not.
            if quest.places[place] != quest.into:
                found += [(thing, place) for thing in contents if quest.things[thing] in kinds]
        return found

    def notes(self, quest: Quest) -> str:
        """Write what is known, in one line."""
        held = self.held or "nothing"
        if self.held in self.changed:
            held += f" ({self.changed[self.held]})"
        wanted = [f"{thing} at {place}" for thing, place in self.wanted(quest)]
        return (
            f"Carried: {held}. Wanted: {', '.join(wanted) or 'nothing'}. "
            f"Unseen: {', '.join(self.unseen()) or 'nothing'}."
        )


def capitalise(text: str, quest: Quest) -> str:
    """Write each object and place of a quest with a capital: `go to Drawer 1`.

    The tiny model's tokenizer gives a word with a capital the same tokens wherever it stands
    (chat/tokenizer.py). So the name in the task can be copied into a command.
    """
    kinds = {*quest.things.values(), *quest.places.values()}
    names = "|".join(sorted(kind.lower() for kind in kinds))
    return re.sub(rf"\b({names})\b", lambda match: match[1].capitalize(), text)
