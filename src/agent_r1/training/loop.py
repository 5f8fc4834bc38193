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
import math
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from agent_r1.config import ActorConfig, Config
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.engine import LocalPolicy
from agent_r1.rollout.episode import Task, derive_seed, make_loop, run_episodes
from agent_r1.rollout.qwen import Qwen
from agent_r1.rollout.rows import Batch, TrainingRow, collate, trajectory_rows
from agent_r1.rollout.types import Row, Sampling, Trajectory
from agent_r1.tool import BaseTool
from agent_r1.training.advantages import AdvantageInputs, get_estimator
from agent_r1.training.forward import Critic, action_logprobs, action_values, micro_batches
from agent_r1.training.losses import (
    aggregate_loss,
    kl_penalty,
    loss_normalizer,
    policy_loss,
    reward_less_kl,
    value_loss,
)


@dataclass
class Learner:
    """Everything that changes during training, and nothing else: what a checkpoint has to hold."""

    actor: Qwen
    actor_optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    """RL steps done."""


@dataclass
class Experience:
    """One batch on its way through steps 2 to 6."""

    batch: Batch
    rows: list[TrainingRow]
    trajectories: list[Trajectory]
    """Those that the rows come from; `TrainingRow.trajectory` counts in this list."""
    values_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None


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
    device, dtype = resolve_device(config)
    sampler_model = learner.actor if dtype is torch.float32 else copy.deepcopy(learner.actor).to(dtype)
    policy = LocalPolicy(sampler_model, chat.stop_ids, slots=r.slots, max_context=r.max_context)
    loop = make_loop(policy, chat, tools, config)
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


