"""Clone a demonstrator's behaviour by supervised learning on its tokens.

In: training sequences, played or recorded. Out: a model that plays like them. `stage.py` chooses
both, and the phases. Next: `loop.py`, since RL needs a model that sometimes succeeds. The loss is
on action tokens only, as in RL.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agent_r1.cold_start.muon import Muon
from agent_r1.model.decoder import Decoder
from agent_r1.rollout.training_rows import Batch, TrainingRow, collate
from agent_r1.training.batches import micro_batches
from agent_r1.training.forward import action_logprobs, autocast, batch_logprobs
from agent_r1.training.learner import optimize

CHECK_EVERY = 20
"""Steps between two looks at the held-out demonstrations."""
PATIENCE = 8
"""Looks without a better loss, after which cloning stops."""
GAIN = 0.03
"""A better loss is lower by this share.

The last few per cent are learned by heart: they cost entropy, which RL needs.
"""
LEARNED = 0.002
"""Held-out loss, in nats per token, below which there is nothing left to clone."""
HELD_OUT_TOKENS = 8192
"""Tokens of held-out demonstrations, at most.

A look then costs an eighth of the steps before it.
"""

WEIGHT_DECAY = 0.01
"""Of AdamW and Muon: a step takes this share, times the learning rate, from every weight."""
COPY_DECAY_OF_FEW = 3.0
MIX_DECAY_OF_FEW = 1.0
"""Weight decay of the two phases where the demonstrations are few.

