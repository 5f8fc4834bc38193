"""Count the open-book examples after which SmolLM2 compares numbers, or finds a common neighbour.

    python lab/experiments/open_book.py > FILE                 all arms; 10 to 15 minutes each
    python lab/experiments/open_book.py number-first words     two of them
    python lab/experiments/open_book.py table                  the rows of open_book.jsonl

An example is a question with both passages above it, without tools: the last step of an episode
with two searches, alone. The model clones a thought and the answer. Held-out comparisons name other
places; held-out neighbours are other pairs of the same countries. One is solved if each token that
the demonstrator writes has a probability over one half. Comparisons of two places have two answers,
so chance is .5. Prints a JSON line per ten steps.
docs/lab/worlds.md ("Pocket: what two passages decide") has the figures.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from agent_r1 import Hermes, Message, load_config
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import chat_with_tools
from agent_r1.cold_start.clone import Lesson, Phase, clone
from agent_r1.cold_start.demonstrate import Demonstration, sequences
from agent_r1.cold_start.stage import make_cold_start
from agent_r1.data.own_rows import OwnQuestion
from agent_r1.model import files as model_files
from agent_r1.rollout.training_rows import TrainingRow, collate
from agent_r1.training.forward import batch_logprobs
from agent_r1.workspace import Workspace
from agent_r1_recipes.geohop.facts import in_words
from agent_r1_recipes.geohop.questions import hops_of
from agent_r1_recipes.geohop.solver import read_facts, read_number

FILE = Path(__file__).with_suffix(".jsonl")
STEPS = 60
LOOK_EVERY = 10
TOKENS = 1024
"""In each step: about eight examples."""
MAX_CONTEXT = 1024
"""Tokens, as in the preset."""
HELD_OUT = 60
"""Comparisons, of the validation split's countries."""
HELD_OUT_PAIRS = 24
"""Of the training countries: the validation split has one pair with a common neighbour."""


def name_first(names: list[str], numbers: list[str], most: int) -> str:
    """Quote as passages do: the name, then its number."""
    return f" {names[0]} {numbers[0]}, {names[1]} {numbers[1]}, more: {numbers[most]}"


def number_first(names: list[str], numbers: list[str], most: int) -> str:
    """Quote so that each name follows its number. Induction then finds the name of a number."""
    parts = [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]
    return f" {parts[0]}, {parts[1]}, more: {parts[most]}"


def in_digits(number: int) -> str:
    return f"{number:,}"


class Example(NamedTuple):
    """What the agent reads, and what the demonstrator writes."""

    question: OwnQuestion
    thought: str


def comparisons(
    think: Callable[[list[str], list[str], int], str],
    spell: Callable[[int], str],
    split: str,
    count: int,
) -> Iterator[Example]:
    """Yield comparisons of two places, two thirds of them cities.

    `think` writes the thought; `spell` writes each number, in the passages, too.
    """
    rng = random.Random(f"0/{split}")
    hops = hops_of(split, rng)
    for _ in range(count):
        noun, kind = rng.choices((("city", "cities"), ("country", "countries")), (2, 1))[0]
        hop = rng.choice(hops[f"compare {kind}"])
        numbers = []
        texts = []
        for name, (_, text) in zip(hop.asked, hop.passages, strict=True):
            [words] = read_facts([text])["inhabitants", name]
            number = spell(round(read_number(words)))
            numbers.append(number)
            texts.append(text.replace(words, number))
        rng.shuffle(texts)  # else the first passage would always be about the first place
        most = hop.asked.index(hop.answer.name)
        wording = f"Which {noun} has more inhabitants, {hop.phrases[0]} or {hop.phrases[1]}?"
        question = OwnQuestion(question=wording, answer=[hop.answer.name], context="\n".join(texts))
        yield Example(question, think(list(hop.asked), numbers, most))


