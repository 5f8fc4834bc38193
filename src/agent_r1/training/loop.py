"""The local loop: PPO and GRPO for multi-turn agents, from top to bottom, in one process.

In: a policy that knows the format (cold start, or any Qwen2 instruct model), rows, an environment. Out: a better one.
`train` is the algorithm box; what it calls is below it in the file or has a file of its own:

    for each step
        1  sample      G episodes for each of P prompts                              rollout/
        2  rows        tokens, action masks, rewards on action tokens                rollout/rows.py
        3  predict     critic: V(s_t) (ppo);  reference: log pi_ref (if there is KL)  training/forward.py
        4  credit      advantages: grpo compares the group, ppo runs GAE             training/advantages.py
        5  critic      fit V to the returns (ppo)                                    training/losses.py
        6  policy      clipped surrogate on action tokens                            training/losses.py
        7  record      metrics, transcripts, evaluation, checkpoint

What is special about agents is all in 1 and 2; from 3 on it is the PPO of 2017 with a mask. `run.py` wraps this loop into a
run on disk: read it next.

Left out, and why. *Recomputing old log-probabilities*: sampler and trainer run the same float32 arithmetic here, they
agree to 2e-5, so log pi_old is what the sampler recorded (in bfloat16 it is recomputed: kernels differ there). *Padding
removal*: rows of similar length are batched instead. *A reference model*: only loaded when the KL weight is not 0.
Rows whose advantages are all zero (a group that agrees) are skipped in the update: their gradient is exactly zero. They
still count in the loss's denominator, so skipping changes the time, not the gradient. (In a minibatch of nothing but such
rows no weight has a gradient: None, not 0. AdamW leaves such weights alone, where its momentum would have moved them.)
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from agent_r1.config import ActorConfig, Config
from agent_r1.device import resolve_device
from agent_r1.errors import AgentR1Error
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.episode import Task, derive_seed, make_loop, run_episodes
from agent_r1.rollout.qwen import Qwen
from agent_r1.rollout.rows import Batch, Experience, collate, trajectory_rows
from agent_r1.rollout.sampler import LocalPolicy
from agent_r1.tool import BaseTool
from agent_r1.training.advantages import AdvantageInputs, get_estimator
from agent_r1.training.batches import minibatches, prompts_of_step, usable_trajectories
from agent_r1.training.forward import (
    action_logprobs,
    action_values,
    autocast,
    batch_logprobs,
    in_micro_batches,
    micro_batches,
)
from agent_r1.training.learner import Learner, optimize, schedule, set_learning_rate
from agent_r1.training.losses import (
    aggregate_loss,
    kl_penalty,
    loss_normalizer,
    policy_loss,
    reward_less_kl,
    value_loss,
)
from agent_r1.training.metrics import Clock, Means, explained_variance, rollout_metrics
from agent_r1.types import Row, Sampling, Trajectory


def train(
    config: Config,
    learner: Learner,
    chat: ChatFormat,
    tools: dict[str, BaseTool],
    questions: list[Row],
    on_step: Callable[[dict[str, float], list[Trajectory], Experience], None],
    evaluate: Callable[[LocalPolicy], dict[str, float]],
    save: Callable[[Learner], None],
    reference: Qwen | None = None,
) -> None:
    """Run the remaining RL steps of `learner`, in place.

    `on_step` records a finished step, `evaluate` measures a policy on held-out questions, `save` writes a checkpoint.
    """
    r, t = config.rollout, config.trainer
    estimate = get_estimator(config.algorithm)
    device, dtype = resolve_device(config.trainer)
    sampler_model = learner.actor if dtype is torch.float32 else copy.deepcopy(learner.actor).to(dtype)
    policy = LocalPolicy(sampler_model, chat.stop_ids, slots=r.slots, max_context=r.max_context)
    loop = make_loop(policy, chat, tools, config.rollout, config.env)
    sampling = Sampling(r.max_tokens_per_turn, r.temperature, r.top_p)

    while learner.step < t.steps:
        step, clock = learner.step + 1, Clock()

        # 1  sample. Each episode's randomness hangs on (seed, step, prompt, sample) alone, so a resumed run repeats it.
        policy.sync(learner.actor)
        tasks = [
            Task(row, f"{step}-{p}", f"{step}-{p}-{g}", derive_seed(config.seed, "rollout", step, p, g))
            for p, row in enumerate(prompts_of_step(questions, step, config))
            for g in range(r.samples_per_prompt)
        ]
        trajectories = asyncio.run(run_episodes(loop, tasks, sampling, at_once=r.slots))
        clock.lap("gen")

        # 2  rows. An episode that was broken off says nothing about the policy.
        usable = usable_trajectories(trajectories, config)
        rows = [row for i, x in enumerate(usable) for row in trajectory_rows(x, i)]
        if not rows:
            ends = ", ".join(f"{n} {reason}" for reason, n in Counter(t.stop_reason for t in trajectories).items())
            raise AgentR1Error(
                f"step {step} has nothing to learn from: its episodes ended with {ends}; raise rollout.max_context "
                "(the prompts may overflow it) or env.episode_timeout_s"
            )
        experience = Experience(collate(rows).to(device), rows, usable)

        # 3  predict, before anything is updated: the trust region is measured from here.
        batch = experience.batch
        if dtype is not torch.float32:
            batch.logprobs_BT = batch_logprobs(learner.actor, config, dtype, batch)
        if learner.critic is not None:
            experience.values_BT = in_micro_batches(
                batch, t.micro_tokens, lambda b: action_values(learner.critic, b), dtype
            )
        rewards_BT, metrics = batch.rewards_BT, {}
        if reference is not None:
            experience.ref_logprobs_BT = batch_logprobs(reference, config, dtype, batch)
            if config.actor.kl_in == "reward":
                rewards_BT, metrics["actor/reward_kl_penalty"] = reward_less_kl(
                    rewards_BT, batch.logprobs_BT, experience.ref_logprobs_BT, batch.mask_BT, config.actor
                )
        clock.lap("values")

        # 4  credit.
        a = config.advantage
        credit = estimate(
            AdvantageInputs(
                rewards_BT,
                batch.mask_BT,
                experience.values_BT,
                batch.groups,
                batch.trajectory_B,
                a.gamma,
                a.lam,
                a.normalize_std,
            )
        )
        experience.advantages_BT, experience.returns_BT = credit.advantages_BT, credit.returns_BT
        clock.lap("adv")

        # 5  critic.  6  policy: only once the critic has an idea of the task.
        if learner.critic is not None:
            metrics |= update_critic(learner, experience, config, step, dtype)
            clock.lap("update_critic")
        if learner.critic is None or step > config.critic.warmup_steps:
            metrics |= update_actor(learner, experience, config, step, dtype)
        clock.lap("update_actor")

        # 7  record.
        learner.step = step
        metrics |= rollout_metrics(trajectories, experience, policy, clock, config)
        clock.lap("other")
        if t.eval_every and (step % t.eval_every == 0 or step == t.steps):
            policy.sync(learner.actor)
            metrics |= evaluate(policy)
            clock.lap("testing")
        metrics |= clock.seconds()
        on_step(metrics, trajectories, experience)
        if step % t.save_every == 0 or step == t.steps:
            save(learner)


# ------------------------------------------------------------------------------------------------------ the updates


def update_critic(learner: Learner, x: Experience, config: Config, step: int, dtype: torch.dtype) -> dict[str, float]:
    """Step 5: fit V(s_t) to the returns, at action tokens."""
    c, log = config.critic, Means()
    explained = explained_variance(x.values_BT, x.returns_BT, x.batch.mask_BT)
    set_learning_rate(learner.critic_optimizer, c.lr)
    for minibatch_B in minibatches(x.batch, c.minibatches, c.epochs, derive_seed(config.seed, "critic", step)):
        tokens = loss_normalizer(x.batch.mask_BT[minibatch_B], "token-mean")
        for index in micro_batches(x.batch.lengths_B, config.trainer.micro_tokens, minibatch_B):
            part = x.batch[index]
            T = part.ids_BT.shape[1]
            with autocast(dtype, part.ids_BT.device):
                values_BT = action_values(learner.critic, part)
            old_BT, returns_BT = x.values_BT[index, :T], x.returns_BT[index, :T]
            loss_BT, stats = value_loss(values_BT, old_BT, returns_BT, part.mask_BT, c.value_clip)
            loss = aggregate_loss(loss_BT, part.mask_BT, "token-mean", tokens)
            loss.backward()
            log.add(part.mask_BT.sum().item(), stats)
            log.total("critic/vf_loss", loss.item())
        norm = optimize(learner.critic, learner.critic_optimizer, c.grad_clip, f"step {step}: the critic")
        log.step({"critic/grad_norm": norm})
    return log.means() | {"critic/vf_explained_var": explained, "critic/lr": c.lr}


def update_actor(learner: Learner, x: Experience, config: Config, step: int, dtype: torch.dtype) -> dict[str, float]:
    """Step 6: `epochs` x `minibatches` optimiser steps on the clipped surrogate."""
    a, log, counted_BT = config.actor, Means(), x.batch.mask_BT
    # Without a KL or entropy term, a row of zero advantages has zero gradient: leave it out of the pass.
    skip = a.entropy_coef == 0 and (a.kl_coef == 0 or a.kl_in == "reward")

    logprobs_now = functools.partial(batch_logprobs, learner.actor, config, dtype)
    if not a.mask_tool_tokens:
        x = with_tool_tokens(x, logprobs_now)
        counted_BT = x.batch.mask_BT if a.ablation_normalizer == "masked" else counted_BT
    set_learning_rate(learner.actor_optimizer, a.lr * schedule(step, config))
    for minibatch_B in minibatches(x.batch, a.minibatches, a.epochs, derive_seed(config.seed, "actor", step)):
        normalizer = loss_normalizer(counted_BT[minibatch_B], a.loss_aggregation, config.rollout.max_context)
        if skip:
            learns_B = (x.advantages_BT[minibatch_B] != 0).any(dim=1)
            log_skipped(x.batch, minibatch_B[~learns_B], logprobs_now, a, log)
            minibatch_B = minibatch_B[learns_B]
        for index in micro_batches(x.batch.lengths_B, config.trainer.micro_tokens, minibatch_B):
            with autocast(dtype, counted_BT.device):
                loss = actor_loss(learner.actor, x, index, normalizer, config, log)
            loss.backward()
        norm = optimize(learner.actor, learner.actor_optimizer, a.grad_clip, f"step {step}: the policy")
        log.step({"actor/grad_norm": norm})
    return log.means() | {"actor/lr": a.lr * schedule(step, config)}


def actor_loss(actor: Qwen, x: Experience, index: Tensor, normalizer: float, config: Config, log: Means) -> Tensor:
    """The loss of one micro-batch (rows `index` of the batch), already divided by the minibatch's normalizer."""
    a, part = config.actor, x.batch[index]
    T, mask_BT = part.ids_BT.shape[1], part.mask_BT
    logprobs_BT, entropy_BT = action_logprobs(actor, part, config.rollout.temperature, a.entropy_coef != 0)
    loss_BT, stats = policy_loss(
        logprobs_BT, part.logprobs_BT, x.advantages_BT[index, :T], mask_BT, a.clip_low, a.clip_high, a.clip_dual
    )
    loss = aggregate_loss(loss_BT, mask_BT, a.loss_aggregation, normalizer)
    log.add(mask_BT.sum().item(), stats)
    log.total("actor/pg_loss", loss.item())
    if a.entropy_coef:
        loss = loss - a.entropy_coef * aggregate_loss(entropy_BT, mask_BT, a.loss_aggregation, normalizer)
    if x.ref_logprobs_BT is not None and a.kl_in == "loss":
        kl_BT = kl_penalty(logprobs_BT, x.ref_logprobs_BT[index, :T], a.kl_estimator)
        kl = aggregate_loss(kl_BT, mask_BT, a.loss_aggregation, normalizer)
        log.total("actor/kl_loss", kl.item())
        loss = loss + a.kl_coef * kl
    return loss


