"""Rename everything: the same questions in a world with other names.

In: rows, passages and the search tool of a published data set. Out: the same with all names
permuted: a river may be called Mozart, and a composer Lisbon. Next: the laptop's demonstrator plays
in such worlds.

A model of half a million parameters would memorise a few hundred names and facts, and answer from
memory. Hundreds of worlds that contradict each other leave nothing to memorise. The questions'
forms and the reading of passages stay the same, and a name must be copied from its passage. It also
keeps RL honest: no demonstration shows the answers to its questions.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agent_r1 import (
    AgentEnvLoop,
    BaseTool,
    ChatFormat,
    Row,
    ToolOutput,
    TrainingRow,
    Workspace,
    make_loop,
    train_tokenizer,
)
from agent_r1_recipes.laptop.demonstrator import (
    ENTITY_NAME,
    Demonstrator,
    demonstrate_rows,
    lookups_of,
    search_turn,
    warm_rows,
)


def names_in(passages: list[str], instructions: str) -> list[str]:
    """List a corpus's names: capitalised words that never occur in lower case.

    The agent's instructions count, too ("It" is no name).
    """
    ordinary = set(re.findall(r"\b[a-z]\w*", " ".join([*passages, instructions])))
    names: set[str] = set()
    for passage in passages:
        names.update(ENTITY_NAME.findall(passage))
    # Sorted, because a set has another order in each process, and the names are shuffled by seed.
    return sorted(name for name in names if name.lower() not in ordinary)


def rename_entities(text: str, table: dict[str, str]) -> str:
    """Replace all names of `table` in `text`."""

    def swap(match: re.Match[str]) -> str:
        name = match[0]
        # A question's first word has a capital too: "Were Oscar Wilde and ..."
        first, _, rest = name.partition(" ")
        if name not in table and rest in table:
            return f"{first} {table[rest]}"
        return table.get(name, name)

    return ENTITY_NAME.sub(swap, text)


class OtherNames:
    """Permute all names for one world."""

    def __init__(self, names: list[str], rng: random.Random):
        self._there = dict(zip(names, rng.sample(names, len(names)), strict=True))
        self._back = {there: here for here, there in self._there.items()}

    def rename(self, text: str) -> str:
        return rename_entities(text, self._there)

    def restore(self, text: str) -> str:
        return rename_entities(text, self._back)

    def row(self, row: Row) -> Row:
        """Rename a row: question, answers, and the titles that its demonstrator looks up."""
        row = copy.deepcopy(row)
        row["prompt"][-1]["content"] = self.rename(row["prompt"][-1]["content"])
        row["reward_model"]["ground_truth"] = [
            self.rename(answer) for answer in row["reward_model"]["ground_truth"]
        ]
        row["extra_info"]["supporting"] = [
            self.rename(title) for title in row["extra_info"]["supporting"]
        ]
        return row


class RenamedSearch(BaseTool):
    """Search in the world of `names`: the real index never gets a made-up name."""

    def __init__(self, search: BaseTool, names: OtherNames | None = None):
        self.name = search.name
        self.description = search.description
        self.parameters = search.parameters
        super().__init__()
        self._search = search
        self.names = names

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        assert self.names is not None, "set before each world is played"
        output = await self._search.execute({"query": self.names.restore(args["query"])})
        return replace(output, content=self.names.rename(output.content))


def make_demonstrations(
    rows: list[Row],
    names: list[str],
    search: RenamedSearch,
    loop: AgentEnvLoop,
    behaviours: dict[str, float],
    questions: int,
    seed: int,
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Play a published data set's training questions, each in a world of other names.

    Half of `questions` are for each phase; `search` is the loop's tool. There are no easy questions
    to learn copying from, so phase (a) has whole chains, played well.
    """

    def play(behaviours: dict[str, float], label: str) -> list[TrainingRow]:
        rng = random.Random(f"{seed}/{label}")
        queue: list[Row] = []  # all questions in random order, again and again
        training_rows: list[TrainingRow] = []
        for world in range(math.ceil(questions / 2 / WORLD)):
            while len(queue) < WORLD:
                queue += rng.sample(rows, len(rows))
            # One permutation at a time: `search` is shared, and translates for the current world.
            search.names = OtherNames(names, rng)
            rows_of_world = [search.names.row(row) for row in queue[:WORLD]]
            queue = queue[WORLD:]
            world_label = f"{label}-{world}"
            training_rows += demonstrate_rows(rows_of_world, behaviours, loop, seed, world_label)
        return training_rows

    return play({"good": 1.0}, "copy"), play(behaviours, "mix")


WORLD = 60
"""Questions that are played in one world of other names.

Few: it is the variety of names that copying is learnt from.
"""


def texts_for_tokenizer(rows: list[Row], passages: list[str], names: list[str]) -> Iterator[str]:
    """Yield a published data set's phrases, and all names equally often, for the tokenizer."""
    instructions = rows[0]["prompt"][0]["content"]
    texts = [f"user\n{row['prompt'][-1]['content']}" for row in rows]
    texts += [f"\n{passage}\n" for passage in passages]
    turns = [search_turn(lookup) for lookup in lookups_of(rows[0])]
    turns += ["assistant\n", "answer", "guess", "yes", "no"]
    # The fixed phrases once for each question, as often as the agent will see them.
    texts += [*turns, f"system\n{instructions}\n\ntools: search(query)"] * len(rows)
    # A text is split at its names. They follow below, all equally often.
    no_names = dict.fromkeys(names, "\0")
    for text in texts:
        yield from re.split(r"\0|<[a-z_/]+>", rename_entities(text, no_names))
    for _ in range(20):  # often enough that the names are not the first to be left without a token
        yield from names


def teach(
    paths: Workspace, model_chat: ChatFormat | None = None
) -> tuple[ChatFormat, list[TrainingRow], list[TrainingRow]]:
    """Teach a published data set as `cold_start.teach` does, with other names."""
    config = paths.config
    rows = paths.load_rows("train")
    tools = paths.load_tools()
    if model_chat:
        return model_chat, [], warm_rows(paths, rows, model_chat, tools)
    tools |= {"search": RenamedSearch(tools["search"])}
    passages = [passage.text for passage in paths.load_passages()]
    names = names_in(passages, rows[0]["prompt"][0]["content"])
    chat = ChatFormat(
        train_tokenizer(texts_for_tokenizer(rows, passages, names), config.model.vocab_size)
    )
    loop = make_loop(Demonstrator(chat, paths.dialect), chat, tools, config.rollout, config.env)
    copy_rows, mix_rows = make_demonstrations(
        rows,
        names,
        tools["search"],
        loop,
        config.cold_start.behaviours,
        questions=config.data.cold,
        seed=config.seed,
    )
    return chat, copy_rows, mix_rows
