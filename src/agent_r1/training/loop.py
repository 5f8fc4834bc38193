"""Run PPO and GRPO for multi-turn agents in one process.

In: a policy that knows the format (from a cold start, or an instruct model), rows, and a function
that makes their environments. Out: a better policy. The loop knows no tool, dialect, data set or
reward, only `AgentEnv` (core.py). `train` is the algorithm; its two updates follow:

    for each RL step
        1  sample   G episodes for each of the step's prompts             rollout/
        2  rows     tokens, action masks, rewards on action tokens        rollout/training_rows.py
        3  predict  critic: V(s_t) (ppo); reference: log pi_ref (KL)      training/forward.py
        4  credit   advantages: grpo compares the group, ppo runs GAE     training/advantages.py
        5  critic   fit V to the returns (ppo)                            training/losses.py
        6  policy   clipped surrogate on action tokens                    training/losses.py
        7  record   metrics, transcripts, evaluation, checkpoint

Only phases 1 and 2 are specific to agents. The rest is the PPO of 2017 (1707.06347) with a mask.
The reading path ends here: `model/sampler.py` makes phase 1 fast, and `run.py` wraps the loop
into a run on disk.

Skipped when not needed:

* *Recomputing old log-probabilities.* log pi_old is the sampler's. In float32 the two agree to
  2e-5. In bfloat16 they round differently, and the ratio then is also the importance weight that
  corrects for this; the clip bounds it.
* *Removing padding.* Rows of similar length are batched instead.
* *Computing again* a beginning that samples of a prompt have in common (`prefix_tree.py`).
* *The reference model*, if the KL weight is 0.
* *Rows whose advantages are all zero* (a group with equal scores), if the loss has no KL or entropy
  term. Their gradient is then exactly zero. They still count in the loss's denominator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1.config.settings import Config
from agent_r1.core import SAMPLER_GAP, Trajectory
from agent_r1.ground.device import resolve_device
from agent_r1.model.decoder import Decoder
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import derive_seed
from agent_r1.rollout.rollouts import Rollouts
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import Estimator
from agent_r1.training.batches import make_batch, minibatches
from agent_r1.training.forward import (
    action_logprobs,
    action_values,
    autocast,
    batch_logprobs,
    in_micro_batches,
)
from agent_r1.training.learner import Learner, linear_decay, optimize
from agent_r1.training.losses import (
    Ratios,
    aggregate_loss,
    episode_tokens,
    kl_penalty,
    loss_normalizer,
    policy_loss,
    value_loss,
)
from agent_r1.training.metrics import (
    GAP_ROW_STRIDE,
    Clock,
    Means,
    explained_variance,
    rollout_metrics,
    sampler_gap,
)  # fmt: skip
from agent_r1.training.prefix_tree import micro_batches_of


@dataclass(frozen=True)
class Parts:
    """What settings choose by name, as objects: `parts.py` resolves the names before the loop."""

    rollouts: Rollouts
    """Play the episodes of a step, with `policy`."""
    policy: LocalPolicy
    """Samples the training episodes: `evaluated`, unless a setting selects another policy."""
    evaluated: LocalPolicy
    """Has the trainer's weights."""
    estimate: Estimator
    """Computes the advantages: grpo, ppo or one of a recipe."""
    ratios: Ratios
    """The ratios that the policy's loss clips: of tokens, or means over spans."""


