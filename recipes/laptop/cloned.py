"""Count what the cloned demonstrations show, in the rows that were cloned.

    python -m agent_r1_recipes.laptop.cloned --preset discover --seed 1

In: the token ids that a cold start has kept. Out: counts. Each row gets the names of its question
back, and is compared with that question word for word. Next: eval card and report carry the counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, Row, Workspace, load_chat, load_config, say
from agent_r1_recipes.laptop.demonstrator import explorer_in, mixture_questions, new_names
from agent_r1_recipes.laptop.shown import Play, count, read_play


def count_cloned(paths: Workspace, folder: Path) -> dict[str, Any] | None:
    """Count the rows of a cold start. Return None if its demonstrator is no explorer."""
    if not explorer_in(paths.config.cold_start.behaviours):
        return None
    return count(plays_of(paths, folder))


def plays_of(paths: Workspace, folder: Path) -> Iterator[tuple[Play, Row]]:
    """Yield each cloned play, with the names of its question, and the question's row.

    Raises AgentR1Error if a play's question is not its row's.
    """
    chat = load_chat(folder)
    questions = mixture_questions(paths.load_rows("cold"))
    lines = [json.loads(line) for line in (folder / "cloned.jsonl").read_text().splitlines()]
    for _, phase in groupby(lines, key=lambda line: line["phase"]):
        for line, new_id in zip(phase, new_names(chat, paths.config.seed), strict=False):
            old_id = {new: old for old, new in new_id.items()}
            text = chat.decode([old_id.get(token, token) for token in line["input_ids"]])
            row = questions[int(line["episode"].rpartition("-")[2])]
            play = read_play(text)
            if play.question != row["prompt"][-1]["content"]:
                raise AgentR1Error(
                    f"{folder}: {line['episode']} asks {play.question!r}, which is not the "
                    "question of its data; make the cold start again",
                    code="damaged_demonstrations",
                )
            yield play, row


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Count what the cloned demonstrations show.",
        epilog="example: python -m agent_r1_recipes.laptop.cloned --preset discover --seed 1",
    )
    parser.add_argument("--preset", default="discover", help="preset (default: discover)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cold start (default: 0)")
    arguments, settings = parser.parse_known_args()
    paths = Workspace(load_config(arguments.preset, settings, seed=arguments.seed))
    folder = paths.require(paths.cold_start, "cold-start")
    counts = count_cloned(paths, folder)
    if counts is None:
        parser.error(f"the demonstrator of {arguments.preset} is no explorer")
    for sentence in count_sentences(counts):
        say(sentence)


def count_sentences(counts: dict[str, Any]) -> Iterator[str]:
    """Yield the counts in words."""
    for kind, numbers in counts["by_kind"].items():
        yield (
            f"{kind}: {numbers['plays']} plays cloned, {numbers['right']} right, "
            f"{numbers['whole_chain']} with the whole chain"
        )
    next_item = counts["next_item"]
    low, high = next_item["ci95"]
    yield (
        f"the plan's next item, in questions of several hops: chosen {next_item['chosen']} of "
        f"{next_item['choices']} times; minus any other item {next_item['margin']:+.3f} "
        f"(95 % {low:+.3f} to {high:+.3f})"
    )


if __name__ == "__main__":
    main()
