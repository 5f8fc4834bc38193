"""Define what training changes (policy, critic, optimisers), and take an optimiser step.

In: a model folder's network and its settings. Out: a `Learner`, which `loop.py` changes in place.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from agent_r1.config.settings import ActorConfig, CriticConfig
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model.decoder import Decoder
from agent_r1.training.forward import Critic


@dataclass
class Learner:
    """Everything that training changes, which is what a checkpoint stores."""

    actor: Decoder
    actor_optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    step: int = 0  # RL steps done


def make_learner(model: Decoder, actor: ActorConfig, critic: CriticConfig | None = None) -> Learner:
    """Make optimisers and, for PPO, a critic.

    It starts as a copy of the policy, which can read the task.
    """
    learner = Learner(model, adamw(model, actor.lr, actor.weight_decay))
    if critic is not None:
        learner.critic = Critic(copy.deepcopy(model)).to(model.embed.weight.device)
        learner.critic_optimizer = adamw(learner.critic, critic.lr, 0.0)
    return learner


def adamw(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay, fused=True
    )


def optimize(
    model: torch.nn.Module, max_norm: float, who: str, *optimizers: torch.optim.Optimizer
) -> float:
    """Clip the gradient, step, clear. Return the norm before clipping. Raise AgentR1Error if it is
    not finite. The optimizers share the model's weights among them."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    refuse_gradient(norm, who)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return norm


def refuse_gradient(norm: float, who: str) -> None:
    """Raise AgentR1Error for a gradient that is not finite.

    One step would make every weight NaN.
    """
    if not math.isfinite(norm):
        raise AgentR1Error(
            f"{who} has a gradient of norm {norm}; the update was skipped, and all checkpoints are "
            "good. Start a new run (--run NAME) with a smaller learning rate",
            code="broken_gradient",
        )


def linear_decay(step: int, steps: int, warmup_steps: int, final: float) -> float:
    """Return the learning rate's factor: linear warm-up, then linear decay to `final`.

    `step` starts at 1.
    """
    warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warm * (1 - (1 - final) * min((step - 1) / max(steps - 1, 1), 1.0))
