"""Count the open-book examples after which SmolLM2 compares numbers, or finds a common neighbour.

    python lab/experiments/open_book.py > FILE                 all arms; 10 to 15 minutes each
    python lab/experiments/open_book.py number-first words     two of them

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
from collections.abc import Callable, Iterator
from statistics import fmean

import torch

from agent_r1 import Hermes, load_config
from agent_r1.config import tables
from agent_r1.data.own_rows import CONTEXT
from agent_r1.rollout import model_files
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.training_rows import TrainingRow, collate
from agent_r1.training.clone import clone
from agent_r1.training.demonstrate import Demonstration, sequences
from agent_r1.training.forward import batch_logprobs
from agent_r1.training.tiny_model import chat_with_tools
from agent_r1.workspace import Workspace, stage
from agent_r1_recipes.geohop.questions import hops_of
from agent_r1_recipes.geohop.solver import read_facts

STEPS = 60
TOKENS = 1024
"""In each step: about eight examples."""
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


def only_quote(names: list[str], numbers: list[str], most: int) -> str:
    """Quote both numbers, and leave the choice to the answer."""
    return f" {names[0]} {numbers[0]}, {names[1]} {numbers[1]}"


def in_digits(number: int) -> str:
    return f"{number:,}"


def in_words(number: int) -> str:
    """Write 2,500,000 as `2.5 million`: the word alone often decides."""
    if number >= 10**6:
        return f"{number / 10**6:g} million"
    return f"{number / 1000:g} thousand"


Thought = Callable[[list[str], list[str], int], str]
ARMS: dict[str, tuple[Thought, Callable[[int], str]] | None] = {
    "quote": (only_quote, in_digits),
    "name-first": (name_first, in_digits),
    "number-first": (number_first, in_digits),
    "words": (name_first, in_words),
    "neighbours": None,
}
"""Thought of a comparison, and how all numbers are written."""


def comparisons(split: str, arm: str, count: int) -> Iterator[tuple[str, str, str]]:
    """Yield (what the agent reads, thought, answer); two thirds are about cities."""
    think, spell = ARMS[arm]
    rng = random.Random(f"0/{split}")
    hops = hops_of(split, rng)
    for _ in range(count):
        noun, kind = rng.choices((("city", "cities"), ("country", "countries")), (2, 1))[0]
        hop = rng.choice(hops[f"compare {kind}"])
        numbers = []
        texts = []
        for name, (_, text) in zip(hop.asked, hop.passages, strict=True):
            [digits] = read_facts([text])["inhabitants", name]
            number = spell(int(digits.replace(",", "")))
            numbers.append(number)
            texts.append(text.replace(digits, number))
        rng.shuffle(texts)
        most = hop.asked.index(hop.answer.name)
        question = f"Which {noun} has more inhabitants, {hop.phrases[0]} or {hop.phrases[1]}?"
        prompt = CONTEXT.format(context="\n".join(texts), question=question)
        yield prompt, think(list(hop.asked), numbers, most), hop.answer.name


def neighbours(split: str, count: int) -> Iterator[tuple[str, str, str]]:
    """Yield the same of pairs with one common neighbour.

    There are 99 in the training countries; 24 of them are held out. Order of the two countries and
    of all their neighbours is drawn anew for each example.
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
            shuffled = names.split(", ")
            rng.shuffle(shuffled)
            texts.append(f"{start} borders with {', '.join(shuffled)}.")
        rng.shuffle(texts)
        one, two = rng.sample(hop.phrases, 2)
        question = f"Which country has borders with both {one} and {two}?"
        yield CONTEXT.format(context="\n".join(texts), question=question), "found", hop.answer.name


def rows_of(split: str, arm: str, count: int, chat: ChatFormat) -> list[TrainingRow]:
    """Make the training rows of `count` examples."""
    examples = neighbours(split, count) if arm == "neighbours" else comparisons(split, arm, count)
    episodes = []
    for prompt, thought, answer in examples:
        # A blank in front, as in GeoHop's demonstrator: copied tokens then match.
        turn = Hermes.answer(f" {answer}", thought)
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": turn}]
        episodes.append(Demonstration(messages, None))
    return sequences(episodes, chat, 1024)


def measure(arm: str, paths: Workspace) -> None:
    """Clone the examples of one arm, and look at the held-out ones every ten steps."""
    chat = chat_with_tools(paths.base_model)
    rows = rows_of("train", arm, 1200, chat)
    held_count = HELD_OUT_PAIRS if arm == "neighbours" else HELD_OUT
    held = collate(rows_of("val", arm, held_count, chat))
    tokens_a_row = fmean(len(row.input_ids) for row in rows)
    start = time.perf_counter()

    def on_step(step: int, loss: float) -> None:
        if (step + 1) % 10:
            return
        logprobs_BT = batch_logprobs(model, held, 1.0, 4096, torch.float32)
        solved = (logprobs_BT.min(dim=1).values > math.log(0.5)).float().mean().item()
        line = {
            "arm": arm,
            "step": step + 1,
            "examples": round((step + 1) * TOKENS / tokens_a_row),
            "solved": round(solved, 3),
            "nats": round(-logprobs_BT.sum(dim=1).mean().item(), 3),
            "seconds": round(time.perf_counter() - start),
        }
        print(json.dumps(line), flush=True)

    model = model_files.load_model(paths.base_model, torch.device("cpu"))
    clone(model, rows, STEPS, TOKENS, 3e-4, 0, on_step)


def main(arms: list[str]) -> None:
    torch.set_num_threads(1)
    paths = Workspace(load_config("pocket", algorithm="grpo"))
    scheme = tables.scheme_of(paths.config.model.path)
    stage(
        "SmolLM2 as a model folder",
        paths.fetch_folder,
        lambda part: scheme.convert(paths.config.model.path, part),
    )
    for arm in arms:
        measure(arm, paths)


if __name__ == "__main__":
    if set(sys.argv[1:]) - set(ARMS):
        sys.exit(__doc__)
    main(sys.argv[1:] or list(ARMS))
