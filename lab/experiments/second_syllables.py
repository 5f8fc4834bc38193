"""Measure copying in preset `sprint`, with none to all of its three helps.

python lab/experiments/second_syllables.py 304 305        about 110 CPU seconds a seed

Two names in the context may begin with one syllable. Then the first induction head finds two
continuations. `model.induction=bigram` lays out a second one, which compares the token before, too.
Muon replaces AdamW for matrices, and embeddings get a learning rate of their own. Clones the whole
copying phase with each. Prints the loss of correct plays of the 200 validation questions, and of
their second syllables alone. docs/lab/laptop.md ("Two tokens back") has the figures.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch

from agent_r1 import load_config, make_loop
from agent_r1.cold_start.clone import clone
from agent_r1.cold_start.tiny_model import new_model
from agent_r1.rollout.training_rows import collate
from agent_r1.training.forward import batch_logprobs
from agent_r1.workspace import Workspace
from agent_r1_recipes.laptop.demonstrator import Demonstrator, demonstrate_rows, teach
from agent_r1_recipes.laptop.tinyhop import TAILS

ARMS = (
    ("one pair, AdamW", "auto", False, False),
    ("two pairs, AdamW", "bigram", False, False),
    ("two pairs, Muon", "bigram", True, False),
    ("the preset", "bigram", True, True),
)
"""Name, induction heads, whether Muon moves matrices, and embeddings have their own rate."""


def measure(seed: int) -> None:
    """Print the losses after cloning, in nats per episode."""
    paths = Workspace(load_config("sprint", algorithm="grpo", seed=seed))
    paths.make_task()
    chat, copy_rows, _ = teach(paths)
    config = paths.config
    demonstrator = Demonstrator(chat, paths.dialect)
    loop = make_loop(demonstrator, chat, paths.load_tools(), config.rollout, config.env)
    held_rows = demonstrate_rows(paths.load_rows("val"), {"plan": 1.0}, loop, seed, "val")
    test_batch = collate(held_rows)
    assert test_batch.ids_BT is not None  # `collate` fills it
    tails = torch.tensor(chat.tokenizer.convert_tokens_to_ids(list(TAILS)))
    tail_BT = test_batch.mask_BT.bool() & torch.isin(test_batch.ids_BT, tails)
    cold = config.cold_start
    for name, induction, muon, own_rate in ARMS:
        shape = config.model.model_copy(update={"induction": induction})
        model = new_model(shape, len(chat.tokenizer), seed)
        clone(
            model,
            copy_rows,
            cold.copy_steps,
            cold.copy_tokens,
            cold.lr,
            seed,
            lambda step, loss: None,
            muon=muon,
            embedding_lr=cold.embedding_lr if own_rate else None,
        )
        nats_BT = -batch_logprobs(model, test_batch, 1.0, 4096, torch.float32)
        second = nats_BT[tail_BT].sum().item() / len(held_rows)
        whole = nats_BT.sum().item() / len(held_rows)
        print(f"seed {seed}, {name}: {whole:.3f}, second syllables {second:.3f}", flush=True)


def main(seeds: list[str]) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as home:
            os.environ["AGENT_R1_HOME"] = home
            measure(int(seed))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