def train(
    config: Config,
    parts: Parts,
    learner: Learner,
    on_step: Callable[[dict[str, float], list[Trajectory], Batch], None],
    evaluate: Callable[[LocalPolicy], dict[str, float]],
    save: Callable[[Learner], None],
    reference: Decoder | None = None,
) -> None:
    """Run the remaining RL steps of `learner`, in place.

    `on_step` records a finished step, `evaluate` scores a policy on held-out questions, `save`
    writes a checkpoint.
    """
    trainer = config.trainer
    device, dtype = resolve_device(trainer.device, trainer.dtype)

    def due(every: int) -> bool:
        return learner.step % every == 0 or learner.step == trainer.steps

    # Questions and passages stay until the end: the collector need not look at them in every step.
    gc.collect()
    gc.freeze()
    while learner.step < trainer.steps:
        step = learner.step + 1
        clock = Clock()
        # The sampler gets the weights of the last update. So log-probabilities that it records are
        # those of pi_old, the policy that the ratios of phase 6 divide by.
        parts.policy.sync(learner.actor)

        # 1  sample. The lessons' run plays 16 questions, 8 times each: 128 episodes at once. Their
        # randomness depends only on (seed, step, question, sample), so a resumed run repeats them.
        episodes = parts.rollouts.play(step)
        clock.lap("gen")

        # 2  rows. One row per episode, or several if its context was rewritten. Most tokens of a
        # row were only read: in one group of eight, 174 of 764 are actions (lesson 3).
        batch = make_batch(episodes.chosen, parts.estimate).to(device)

        # 3  predict. Before the first update, because the clip and the critic's targets are
        # relative to what these weights say (lesson 7).
        same_weights = parts.policy.has_trainer_weights
        metrics = predict(learner, reference, batch, config, dtype, same_weights)
        clock.lap("values")

        # 4  credit. Needs the whole batch: grpo compares the eight attempts at a question, ppo
        # whitens over all action tokens (lesson 5).
        batch.advantages_BT, batch.returns_BT = parts.estimate(batch, config.advantage)
        clock.lap("adv")

        # 5  critic. grpo has none: the group's mean is its baseline. Some estimators with one fit
        # V at fewer tokens than they credit (steppo: once per turn).
        if learner.critic is not None:
            targets = replace(batch, mask_BT=parts.estimate.critic_mask(batch))
            metrics |= update_critic(learner, targets, config, step, dtype)
            clock.lap("update_critic")

        # 6  policy. A critic learns alone in the first `warmup_steps`, because advantages computed
        # from its early values would be noise (lesson 6).
        if learner.critic is None or step > config.critic.warmup_steps:
            metrics |= update_actor(learner, batch, config, step, dtype, parts.ratios)
        clock.lap("update_actor")

        # 7  record. The step counts as done only now: a checkpoint with this number has its
        # weights, and a resumed run continues with the next step. Lesson 9 reads the curves.
        learner.step = step
        metrics |= rollout_metrics(episodes.played, batch, parts.policy.stats, clock)
        metrics |= episodes.metrics | batch.metrics
        clock.lap("other")
        if trainer.eval_every and due(trainer.eval_every):
            parts.evaluated.sync(learner.actor)
            metrics |= evaluate(parts.evaluated)
            clock.lap("testing")
        on_step(metrics | clock.seconds(), episodes.played, batch)
        if due(trainer.save_every):
            save(learner)


def predict(
    learner: Learner,
    reference: Decoder | None,
    batch: Batch,
    config: Config,
    dtype: torch.dtype,
    same_weights: bool,
) -> dict[str, float]:
    """Phase 3: predict log-probabilities and values before any update. The clipped ratio is
    relative to these values.

    `same_weights`: the sampler has the trainer's. Then one row in GAP_ROW_STRIDE is recomputed to
    check that the two agree. Otherwise the trainer's log-probabilities replace `logprobs_BT`.
    """
    micro_tokens = config.trainer.max_tokens_per_microbatch
    temperature = config.rollout.temperature
    rows_to_check = batch
    if same_weights:
        # 1 row in 32: enough to see that sampler and trainer agree, at 3 % of a forward pass.
        rows_B = torch.arange(0, len(batch), GAP_ROW_STRIDE, device=batch.ids_BT.device)
        rows_to_check = batch[rows_B]
    now_BT = batch_logprobs(learner.actor, rows_to_check, temperature, micro_tokens, dtype)
    # Measured before the recorded values are replaced, so that it always compares with them.
    gap = sampler_gap(rows_to_check, now_BT)
    if not same_weights:
        batch.logprobs_BT = now_BT
    if learner.critic is not None:

        def values_of(part: Batch) -> Tensor:
            return action_values(learner.critic, part)

        batch.values_BT = in_micro_batches(values_of, batch, micro_tokens, dtype)
    if reference is not None:
        batch.ref_logprobs_BT = batch_logprobs(reference, batch, temperature, micro_tokens, dtype)
    return {SAMPLER_GAP: gap}


