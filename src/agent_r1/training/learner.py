"""What learns: policy, critic and their optimisers. Learning rate, one optimiser step, and what a checkpoint has to hold.

In: a model folder's network and its settings. Out: a `Learner`, which `loop.py` changes in place.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from agent_r1.config.settings import ActorConfig, CriticConfig
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.decoder import Decoder
from agent_r1.training.forward import Critic


@dataclass
class Learner:
    """Everything that changes during training, and nothing else: what a checkpoint has to hold."""

    actor: Decoder
    actor_optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    """RL steps done."""


def make_learner(model: Decoder, actor: ActorConfig, critic: CriticConfig | None = None) -> Learner:
    """Optimisers and, for PPO, a critic that starts from the policy's own trunk: it already can read the task."""
    learner = Learner(model, adamw(model, actor.lr, actor.weight_decay))
    if critic is not None:
        learner.critic = Critic(copy.deepcopy(model)).to(model.embed.weight.device)
        learner.critic_optimizer = adamw(learner.critic, critic.lr, 0.0)
    return learner


def adamw(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay, fused=True)


def optimize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, who: str) -> float:
    """Clip, step, clear. Returns the gradient's norm before clipping. Raises AgentR1Error before a step into NaN."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    refuse_gradient(norm, who)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def refuse_gradient(norm: float, who: str) -> None:
    """Raises AgentR1Error for a gradient that is no number: one step along it makes every weight NaN."""
    if not math.isfinite(norm):
        raise AgentR1Error(
            f"{who} has a gradient of norm {norm}; its weights were left as they were, and the checkpoints so far are good. "
            "Set a smaller learning rate, in a run of another name (--run NAME)",
            code="broken_gradient",
        )


def linear_decay(step: int, steps: int, warmup_steps: int, final: float) -> float:
    """Share of the learning rate at this step (from 1): linear warm-up, then linear decay to `final`, where it stays."""
    warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warm * (1 - (1 - final) * min((step - 1) / max(steps - 1, 1), 1.0))
