"""Browse a catalogue: search, click on links, choose, finish. One class for shop and papers.

In: a catalogue and a goal, out of a row. Out: pages as text, and the catalogue's reward. The
actions are WebShop's, written as text or as calls of the tools `search` and `click`:

    search[soft steel lamp]      on the page with the search box
    click[Tulnix]                a link, an option or a button of the page that is shown
    click[Buy Now]               ends the episode; among papers, click[Hand In]

A click on something that the page does not show changes nothing. Next: `demonstrator.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from agent_r1 import ToolCall
from agent_r1_recipes.catalogues import papers, products, webshop

RESULTS = 50
"""Results of a search, as in WebShop."""
BACK = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
KEEP = "Add to List"
LISTED = "(listed) "
"""Stands before the papers of the list, which are no links any more. So the topic of a goal stands
only before papers that are left."""
NO = "no such link on this page"
ACTION = re.compile(r"\s*(search|click)\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


class Catalogue(Protocol):
    """What there is to find, and what finding it is worth."""

    finish: str
    """The button that ends an episode."""
    window: int
    """Results of a page."""
    subpages: tuple[str, ...]
    explains: bool
    """Whether a click that does nothing is answered with the reason above the page."""
    ranking: Any

    def line(self, code: str) -> str: ...
    def page(self, code: str) -> str: ...
    def subpage(self, code: str, name: str) -> str: ...
    def options(self, code: str) -> dict[str, tuple[str, ...]]: ...
    def links(self, code: str) -> dict[str, str]: ...
    def reward(
        self, goal: dict[str, Any], code: str | None, chosen: dict[str, str], kept: list[str]
    ) -> dict[str, float]: ...


def catalogue_of(name: str) -> Catalogue:
    """Return a catalogue by its name, or WebShop's own in a folder."""
    if name == "products":
        return products.make_products()
    if name == "papers":
        return papers.make_papers()
    return webshop.load(name)


