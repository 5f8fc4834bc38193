"""Measure how much of TinyHop's held-out worlds an agent reads in training.

All four worlds share one index.

agent-r1 data --preset lab/laptop.yaml && agent-r1 index --preset lab/laptop.yaml && python
lab/experiments/held_out_reading.py lab/laptop.yaml
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

from agent_r1.config import Config, load_config
from agent_r1.data.storage import read_corpus
from agent_r1.workspace import Workspace
from agent_r1_recipes.laptop.demonstrator import lookups_of, teach
from agent_r1_recipes.laptop.tinyhop_source import TINYHOP


def world_of(config: Config) -> dict[str, str]:
    """Map each name to the split of its world; the corpus lists world after world."""
    folder = Workspace(config).data
    sizes = json.loads((folder / "manifest.json").read_text())["splits"]
    worlds = [split for split in TINYHOP.splits for _ in range(sizes[split]["entities"])]
    return dict(
        zip(
            (passage.title for passage in read_corpus(folder / "corpus.jsonl")), worlds, strict=True
        )
    )


def main(preset: str) -> None:
    config = load_config(preset)
    world = world_of(config)
    queries = [
        lookup["entity"]
        for row in Workspace(config).load_rows("train")
        for lookup in lookups_of(row)
    ]
    titles = [
        hit.title
        for hits in Workspace(config).load_index().search(queries, config.search.top_k)
        for hit in hits
    ]
    shares = Counter(world[title] for title in titles)
    print("RL, the right queries of all training questions: passages shown by world: ", end="")
    print(", ".join(f"{split} {shares[split] / len(titles):.1%}" for split in TINYHOP.splits))

    held_out = {name for name, split in world.items() if split == "test"}
    chat, *phases = teach(Workspace(config))
    for name, rows in zip(("copying", "mixture"), phases, strict=True):
        reads = target = 0
        for row in rows:
            action_ids = [i for i, mask in zip(row.input_ids, row.action_mask, strict=True) if mask]
            whole, own = (
                held_out & set(re.findall("[A-Za-z]+", chat.decode(ids)))
                for ids in (row.input_ids, action_ids)
            )
            reads, target = reads + bool(whole), target + bool(own)
        print(
            f"cold start, {name}: {len(rows)} demonstrations, {reads} show a test name, {target} "
            "teach one as a token"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
