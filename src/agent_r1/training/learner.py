"""What learns: policy, critic and their optimisers. Learning rate, one optimiser step, and what a checkpoint has to hold.

In: a model folder's network and the configuration. Out: a `Learner`, which `loop.py` changes in place.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from agent_r1.config import Config
from agent_r1.errors import AgentR1Error
from agent_r1.rollout.qwen import Qwen
from agent_r1.training.forward import Critic


@dataclass
class Learner:
    """Everything that changes during training, and nothing else: what a checkpoint has to hold."""

    actor: Qwen
    actor_optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    """RL steps done."""


def make_learner(config: Config, actor: Qwen, device: str) -> Learner:
    """Optimisers, and for PPO a critic that starts from the policy's own trunk: it already can read the task."""
    a, c = config.actor, config.critic
    actor = actor.to(device)
    learner = Learner(actor, adamw(actor, a.lr, a.weight_decay))
    if config.algorithm == "ppo":
        learner.critic = Critic(copy.deepcopy(actor)).to(device)
        learner.critic_optimizer = adamw(learner.critic, c.lr, 0.0)
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
            "Set a smaller learning rate, in a run of another name (--run NAME)"
        )


def schedule(step: int, config: Config) -> float:
    """Share of the learning rate at this step: linear warm-up, then linear decay to `lr_final`."""
    return linear_decay(step, config.trainer.steps, config.actor.warmup_steps, config.actor.lr_final)


def linear_decay(step: int, steps: int, warmup_steps: int, final: float) -> float:
    """`schedule` in plain numbers, for verl as well. Steps count from 1; behind the last one it stays at `final`."""
    warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    return warm * (1 - (1 - final) * min((step - 1) / max(steps - 1, 1), 1.0))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
