"""Clone a demonstrator's behaviour by supervised learning on its tokens.

In: training sequences, played or recorded. Out: a model that plays like them. Next: `loop.py`,
since RL needs a model that sometimes succeeds. The loss is on action tokens only, as in RL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from agent_r1.rollout.decoder import Decoder
from agent_r1.rollout.training_rows import Batch, TrainingRow, collate
from agent_r1.training.batches import micro_batches
from agent_r1.training.forward import action_logprobs, autocast
from agent_r1.training.learner import optimize


def clone(
    model: Decoder,
    rows: list[TrainingRow],
    steps: int,
    tokens: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, float], None],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train on the action tokens of `rows`: mean cross-entropy, AdamW, warm-up and linear decay."""
    batch = collate(rows)
    device = model.embed.weight.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
    )
    batches = _endless_batches(batch, tokens, seed)
    for step in range(steps):
        part = batch[next(batches)].to(device)
        with autocast(dtype, device):
            logprobs_BT, _ = action_logprobs(model, part)
        loss = -logprobs_BT.sum() / part.mask_BT.sum()
        loss.backward()
        optimize(model, optimizer, 1.0, f"cold start, step {step + 1}: the model")
        schedule.step()
        on_step(step, loss.item())


def _endless_batches(batch: Batch, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of similar length, about `tokens` tokens per batch, in random order."""
    g = torch.Generator().manual_seed(seed)
    while True:
        # A little noise on the lengths varies the batches from epoch to epoch.
        noisy = batch.lengths_B + torch.randint(0, 8, batch.lengths_B.shape, generator=g)
        groups = list(micro_batches(noisy, tokens))
        for i in torch.randperm(len(groups), generator=g).tolist():
            yield groups[i]