def minibatches(batch: Batch, count: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Row indices of each optimiser step: trajectories are shuffled and dealt into `count` parts, `epochs` times.

    Whole trajectories, never single rows: the rows of one episode share its advantage.
    """
    g = torch.Generator().manual_seed(seed % 2**63)
    trajectory_B = batch.trajectory_B.cpu()
    for _ in range(epochs):
        order = torch.randperm(int(trajectory_B.max()) + 1, generator=g)
        for part in order.chunk(count):
            yield torch.isin(trajectory_B, part).nonzero()[:, 0].to(batch.ids_BT.device)


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


def batch_logprobs(model: Qwen, config: Config, dtype: torch.dtype, batch: Batch) -> Tensor:
    """log pi [B, T] of the whole batch's action tokens, without gradients."""
    t = config.rollout.temperature
    return in_micro_batches(batch, config.trainer.micro_tokens, lambda b: action_logprobs(model, b, t)[0], dtype)


@torch.no_grad()
def in_micro_batches(batch: Batch, max_tokens: int, forward: Callable[[Batch], Tensor], dtype: torch.dtype) -> Tensor:
    """`forward` over the whole batch, [B, T], a micro-batch at a time and without gradients."""
    out = torch.zeros_like(batch.rewards_BT)
    for index in micro_batches(batch.lengths_B, max_tokens):
        part = batch[index]
        with autocast(dtype, out.device):
            out[index, : part.ids_BT.shape[1]] = forward(part)
    return out


def autocast(dtype: torch.dtype, device: torch.device):
    """Mixed precision: weights and optimiser stay in float32, products run in `dtype`."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32)


# --------------------------------------------------------------------------------------------- data, devices, metrics


def usable_trajectories(trajectories: list[Trajectory], config: Config) -> list[Trajectory]:
    """Without those that were broken off or sampled no token, nor, for grpo, a sample that this has left alone."""
    usable = [t for t in trajectories if not t.stop_reason.broken_off and any(s.action_ids for s in t.steps)]
    members = Counter(t.group_id for t in usable)
    return [t for t in usable if config.algorithm != "grpo" or members[t.group_id] > 1]


def prompts_of_step(questions: list[Row], step: int, config: Config) -> list[Row]:
    """The questions of one step: each epoch is a shuffle of its own, and a step may straddle two epochs."""
    P, n = config.rollout.prompts_per_step, len(questions)
    rows = []
    for position in range((step - 1) * P, step * P):
        epoch, place = divmod(position, n)
        rows.append(questions[epoch_order(n, epoch, config.seed)[place]])
    return rows


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, epoch: int, seed: int) -> list[int]:
    return torch.randperm(
        n, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch) % 2**63)
    ).tolist()


def resolve_device(config: Config) -> tuple[str, torch.dtype]:
    """`auto` to what this machine has. Raises ConfigError when CUDA is asked for and not there."""
    t = config.trainer
    if t.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but PyTorch sees no CUDA GPU; use trainer.device=auto, or run agent-r1 doctor"
        )
    device = ("cuda" if torch.cuda.is_available() else "cpu") if t.device == "auto" else t.device
    dtype = ("bfloat16" if device == "cuda" else "float32") if t.dtype == "auto" else t.dtype
    return device, getattr(torch, dtype)


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


class Means:
    """Weighted means of metrics over micro-batches, and sums over the parts of a loss."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)
        self.steps = 0

    def add(self, weight: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] += weight * value
            self.weights[name] += weight

    def total(self, name: str, value: float) -> None:
        """A part of a minibatch's loss: parts add up within an optimiser step."""
        self.totals[name] += value

    def step(self, values: dict[str, float]) -> None:
        """One optimiser step is over."""
        self.steps += 1
        self.add(1.0, values)

    def means(self) -> dict[str, float]:
        means = {name: self.sums[name] / max(self.weights[name], 1e-12) for name in self.sums}
        return means | {name: value / max(self.steps, 1) for name, value in self.totals.items()}


class Clock:
    """Where a step's time went."""

    def __init__(self):
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def seconds(self) -> dict[str, float]:
        """`timing_s/step` is the sum of the laps without the evaluation, which is no part of the algorithm."""
        step = sum(value for name, value in self.laps.items() if name != "testing")
        return {f"timing_s/{name}": value for name, value in self.laps.items()} | {"timing_s/step": step}


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over action tokens: 1 is a perfect critic, 0 one that knows no more than the mean."""
    values, returns = values_BT[mask_BT.bool()], returns_BT[mask_BT.bool()]
    return (1 - (returns - values).var() / returns.var().clamp(min=1e-8)).item()


def rollout_metrics(
    trajectories: list[Trajectory], x: Experience, policy: LocalPolicy, clock: Clock, config: Config
) -> dict[str, float]:
    """What this step was like, under verl's names where verl has one."""
    n = len(trajectories)
    zero_B = (x.advantages_BT == 0).all(dim=1)
    tokens = int(x.batch.mask_BT.sum())
    return {
        "response_length/mean": tokens / n,
        "sequence_length/mean": x.batch.lengths_B.float().mean().item(),
        "groups/zero_advantage": zero_B.float().mean().item(),
        "actor/entropy": policy.stats.entropy / policy.stats.decode_tokens,  # at each sampled token, before the update
        "rollout/prefill_tokens": policy.stats.prefill_tokens,
        "rollout/decode_tokens": policy.stats.decode_tokens,
        "timing_s/env": clock.laps["gen"] - policy.stats.seconds,
        "perf/agent_tokens_per_s": policy.stats.decode_tokens / clock.laps["gen"],
        "perf/memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        **episode_metrics([EpisodeNumbers.of(t) for t in trajectories]),
    }


@dataclass(frozen=True)
class EpisodeNumbers:
    """What is reported of an episode. With verl, this alone comes back from the process that ran it."""

    score: float
    turns: int
    stop_reason: str
    parts: dict[str, float]
    """What it was paid for, as the environment names it."""
    metrics: dict[str, float]
    """What else was measured."""

    @classmethod
    def of(cls, t: Trajectory) -> EpisodeNumbers:
        parts = {name: float(value) for name, value in t.reward_parts.items()}
        metrics = {name: float(value) for name, value in t.metrics.items() if name not in parts}
        return cls(t.reward, len(t.steps), t.stop_reason.value, parts, metrics)


def episode_metrics(episodes: list[EpisodeNumbers]) -> dict[str, float]:
    """Means over the episodes of a step; the same for both executors."""

    def total(name: str) -> float:
        return sum(e.metrics.get(name, 0.0) for e in episodes)

    n, calls = len(episodes), total("tool_calls")
    metrics = {
        "critic/score/mean": fmean(e.score for e in episodes),
        "tool_calls/mean": calls / n,
        "tool_calls/invalid_rate": total("invalid_calls") / max(calls, 1),
        "tool_calls/failed_rate": total("failed_calls") / max(calls, 1),
        "num_turns/mean": fmean(e.turns for e in episodes),
    }
    for kind, values in (("reward", [e.parts for e in episodes]), ("episode", [e.metrics for e in episodes])):
        for name in dict.fromkeys(name for each in values for name in each):
            metrics[f"{kind}/{name}"] = fmean(each[name] for each in values if name in each)
    for reason, count in Counter(e.stop_reason for e in episodes).items():
        metrics[f"stop/{reason}"] = count / n
    return metrics