class Pages:
    """Find what is asked for, by searching and clicking."""

    score_name = "solved"

    def reset(self, question: str, catalogue: str, goal: str, **row: Any) -> str:
        self.catalogue = catalogue_of(catalogue)
        self.question = question
        self.goal: dict[str, Any] = json.loads(goal)
        self.query: str | None = None
        self.results: list[str] = []
        self.number = 0
        """The page of results, from 0."""
        self.trail: list[str] = []
        """Items that were opened since the results, the present one last: `< Prev` goes back."""
        self.subpage = ""
        self.chosen: dict[str, str] = {}
        self.kept: list[str] = []
        self.done = False
        self.reward_parts: dict[str, float] = {}
        return "[Search]"

    def search(self, query: str) -> str:
        """Search the catalogue.

        Args:
            query: Words to look for.
        """
        if self.query is not None:
            return self._refusal(f"no search box on this page; click[{BACK}]")
        self.query = query
        self.results = self.catalogue.ranking.search(query, RESULTS)
        self.number = 0
        return self._page()

    def click(self, link: str) -> str:
        """Click on something that the page shows.

        Args:
            link: Its text.
        """
        names = {name.lower(): name for name in self._links()}
        name = names.get(link.strip().lower())
        if name is None:
            return self._refusal(NO)
        self._follow(name)
        return "over" if self.done else self._page()

    def get_reward(self) -> float:
        if not self.done:
            return 0.0
        code = self.trail[-1] if self.trail else None
        parts = self.catalogue.reward(self.goal, code, self.chosen, self.kept)
        self.reward_parts = {name: value for name, value in parts.items() if name != "reward"}
        return parts["reward"]

    @property
    def score(self) -> bool:
        return self.get_reward() == 1.0

    @property
    def state(self) -> str:
        """Where the agent is, and all that it has chosen: what the future depends on."""
        page = [self.query, self.number, self.trail, self.subpage]
        return json.dumps([page, sorted(self.chosen.items()), sorted(self.kept)])

    @classmethod
    def _call_from_text(cls, text: str) -> ToolCall:
        """Read an action in WebShop's form out of a turn without a call."""
        match = ACTION.fullmatch(text)
        if match is None:
            return ToolCall(
                "click", {}, error="there is no action; write search[...] or click[...]"
            )
        argument = "query" if match[1].lower() == "search" else "link"
        return ToolCall(match[1].lower(), {argument: match[2]})

    def _links(self) -> list[str]:
        """List all that can be clicked on the present page."""
        if self.query is None:
            return []
        if not self.trail:
            start = self.number * self.catalogue.window
            links = self.results[start : start + self.catalogue.window]
            buttons = [BACK]
            if self.number:
                buttons.append(PREVIOUS)
            if start + self.catalogue.window < len(self.results):
                buttons.append(NEXT)
            return links + buttons
        if self.subpage:
            return [BACK, PREVIOUS]
        code = self.trail[-1]
        options = [value for values in self.catalogue.options(code).values() for value in values]
        targets = self.catalogue.links(code).items()
        links = [label for label, target in targets if target not in self.kept]
        return [*options, *links, *self.catalogue.subpages, *self._buttons()]

    def _buttons(self) -> list[str]:
        keep = [KEEP] if self.catalogue.finish != products.BUY else []
        return [*keep, BACK, PREVIOUS, self.catalogue.finish]

    def _follow(self, name: str) -> None:
        """Change the state as a click on `name` does."""
        if name == BACK:
            # As in WebShop, a new search forgets the choices. The list of papers stays.
            self.query = None
            self.trail = []
            self.subpage = ""
            self.chosen = {}
        elif name == NEXT:
            self.number += 1
        elif name == PREVIOUS:
            self._go_back()
        elif not self.trail:
            self.trail = [name]
            self.chosen = {}
        elif name == self.catalogue.finish:
            self.done = True
        elif name == KEEP:
            if self.trail[-1] not in self.kept:
                self.kept.append(self.trail[-1])
        elif name in self.catalogue.subpages:
            self.subpage = name
        else:
            self._choose_or_open(name)

    def _go_back(self) -> None:
        if self.subpage:
            self.subpage = ""
        elif self.trail:
            self.trail.pop()
            self.chosen = {}
        else:
            self.number -= 1

    def _choose_or_open(self, name: str) -> None:
        for option, values in self.catalogue.options(self.trail[-1]).items():
            if name in values:
                self.chosen[option] = name
                return
        self.trail.append(self.catalogue.links(self.trail[-1])[name])

    def _refusal(self, reason: str) -> str:
        return f"{reason}\n{self._page()}" if self.catalogue.explains else self._page()

    def _page(self) -> str:
        """Write the present page. Each one repeats the instruction, as WebShop's do."""
        lines = [self.question]
        if self.query is None:
            lines.append("[Search]")
        elif not self.trail:
            start = self.number * self.catalogue.window
            codes = self.results[start : start + self.catalogue.window]
            lines.append(f"Page {self.number + 1} (Total results: {len(self.results)})")
            lines += [self.catalogue.line(code) for code in codes]
            lines.append(", ".join(f"[{name}]" for name in self._links() if name not in codes))
        elif self.subpage:
            lines.append(self.catalogue.subpage(self.trail[-1], self.subpage))
            lines.append(f"[{BACK}], [{PREVIOUS}]")
        else:
            lines += self._item_lines(self.trail[-1])
        return "\n".join(lines)

    def _item_lines(self, code: str) -> list[str]:
        mark = LISTED if code in self.kept else ""
        path = [*self.trail[:-1], self.catalogue.page(code)]
        lines = [f"{mark}{' > '.join(path)}"]
        for option, values in self.catalogue.options(code).items():
            labels = [
                f"({value})" if self.chosen.get(option) == value else value for value in values
            ]
            lines.append(f"{option}: {', '.join(labels)}")
        for label, target in self.catalogue.links(code).items():
            lines.append(f"{LISTED}{target}" if target in self.kept else label)
        buttons = [*self.catalogue.subpages, *self._buttons()]
        lines.append(", ".join(f"[{name}]" for name in buttons))
        return lines