WATCHED = 8
"""Of the rows that the update skips, every so many-th is looked at for `actor/ppo_kl`: a pass over all would cost time."""


def log_skipped(
    batch: Batch, rows_B: Tensor, logprobs_now: Callable[[Batch], Tensor], a: ActorConfig, log: Means
) -> None:
    """Count the skipped rows' tokens in the logged means, as verl does. Without an advantage nothing is clipped; how far
    the policy has moved on them is estimated from a part of them."""
    if len(rows_B):
        part = batch[rows_B[::WATCHED]]
        now_BT, zeros_BT = logprobs_now(part), torch.zeros_like(part.rewards_BT)
        _, stats = policy_loss(now_BT, part.logprobs_BT, zeros_BT, part.mask_BT, a.clip_low, a.clip_high, a.clip_dual)
        log.add(batch.mask_BT[rows_B].sum().item(), stats)


def with_tool_tokens(x: Experience, logprobs_now: Callable[[Batch], Tensor]) -> Experience:
    """The ablation of docs/laptop.md: treat everything after the prompt as if the policy had chosen it.

    Nobody sampled the tool's tokens. Their old log-probabilities are those before the update, so they meet the clip, too.
    """
    after_first_BT = x.batch.mask_BT.cumsum(dim=1) > 0
    inside_BT = torch.arange(x.batch.ids_BT.shape[1], device=after_first_BT.device) < x.batch.lengths_B[:, None]
    mask_BT = (after_first_BT & inside_BT).float()
    batch = replace(x.batch, mask_BT=mask_BT)
    batch.logprobs_BT = torch.where(x.batch.mask_BT.bool(), x.batch.logprobs_BT, logprobs_now(batch))
    # A GRPO row has one advantage for all of its tokens: the mean over its action tokens.
    advantage_B = x.advantages_BT.sum(dim=1) / x.batch.mask_BT.sum(dim=1)
    return replace(x, batch=batch, advantages_BT=advantage_B[:, None] * mask_BT)


# --------------------------------------------------------------------------------------------- data, devices, metrics