Weights that only know one question by heart shrink faster than its next turn renews them. Weights
that many questions share are renewed in each step. docs/tutorial/your-own-data.md has what this
changes. With 10, a model learns nothing.
"""


@dataclass(frozen=True)
class Lesson:
    """Demonstrations for a phase of cloning."""

    rows: Sequence[TrainingRow]
    held_out: Sequence[TrainingRow] = ()
    """Not cloned: they measure when the phase should stop. Empty: it takes all its steps."""


@dataclass(frozen=True)
class Phase:
    """A phase of cloning: what it clones, for how long, and how its optimisers move."""

    name: str
    lesson: Lesson
    steps: int
    """At most; 0 leaves the phase out."""
    tokens: int
    """In each step, about.

    The held-out rows are read in pieces of as many, so they need no more memory than a step.
    """
    lr: float
    """Largest learning rate: after the warm-up, before it falls."""
    weight_decay: float = WEIGHT_DECAY
    muon: bool = False
    """Whether the layers' matrices take Muon's steps (`make_optimizers` says why)."""
    embedding_lr: float | None = None
    """With `muon`: the learning rate of AdamW, which moves the other weights. None: `lr`."""


class Ending(NamedTuple):
    """How a phase ended."""

    steps: int
    """Taken."""
    held_out_loss: float | None = None
    """The best one in nats per action token, whose weights are kept; None without held-out rows."""


class HeldOut:
    """Demonstrations of questions that are not cloned, and the weights that predict them best.

    A model that memorises its demonstrations predicts those of other questions worse and worse. So
    cloning stops when the held-out loss no longer falls, and the best weights are taken back.
    """

    def __init__(self, rows: Sequence[TrainingRow], max_tokens: int):
        tokens = 0
        chosen_rows: list[TrainingRow] = []
        for row in rows:
            tokens += len(row.input_ids)
            if chosen_rows and tokens > HELD_OUT_TOKENS:
                break
            chosen_rows.append(row)
        self.batch = collate(chosen_rows)
        self.max_tokens = max_tokens
        self.best_loss = float("inf")
        self.best_weights: dict[str, Tensor] = {}
        self.looks_since_best = 0

    def look(self, model: Decoder, dtype: torch.dtype) -> bool:
        """Measure the held-out loss, in nats per action token. Return whether to stop."""
        batch = self.batch.to(model.embed.weight.device)
        logprobs_BT = batch_logprobs(model, batch, 1.0, self.max_tokens, dtype)
        loss = (-logprobs_BT.sum() / batch.mask_BT.sum()).item()
        self.looks_since_best += 1
        if loss < (1 - GAIN) * self.best_loss:
            self.best_loss = loss
            self.best_weights = copy.deepcopy(model.state_dict())
            self.looks_since_best = 0
        return self.looks_since_best >= PATIENCE or self.best_loss < LEARNED

    def restore(self, model: Decoder) -> None:
        """Take back the best weights, if any were seen."""
        if self.best_weights:
            model.load_state_dict(self.best_weights)


def clone(
    model: Decoder,
    phase: Phase,
    seed: int,
    on_step: Callable[[int, float], None],
    dtype: torch.dtype = torch.float32,
) -> Ending:
    """Train on the action tokens of a phase's rows: mean cross-entropy, warm-up, linear decay.

    With held-out rows, stop when their loss no longer falls, and end with the best weights so far.
    `on_step` gets each step's number, from 0, and its loss in nats per token.
    """
    if not phase.steps:  # a phase can be left out: cold_start.copy_steps=0
        return Ending(0)
    held_out = HeldOut(phase.lesson.held_out, phase.tokens) if phase.lesson.held_out else None
    batch = collate(phase.lesson.rows)
    device = model.embed.weight.device
    optimizers = make_optimizers(model, phase)
    # 20 steps of warm-up, since an optimiser's averages know one batch at first. Then the rate
    # falls in a line to 5 %, so that the last batches, as noisy as the first, move little.
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.05, 1 - step / phase.steps)
        )
        for optimizer in optimizers
    ]
    batches = _endless_batches(batch, phase.tokens, seed)
    taken = 0
    for step in range(phase.steps):
        part = batch[next(batches)].to(device)
        with autocast(dtype, device):
            logprobs_BT, _ = action_logprobs(model, part)
        # Over action tokens only, as in RL: the agent never has to write what a tool returns.
        loss = -logprobs_BT.sum() / part.mask_BT.sum()
        loss.backward()
        optimize(model, 1.0, f"cold start, step {step + 1}: the model", *optimizers)
        for schedule in schedules:
            schedule.step()
        on_step(step, loss.item())
        taken = step + 1
        due = taken % CHECK_EVERY == 0 or taken == phase.steps
        if held_out and due and held_out.look(model, dtype):
            break
    if not held_out:
        return Ending(taken)
    held_out.restore(model)
    return Ending(taken, held_out.best_loss)


def make_optimizers(model: Decoder, phase: Phase) -> list[torch.optim.Optimizer]:
    """Return AdamW for all weights; with `muon`, Muon for the matrices of the layers.

    AdamW divides each weight's step by that weight's usual gradient. Muon looks at a matrix as a
    whole (`muon.py`). For rare second syllables, half of the steps are enough (docs/lab/laptop.md).
    Embeddings, gains and biases are no maps between vectors and keep AdamW.

    Muon's steps are as long as AdamW's, so one learning rate *can* serve both. Copying comes sooner
    if AdamW has a larger one (`embedding_lr`; None: `lr`). Measured were 4 to 8 times `lr`. Why was
    not.
    """
    matrices: list[torch.nn.Parameter] = []
    if phase.muon:
        matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    in_matrices = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in in_matrices]
    # beta2=.98 averages squared gradients over about 50 steps. PyTorch's .999 would need 1,000, and
    # a phase has a few hundred. With .95, four of four runs copied worse (docs/lab/laptop.md).
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            others,
            phase.embedding_lr or phase.lr,
            betas=(0.9, 0.98),
            weight_decay=phase.weight_decay,
            fused=True,
        )
    ]
    if matrices:
        optimizers.append(Muon(matrices, phase.lr, phase.weight_decay))
    return optimizers


def _endless_batches(batch: Batch, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of similar length, about `tokens` tokens per batch, in random order."""
    g = torch.Generator().manual_seed(seed)
    while True:
        # A little noise on the lengths varies the batches from epoch to epoch.
        noisy = batch.lengths_B + torch.randint(0, 8, batch.lengths_B.shape, generator=g)
        groups = list(micro_batches(noisy, tokens))
        for i in torch.randperm(len(groups), generator=g).tolist():
            yield groups[i]