# -------------------------------------------------------------------------------------- the updates


def update_critic(
    learner: Learner, batch: Batch, config: Config, step: int, dtype: torch.dtype
) -> dict[str, float]:
    """Phase 5: fit V(s_t) to the returns, where the mask is 1."""
    assert learner.critic is not None and learner.critic_optimizer is not None
    critic = config.critic
    means = Means()
    # Before the update: afterwards it would say how well V was fitted, not how well it predicted.
    explained_var = explained_variance(batch.values_BT, batch.returns_BT, batch.mask_BT)
    shuffle_seed = derive_seed(config.seed, "critic", step)
    for minibatch_B in minibatches(batch, critic.minibatches, critic.epochs, shuffle_seed):
        # Counted over the minibatch, not over a micro-batch: the gradients of its micro-batches
        # add up, so each must divide by the same number (lesson 6).
        normalizer = loss_normalizer(batch.mask_BT[minibatch_B], "token-mean")
        for _, part in micro_batches_of(
            batch, config.trainer.max_tokens_per_microbatch, minibatch_B
        ):
            with autocast(dtype, part.ids_BT.device):
                values_BT = action_values(learner.critic, part)
            loss_BT, stats = value_loss(
                values_BT, part.values_BT, part.returns_BT, part.mask_BT, critic.value_clip
            )
            loss = aggregate_loss(loss_BT, part.mask_BT, "token-mean", normalizer)
            # Gradients add up over micro-batches; the optimiser steps once per minibatch.
            loss.backward()
            # Weighted by action tokens, because micro-batches have different numbers of them.
            means.add(part.mask_BT.sum().item(), stats)
            means.add_loss("critic/vf_loss", loss.item())
        norm = optimize(
            learner.critic, critic.grad_clip, f"step {step}: the critic", learner.critic_optimizer
        )
        means.finish_update({"critic/grad_norm": norm})
    return means.result() | {"critic/vf_explained_var": explained_var, "critic/lr": critic.lr}


def update_actor(
    learner: Learner,
    batch: Batch,
    config: Config,
    step: int,
    dtype: torch.dtype,
    ratios: Ratios,
) -> dict[str, float]:
    """Phase 6: `epochs` x `minibatches` optimiser steps on the clipped surrogate."""
    actor = config.actor
    means = Means()
    # The learning rate falls linearly to a tenth (`actor.lr_final`). It depends on the step only,
    # so resuming needs no state of a scheduler.
    lr = actor.lr * linear_decay(step, config.trainer.steps, actor.warmup_steps, actor.lr_final)
    for group in learner.actor_optimizer.param_groups:
        group["lr"] = lr
    # Counted before rows are cut into micro-batches, which may part the rows of an episode.
    batch = replace(batch, episode_tokens_B=episode_tokens(batch.mask_BT, batch.trajectory_B))
    # Without a KL or entropy term, a row of zero advantages has zero gradient: skip it. In the
    # first step of the lessons' run these are 0.4375 of the rows (7 of 16 groups, lesson 7).
    skip = actor.entropy_coef == 0 and (actor.kl_coef == 0 or actor.kl_in == "reward")
    shuffle_seed = derive_seed(config.seed, "actor", step)
    # With two minibatches the ratio is 1 in the first, and the clip can act in the second.
    for minibatch_B in minibatches(batch, actor.minibatches, actor.epochs, shuffle_seed):
        normalizer = loss_normalizer(
            batch.mask_BT[minibatch_B],
            actor.loss_aggregation,
            config.rollout.max_context,
            batch.trajectory_B[minibatch_B],
        )
        if skip:
            # After the normalizer: skipped rows count in it, or the other rows would weigh more.
            learns_B = (batch.advantages_BT[minibatch_B] != 0).any(dim=1)
            add_skipped(means, learner.actor, batch, minibatch_B[~learns_B], config, dtype, ratios)
            minibatch_B = minibatch_B[learns_B]
        for _, part in micro_batches_of(
            batch, config.trainer.max_tokens_per_microbatch, minibatch_B
        ):
            with autocast(dtype, batch.ids_BT.device):
                loss = actor_loss(learner.actor, part, normalizer, config, means, ratios)
            loss.backward()
        # If every row was skipped, gradients are None, so AdamW leaves the weights as they are.
        # Zero gradients would not: momentum would still move the weights.
        norm = optimize(
            learner.actor, actor.grad_clip, f"step {step}: the policy", learner.actor_optimizer
        )
        means.finish_update({"actor/grad_norm": norm})
    return means.result() | {"actor/lr": lr}


