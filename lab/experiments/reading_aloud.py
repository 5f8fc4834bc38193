"""Measure what the copying phase of the cold start learns last, and whether quoting helps.

.venv/bin/python lab/experiments/reading_aloud.py plain 201    or quoted; 20 CPU seconds each

After a search, the demonstrator of lab/laptop.yaml thinks "answer", and answers. With `quoted` its
thought is the end of the sentence that it has read, such as ` is a book by Dirtax`. The words
follow from the relation that it asked for, and the name follows from the words by the circuit that
`init_weights` lays out. Prints the loss during the copying phase, and afterwards that of answers
in another world. docs/lab/laptop.md has the figures.
"""

from __future__ import annotations

import re
import sys
import time
from statistics import fmean
from typing import Any

import torch

from agent_r1 import (
    ChatFormat,
    ToolCall,
    load_config,
    make_loop,
    train_tokenizer,
)
from agent_r1.cold_start.clone import Lesson, Phase, clone
from agent_r1.cold_start.tiny_model import new_model
from agent_r1.model.decoder import Decoder
from agent_r1.rollout.training_rows import Batch, collate
from agent_r1.training.forward import batch_logprobs
from agent_r1.workspace import Workspace
from agent_r1_recipes.laptop.demonstrator import (
    Demonstrator,
    demonstrate_rows,
    tokenizer_texts,
)

STEPS = 300
WINDOW = 25
"""Steps of a printed mean loss."""


class QuotingDemonstrator(Demonstrator):
    """Play as `Demonstrator`, and quote the passage in the thought before an answer."""

    def _turn(
        self, script: Any, result_names: list[str], result: str
    ) -> tuple[ToolCall | str, str]:
        act, thought = super()._turn(script, result_names, result)
        if isinstance(act, str) and thought == "answer":
            # The words between the names, such as " is a book by ", are one token.
            words = r"((?<=[a-z]) [a-z ]*" + re.escape(act) + r")\b"
            quote = re.search(words, result)
            if quote:
                thought = quote[1]
        return act, thought


def answer_loss(model: Decoder, batch: Batch, chat: ChatFormat) -> tuple[float, float]:
    """Return the mean loss of the answers, and of all other action tokens, in nats."""
    begin, end = chat.tokenizer.convert_tokens_to_ids(["<answer>", "</answer>"])
    after_begin_BT = (batch.ids_BT == begin).cumsum(1) - (batch.ids_BT == begin).long() > 0
    before_end_BT = (batch.ids_BT == end).cumsum(1) == 0
    action_BT = batch.mask_BT.bool()
    answer_BT = action_BT & after_begin_BT & before_end_BT
    logprobs_BT = batch_logprobs(model, batch, 1.0, 4096, torch.float32)
    others_BT = action_BT & ~answer_BT
    return -logprobs_BT[answer_BT].mean().item(), -logprobs_BT[others_BT].mean().item()


def main(arm: str, seed: int) -> None:
    """Clone one-hop demonstrations for STEPS steps, and print the losses."""
    torch.set_num_threads(1)
    config = load_config("lab/laptop.yaml", algorithm="grpo", seed=seed)
    paths = Workspace(config)
    paths.make_task()
    texts = tokenizer_texts(config.data.mix, seed)
    chat = ChatFormat(train_tokenizer(texts, config.model.vocab_size))
    kind = {"plain": Demonstrator, "quoted": QuotingDemonstrator}[arm]
    player = kind(chat, paths.dialect)
    loop = make_loop(player, chat, paths.load_tools(), config.rollout, config.env)

    def demonstrations(split: str):
        rows = [row for row in paths.load_rows(split) if row["extra_info"]["kind"] == "1-hop"]
        return demonstrate_rows(rows, {"good": 1.0}, loop, seed, split)

    model = new_model(config.model, len(chat.tokenizer), seed)
    losses: list[float] = []

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        if len(losses) % WINDOW == 0:
            print(f"{len(losses)}: {fmean(losses[-WINDOW:]):.3f}", flush=True)

    cold = config.cold_start
    rows = demonstrations("cold")
    start = time.process_time()
    clone(model, Phase("copy", Lesson(rows), STEPS, cold.copy_tokens, cold.lr), seed, on_step)
    seconds = time.process_time() - start
    answers, others = answer_loss(model, collate(demonstrations("val")), chat)
    print(f"{arm}, seed {seed}: loss of answers {answers:.3f}, of other tokens {others:.4f}")
    print(f"{seconds:.1f} CPU seconds of cloning")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("plain", "quoted"):
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
