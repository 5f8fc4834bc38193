"""Measure when step-level credit pays, in lesson 11's corridor.

    python lab/experiments/corridor.py

A corridor has R rooms with two doors each, one of them right. The policy is a table: it takes the
right door with probability 1/2. All rooms matter equally, so the true gradient has the same entry
for every room. An estimator of the project estimates it from a group of eight walks. The figure is
the mean cosine between the two over groups: 1 is the right direction, 0 is noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_r1.rollout.columns import Columns
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.parts import get_estimator
from agent_r1_recipes.credit.settings import CreditAdvantage

ROOMS = (2, 8, 32)
ARMS = {
    "grpo": CreditAdvantage(),
    "gigpo": CreditAdvantage(),
    "gigpo, gamma 0": CreditAdvantage(gamma=0.0),
    "steppo": CreditAdvantage(normalize_std=False),
}
PAID = ("in each room", "at the end")


def walks(rooms: int, payment: str, groups: int, size: int = 8) -> tuple[Batch, Tensor]:
    """Make groups of walks, a token per room, and which doors were right, [B, R].

    A walk earns its share of right doors.
    """
    B = groups * size
    right_BR = torch.rand(B, rooms, generator=torch.Generator().manual_seed(0)) < 0.5
    reward_BR = right_BR.float() / rooms
    left_R = torch.arange(rooms, 0, -1) / rooms
    if payment == "at the end":
        reward_BR = torch.zeros(B, rooms).index_add_(
            1, torch.tensor([rooms - 1]), reward_BR.sum(dim=1, keepdim=True)
        )
        left_R = torch.ones(rooms)
    room_BR = torch.arange(rooms).repeat(B, 1)
    batch = Batch(
        mask_BT=torch.ones(B, rooms, dtype=torch.long),
        rewards_BT=reward_BR,
        groups=[f"{i // size}" for i in range(B)],
        trajectory_B=torch.arange(B),
        steps_BT=room_BR,
        columns=Columns({"states_BT": room_BR}),
        values_BT=(0.5 * left_R).repeat(B, 1),  # a perfect critic that knows the room
    )
    return batch, right_BR


def cosine(arm: str, rooms: int, payment: str, groups: int = 25) -> float:
    """Mean cosine between a group's policy gradient and the true gradient."""
    batch, right_BR = walks(rooms, payment, groups)
    advantages_BR, _ = get_estimator(arm.split(",")[0])(batch, ARMS[arm])
    gradients = ((right_BR.float() - 0.5) * advantages_BR).view(groups, -1, rooms).sum(dim=1)
    return torch.nn.functional.cosine_similarity(gradients, torch.ones(1, rooms)).mean().item()


def table() -> str:
    lines = [f"| reward paid | rooms | {' | '.join(ARMS)} |", "|---|---|" + "---|" * len(ARMS)]
    for paid in PAID:
        for rooms in ROOMS:
            cells = (f"{cosine(arm, rooms, paid):.2f}" for arm in ARMS)
            lines.append(f"| {paid} | {rooms} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