def neighbours(split: str, count: int) -> Iterator[Example]:
    """Yield pairs of countries with one common neighbour.

    There are 99 in the training countries; 24 of them are held out. Each example draws the order of
    the two countries and of all neighbours anew, so no place in a list is right.
    """
    pairs = hops_of("train", random.Random(0))["2-hop neighbour"]
    random.Random(1).shuffle(pairs)
    pairs = pairs[HELD_OUT_PAIRS:] if split == "train" else pairs[:HELD_OUT_PAIRS]
    rng = random.Random(f"0/{split}")
    for number in range(count):
        hop = pairs[number % len(pairs)]
        texts = []
        for _, text in hop.passages:
            start, _, names = text.removesuffix(".").partition(" borders with ")
            order = names.split(", ")
            rng.shuffle(order)
            texts.append(f"{start} borders with {', '.join(order)}.")
        rng.shuffle(texts)
        one, two = rng.sample(hop.phrases, 2)
        wording = f"Which country has borders with both {one} and {two}?"
        question = OwnQuestion(question=wording, answer=[hop.answer.name], context="\n".join(texts))
        yield Example(question, "found")


ARMS: dict[str, Callable[[str, int], Iterator[Example]]] = {
    "name-first": partial(comparisons, name_first, in_digits),
    "number-first": partial(comparisons, number_first, in_digits),
    "words": partial(comparisons, name_first, in_words),
    "neighbours": neighbours,
}
"""Name of an arm -> its examples, given split and count."""


def rows_of(examples: Iterable[Example], chat: ChatFormat) -> list[TrainingRow]:
    """Tokenise examples as episodes of one turn."""
    episodes = []
    for question, thought in examples:
        # A blank in front, as in GeoHop's demonstrator: copied tokens then match.
        turn = Hermes.answer(f" {question.answer[0]}", thought)
        prompt: Message = {"role": "user", "content": question.prompt}
        episodes.append(Demonstration([prompt, {"role": "assistant", "content": turn}], tools=None))
    return sequences(episodes, chat, MAX_CONTEXT)


def measure(arm: str, paths: Workspace) -> None:
    """Clone the examples of one arm, and look at the held-out ones every ten steps."""
    chat = chat_with_tools(paths.base_model)
    examples = ARMS[arm]
    rows = rows_of(examples("train", 1200), chat)  # more than 60 steps take: none is seen twice
    test_batch = collate(
        rows_of(examples("val", HELD_OUT_PAIRS if arm == "neighbours" else HELD_OUT), chat)
    )
    tokens_a_row = fmean(len(row.input_ids) for row in rows)
    start = time.perf_counter()

    def on_step(step: int, loss: float) -> None:
        if (step + 1) % LOOK_EVERY:
            return
        logprobs_BT = batch_logprobs(model, test_batch, 1.0, 4096, torch.float32)
        share = (logprobs_BT.min(dim=1).values > math.log(0.5)).float().mean().item()
        line = {
            "arm": arm,
            "step": step + 1,
            "examples": round((step + 1) * TOKENS / tokens_a_row),
            "solved": round(share, 3),
            "nats": round(-logprobs_BT.sum(dim=1).mean().item(), 3),
            "seconds": round(time.perf_counter() - start),
        }
        print(json.dumps(line), flush=True)

    model = model_files.load_model(paths.base_model)
    clone(model, Phase("mix", Lesson(rows), STEPS, TOKENS, 3e-4), 0, on_step)


def print_table() -> None:
    """Print the page's rows from the kept lines, without the first column."""
    looks = [json.loads(line) for line in FILE.read_text().splitlines()]
    for arm in ARMS:
        few = [look for look in looks if look["arm"] == arm and look["step"] in (20, 40, 60)]
        cells = [f"{look['solved']:.2f} ({look['examples']} examples)" for look in few]
        print(f"| {' | '.join(cells)} | {few[-1]['nats']:.3f} |".replace(" 0.", " ."))


def main(arms: list[str]) -> None:
    torch.set_num_threads(1)
    # Without warm steps this stage only makes the model's folder.
    paths = Workspace(load_config("pocket", ["cold_start.warm_steps=0"], algorithm="grpo"))
    make_cold_start(paths)
    for arm in arms:
        measure(arm, paths)


if __name__ == "__main__":
    if sys.argv[1:] == ["table"]:
        sys.exit(print_table())
    if set(sys.argv[1:]) - set(ARMS):
        sys.exit(__doc__)
    main(sys.argv[1:] or list(ARMS))
