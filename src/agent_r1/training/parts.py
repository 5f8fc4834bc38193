"""Resolve the names in the settings: the door between a configuration and the loop.

In: the configuration. Out: `Parts` for `loop.train`, which then reads no table; estimator and
ratios for verl's workers, each in its own process. The names are in names.toml and recipe.toml. The
tables `[setting.NAME]` there name wrappers for settings that differ from their defaults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from agent_r1.chat.format import ChatFormat
from agent_r1.config import tables
from agent_r1.config.settings import ActorConfig, AdvantageConfig, Config
from agent_r1.core import AgentEnv, Row
from agent_r1.ground.device import resolve_device
from agent_r1.model.decoder import Decoder
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.rollouts import Greedy, Rollouts, tasks_of_step
from agent_r1.rollout.setup import make_flow
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import Estimator
from agent_r1.training.loop import Parts
from agent_r1.training.losses import Ratios, kl_penalty


def make_parts(
    config: Config,
    actor: Decoder,
    chat: ChatFormat,
    make_env: Callable[[Row], AgentEnv],
    questions: list[Row],
) -> Parts:
    """Make the parts of a run that trains `actor`. `make_env` makes a question's environment."""
    _, dtype = resolve_device(config.trainer.device, config.trainer.dtype)
    # In float32 the sampler shares the trainer's weights; otherwise it needs a rounded copy.
    sampler_model = actor if dtype is torch.float32 else copy.deepcopy(actor).to(dtype)
    evaluated = LocalPolicy(
        sampler_model,
        chat.stop_ids,
        slots=config.rollout.max_concurrent_episodes,
        max_context=config.rollout.max_context,
    )
    policy = make_policy(actor, chat, config, evaluated)
    estimator = make_estimator(config)
    return Parts(
        rollouts=make_rollouts(policy, chat, make_env, questions, config, estimator.greedy),
        policy=policy,
        evaluated=evaluated,
        estimate=estimator,
        ratios=get_ratios(config.actor.ratio_level),
    )


def get_estimator(name: str) -> Estimator:
    """Return the estimator `name`, with its table's facts.

    Raise ConfigError with the nearest match.
    """
    facts = tables.entry_of("estimator", name, "algorithm")
    return replace(
        tables.resolve("estimator", name, "algorithm"),
        groups=bool(facts.get("groups")),
        critic=bool(facts.get("critic")),
        greedy=bool(facts.get("greedy")),
    )


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
    """Subtract `kl_coef` times the KL penalty from each action token's reward.

    Also return the mean KL, in nats.
    """
    kl_BT = torch.where(
        mask_BT.bool(), kl_penalty(logprobs_BT, ref_logprobs_BT, actor.kl_estimator), 0.0
    )
    return rewards_BT - actor.kl_coef * kl_BT, (kl_BT.sum() / mask_BT.sum()).item()


def with_settings(estimate: Estimator, config: Config) -> Estimator:
    """Wrap `estimate` as changed settings require."""
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
    actor: Decoder, chat: ChatFormat, config: Config, evaluated: LocalPolicy
) -> LocalPolicy:
    """Return the policy that plays a step's episodes: `evaluated`, unless a setting replaces it."""
    policy = evaluated
    for make in tables.for_changed_settings("policy", **dict(config)):
        policy = make(actor, chat.stop_ids, config.rollout)
    return policy


def make_rollouts(
    policy: LocalPolicy,
    chat: ChatFormat,
    make_env: Callable[[Row], AgentEnv],
    questions: list[Row],
    config: Config,
    greedy: bool,
) -> Rollouts:
    """Make the rollouts of a run, with their wrappers; `greedy` as in `Estimator`."""
    flow = make_flow(policy, chat, make_env, config.rollout, config.env)

    def tasks(step: int, again: int):
        return tasks_of_step(questions, step, config.rollout, config.seed, again)

    rollouts = Rollouts(flow, policy, tasks, config.rollout)
    for wrap in tables.for_changed_settings("rollouts", **dict(config)):
        rollouts = wrap(rollouts, config.rollout)
    return Greedy(rollouts) if greedy else rollouts


def get_ratios(name: str) -> Ratios:
    """Return the function that `actor.ratio_level` names."""
    return tables.resolve("ratio", name, "actor.ratio_level")
