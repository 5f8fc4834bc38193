"""Make the parts of the loop that settings choose: estimator, policy, rollouts, ratios.

In: the configuration. Out: objects for `loop.train` and verl's trainer. Their names are in
names.toml and recipe.toml. The tables `[rollouts]`, `[policy]` and `[credit]` there name wrappers
for settings that differ from their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from agent_r1.config import tables
from agent_r1.config.settings import ActorConfig, AdvantageConfig, Config
from agent_r1.core import AgentEnv, Row
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.decoder import Decoder
from agent_r1.rollout.rollouts import Greedy, Rollouts, make_flow, tasks_of_step
from agent_r1.rollout.sampler import LocalPolicy
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import Estimator
from agent_r1.training.losses import kl_penalty


def get_estimator(name: str) -> Estimator:
    """Return the estimator `name`. Raise ConfigError with the nearest match."""
    return tables.resolve("estimator", name, "algorithm")


def make_estimator(config: Config) -> Estimator:
    """Make the estimator of a run, with its wrappers."""
    estimate = get_estimator(config.algorithm)
    if config.actor.kl_coef and config.actor.kl_in == "reward":
        estimate = _less_kl(estimate, config)
    return with_settings(estimate, config)


def reward_less_kl(
    rewards_BT: Tensor,
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    actor: ActorConfig,
) -> tuple[Tensor, float]:
    """Subtract `kl_coef` times the KL penalty from each action token's reward. Also return the mean
    KL, in nats."""
    kl_BT = torch.where(
        mask_BT.bool(), kl_penalty(logprobs_BT, ref_logprobs_BT, actor.kl_estimator), 0.0
    )
    return rewards_BT - actor.kl_coef * kl_BT, (kl_BT.sum() / mask_BT.sum()).item()


def with_settings(estimate: Estimator, config: Config) -> Estimator:
    """Wrap `estimate` as the table `credit` says."""
    for wrap in tables.for_changed_settings("credit", **dict(config)):
        estimate = wrap(estimate, config)
    return estimate


def _less_kl(inner: Estimator, config: Config) -> Estimator:
    """Subtract the KL to the reference from the rewards before `inner`."""

    def credit(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        batch.rewards_BT, batch.metrics["actor/reward_kl_penalty"] = reward_less_kl(
            batch.rewards_BT,
            batch.logprobs_BT,
            batch.ref_logprobs_BT,
            batch.mask_BT,
            config.actor,
        )
        return inner(batch, advantage)

    return replace(inner, credit=credit)


def make_policy(
    actor: Decoder, chat: ChatFormat, config: Config, exact: LocalPolicy
) -> LocalPolicy:
    """Return the policy that plays a step's episodes: `exact`, unless a setting replaces it."""
    made = [
        make(actor, chat.stop_ids, config.rollout)
        for make in tables.for_changed_settings("policy", **dict(config))
    ]
    return made[-1] if made else exact


def make_rollouts(
    policy: LocalPolicy,
    chat: ChatFormat,
    make_env: Callable[[Row], AgentEnv],
    questions: list[Row],
    config: Config,
) -> Rollouts:
    """Make the rollouts of a run, with their wrappers."""
    flow = make_flow(policy, chat, make_env, config.rollout, config.env)

    def tasks(step: int, again: int):
        return tasks_of_step(questions, step, config.rollout, config.seed, again)

    rollouts = Rollouts(flow, policy, tasks, config.rollout)
    for wrap in tables.for_changed_settings("rollouts", **dict(config)):
        rollouts = wrap(rollouts, config.rollout)
    return Greedy(rollouts) if config.algorithm_has("greedy") else rollouts


def get_ratios(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that `actor.ratio_level` names."""
    return tables.resolve("ratio", name, "actor.ratio_level")