def actor_loss(
    actor: Decoder,
    part: Batch,
    normalizer: float,
    config: Config,
    means: Means,
    ratios: Ratios,
) -> Tensor:
    """Compute the loss of one micro-batch, divided by the minibatch's normalizer."""
    settings = config.actor
    mask_BT = part.mask_BT
    mode = settings.loss_aggregation
    # The entropy is computed only if it is in the loss: it needs as much memory as the logits.
    logprobs_BT, entropy_BT = action_logprobs(
        actor, part, config.rollout.temperature, settings.entropy_coef != 0
    )
    loss_BT, stats = policy_loss(
        logprobs_BT,
        part.logprobs_BT,
        part.advantages_BT,
        mask_BT,
        clip_low=settings.clip.low,
        clip_high=settings.clip.high,
        clip_dual=settings.clip.dual,
        ratios=ratios,
    )
    loss = aggregate_loss(loss_BT, mask_BT, mode, normalizer, part.episode_tokens_B)
    means.add(mask_BT.sum().item(), stats)
    means.add_loss("actor/pg_loss", loss.item())
    if settings.entropy_coef:
        # Subtracted, because the optimiser minimises: more entropy means more exploration.
        entropy = aggregate_loss(entropy_BT, mask_BT, mode, normalizer, part.episode_tokens_B)
        loss = loss - settings.entropy_coef * entropy
    # With `kl_in: reward` the KL is in the rewards already (parts.py): twice would be too much.
    if part.ref_logprobs_BT is not None and settings.kl_in == "loss":
        kl_BT = kl_penalty(logprobs_BT, part.ref_logprobs_BT, settings.kl_estimator)
        kl = aggregate_loss(kl_BT, mask_BT, mode, normalizer, part.episode_tokens_B)
        means.add_loss("actor/kl_loss", kl.item())
        loss = loss + settings.kl_coef * kl
    return loss


KL_ROW_STRIDE = 8
"""Every eighth skipped row is measured for `actor/ppo_kl`; all of them would cost time."""


def add_skipped(
    means: Means,
    actor: Decoder,
    batch: Batch,
    rows_B: Tensor,
    config: Config,
    dtype: torch.dtype,
    ratios: Ratios,
) -> None:
    """Count the skipped rows' tokens in the logged means, as verl does.

    With zero advantages nothing is clipped. The policy's move on these rows is estimated from a
    sample of them.
    """
    if len(rows_B):
        # Counted like the others, or `actor/pg_clipfrac` would jump whenever groups agree.
        part = batch[rows_B[::KL_ROW_STRIDE]]
        now_BT = batch_logprobs(
            actor, part, config.rollout.temperature, config.trainer.max_tokens_per_microbatch, dtype
        )
        clip = config.actor.clip
        _, stats = policy_loss(
            now_BT,
            part.logprobs_BT,
            torch.zeros_like(now_BT),
            part.mask_BT,
            clip_low=clip.low,
            clip_high=clip.high,
            clip_dual=clip.dual,
            ratios=ratios,
        )
        means.add(batch.mask_BT[rows_B].sum().item(), stats)
