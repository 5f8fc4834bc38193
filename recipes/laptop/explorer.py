"""Play TinyHop without its solutions: take the items of a plan in random order.

In: a question, and what the search tool returned. Out: turns. `demonstrator.py` asks for them, and
`shown.py` tells which plays show a solution: those are dropped. Next: the cold start clones the
rest.

The explorer shows what a pretrained model brings along: to read a question into a plan, to search,
to quote and to answer. It does not show how to solve a question of several hops. It gets the texts
that the agent sees, and no solution. It writes the plan in the question's order. Which item is
next, it draws from the *set* of the items that are left. `In which city is the publisher of Sosnum
based?` may give

    plan/publisher/headquarters/answer: plan/headquarters       and a search for Sosnum
     is a book by Dospax/author/answer                          and the answer Dospax

The passage of a book has no headquarters, so the explorer quotes another fact. The pair at the end
of a thought is what was quoted and what is next. Before the first search, it is `plan` and what is
next. In a solution each pair stands in the plan, side by side. A model that copies from the plan
would solve every question. No play shows that, and RL hardly finds it: the trained agent mostly
reads the order from the question (docs/discover.md, "What it cannot do").

The first of the two is what the quote says, and not what the explorer was looking for. Otherwise
the pair is wrong wherever the passage lacks that. RL then cannot tell a good choice from a bad one:
one seed of three stayed at two hops (docs/discover.md, "What was tried").

`SentenceExplorer` quotes from the passage's name on. Its first thought after a search is

    Sosnum is a book by Dospax/author/answer

The name is copied from the query, and each later word is what followed the words before it. So a
head that copies what followed two tokens finds the passage by its name, wherever it stands. A quote
of the fact alone begins at a place: its first word stands in many passages.
"""

from __future__ import annotations

import random
import re

from agent_r1 import ToolCall
from agent_r1_recipes.laptop.reading import find_passage, quote, read_question

BEGIN = "plan"
"""What is done before the first search."""
DONE = "answer"
"""The last item of a plan: the last quote is the answer."""


class Explorer:
    """Play one question."""

    def __init__(self, question: str, rng: random.Random):
        self.entity, self.plan = read_question(question)
        self.rng = rng
        # Sorted, so that the plan's order cannot influence the choice.
        self.items_left = sorted(self.plan)
        self.item = BEGIN

    def turn(self, result: str) -> tuple[ToolCall | str, str]:
        """Return a search or an answer, with its thought. `result`: what the last search found."""
        if self.item == BEGIN:
            plan = "".join(item_text(item) for item in [*self.plan, DONE])
            thought = f"{BEGIN}{plan}: {BEGIN}"
            options = self.items_left  # nothing is read yet that it could answer
        else:
            relation, fact = self._read_fact(result)
            if relation != self.item and relation in self.items_left:
                self.items_left.remove(relation)  # done, although it was not looked for
            thought = fact + item_text(relation)
            options = [*self.items_left, DONE]
        self.item = self.rng.choice(options)
        thought += item_text(self.item)
        if self.item == DONE:
            return self.entity, thought
        self.items_left.remove(self.item)
        return ToolCall("search", {"query": self.entity}), thought

    def _read_fact(self, result: str) -> tuple[str, str]:
        """Return a fact's relation and quote: the item's, or any if the passage lacks it.

        The entity that it leads to is the next one to search.
        """
        passage = find_passage(result, self.entity)
        if passage is None:  # the search has missed
            return self.item, self.entity
        facts = passage.groupdict()
        relation = self.item if self.item in facts else self.rng.choice(sorted(facts))
        self.entity = facts[relation]
        return relation, self._quote(passage, relation)

    def _quote(self, passage: re.Match[str], relation: str) -> str:
        """Quote the fact alone. Groups of `passage`: relation -> value."""
        return quote(passage[0], passage[relation])


class SentenceExplorer(Explorer):
    """Play one question, and quote sentences from their beginning."""

    def _quote(self, passage: re.Match[str], relation: str) -> str:
        """Quote the passage from its name to the fact's value."""
        return passage.string[passage.start() : passage.end(relation)]


def item_text(item: str) -> str:
    """Write an item of a plan: one token.

    BPE may join a blank to the word before it. A slash it joins only to the word after it, because
    the tokenizer's texts have no other slash.
    """
    return f"/{item}"
