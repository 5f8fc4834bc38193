"""Compare the direction of an estimator with the true gradient.

In: the plays of some questions, with their probabilities, and an estimator. Out: an
`EstimatorRow`: what it weighs, where it errs, and what one step gains. Next: `table.py` prints
rows.

An estimator is given batches as in training: questions, and groups of plays drawn with their exact
probabilities. Its advantages are averaged per play and token over all batches, and one backward
pass turns the average into its mean direction. So thousands of batches cost little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from agent_r1 import (
    AdvantageConfig,
    AgentR1Error,
    Batch,
    Decoder,
    Estimator,
    collate,
    states_before_actions,
    trajectory_rows,
)
from agent_r1_recipes.exact.gradient import (
    Plays,
    at_offset,
    cosine,
    play_logprobs,
    push_all,
    token_logprobs_of,
)

KL = 0.01
"""KL of a play's distribution before and after a step, in nats. Each estimator's step has it."""
SINGLE_BATCHES = 8
"""Batches whose own gradient is computed, for cosine, variance and steps."""
FOLDS = 8
"""Independent parts of the batches, whose differences are the noise of the bias."""
MOST_NOISE = 0.5
"""Standard error of the true gradient over its norm, above which it has no direction."""
STEPS = 5
"""Of them, batches after which a step is taken."""


@dataclass
class World:
    """The plays that estimators are given, and everything that is true of them."""

    name: str
    model: Decoder
    temperature: float
    plays: Plays
    greedy_Q: list[float]
    """Reward of each question's greedy play."""
    critic_BT: Tensor
    """Values of a frozen critic at the action tokens of the plays' rows."""
    noise_ratio: float = 0.0
    """Of the true gradient: `TrueGradient.noise_ratio`."""
    noise_of: dict[str, float] = field(default_factory=dict)
    """The same of the gradient of each kind of question."""
    known: dict[str, Any] = field(default_factory=dict)
    """What was enumerated, for `--json`."""
    group_size: int = 8
    questions_per_batch: int = 8
    truth_Q: list[Tensor] = field(init=False)
    """The true gradient of each question."""
    logprob_N: Tensor = field(init=False)
    """Of each play."""
    exact_BT: Tensor = field(init=False)
    """V at each action token, added up over all plays with that beginning."""

    def __post_init__(self):
        plays = self.plays
        self.questions_per_batch = min(self.questions_per_batch, plays.questions)
        self.truth_Q = []
        for question in range(plays.questions):
            weights_BT = plays.score_weights(plays.question_N == question)
            self.truth_Q.append(self.push(weights_BT))
        self.exact_BT = exact_values(plays)
        with torch.no_grad():
            self.logprob_N = play_logprobs(self.model, plays.batch, self.temperature)
        for trajectory, question in zip(plays.trajectories, plays.question_N, strict=True):
            trajectory.extra["greedy_score"] = self.greedy_Q[int(question)]

    def push(self, weights_BT: Tensor) -> Tensor:
        """Return the direction of these weights of action tokens, as one vector."""
        return self.push_all([weights_BT])[0]

    def push_all(self, all_weights: list[Tensor]) -> list[Tensor]:
        """Return the directions of several weights of action tokens."""
        return push_all(self.model, self.plays.batch, all_weights, self.temperature)

    @property
    def truth(self) -> Tensor:
        """The gradient of the mean reward over questions."""
        return torch.stack(self.truth_Q).mean(0)

    @cached_property
    def step_length(self) -> float:
        """Length of the step along the true gradient that has the KL `KL`."""
        return take_step(self, self.truth, 0.01)[0] if self.truth.norm() else 0.01

    @property
    def is_noise(self) -> bool:
        """Whether the true gradient is within two standard errors of zero."""
        return self.noise_ratio > MOST_NOISE


def exact_values(plays: Plays) -> Tensor:
    """Compute V before each action token: [B, T], the mean reward from there on."""
    batch = plays.batch
    rewards_BT = batch.rewards_BT.double()
    index_B, N = batch.number_trajectories()
    total_N = torch.zeros(N, dtype=torch.float64).index_add(0, index_B, rewards_BT.sum(1))
    below: dict[Hashable, list[float]] = {}
    places: list[tuple[int, int, Hashable]] = []
    earlier: dict[int, float] = {}
    for row, play in enumerate(batch.trajectory_B.tolist()):
        ids = batch.ids_BT[row].tolist()
        to_go = float(total_N[index_B[row]]) - earlier.get(play, 0.0)
        key: Hashable = (batch.groups[row],)
        start = 0
        for position in batch.mask_BT[row].nonzero()[:, 0].tolist():
            # Nested keys: a token's beginning is that of the token before, and what came since.
            key = (hash(key), *ids[start:position])
            start = position
            chance = float(plays.chance_N[play])
            entry = below.setdefault(key, [0.0, 0.0])
            entry[0] += chance
            entry[1] += chance * to_go
            places.append((row, position, key))
            to_go -= float(rewards_BT[row, position])
        earlier[play] = earlier.get(play, 0.0) + float(rewards_BT[row].sum())
    values_BT = torch.zeros(batch.mask_BT.shape)
    for row, position, key in places:
        chance, reward = below[key]
        values_BT[row, position] = reward / chance
    return values_BT


def fit_critic(model: Decoder, plays: Plays, episodes: int, seed: int) -> tuple[Tensor, float]:
    """Fit a linear value head on the policy's own states, to returns of sampled episodes.

    Returns its values at all action tokens [B, T], and the share of the exact values' variance that
    it explains.
    """
    batch = plays.batch
    generator = torch.Generator().manual_seed(seed)
    chances = plays.chance_N / plays.questions
    count_N = torch.multinomial(chances, episodes, True, generator=generator).bincount(
        minlength=len(chances)
    )
    exact_BT = exact_values(plays)
    mask_BT = batch.mask_BT.bool()
    to_go_BT = batch.rewards_BT.flip(1).cumsum(1).flip(1)
    states = []
    with torch.no_grad():
        for first in range(0, len(batch), 128):
            part = batch[torch.arange(first, min(first + 128, len(batch)))]
            states.append(states_before_actions(model, part)[0].double())
    hidden_AD = torch.cat(states)
    hidden_AD = torch.cat((hidden_AD, torch.ones(len(hidden_AD), 1, dtype=torch.float64)), 1)
    weight_A = count_N[batch.trajectory_B][:, None].expand_as(mask_BT)[mask_BT].double()
    # Ridge regression: few episodes, and 129 weights.
    gram = hidden_AD.T @ (weight_A[:, None] * hidden_AD)
    gram += 1e-3 * weight_A.sum() * torch.eye(len(gram), dtype=torch.float64)
    right = hidden_AD.T @ (weight_A * to_go_BT[mask_BT].double())
    value_A = hidden_AD @ torch.linalg.solve(gram, right)
    chance_A = chances[batch.trajectory_B][:, None].expand_as(mask_BT)[mask_BT]
    exact_A = exact_BT[mask_BT].double()
    mean = (chance_A * exact_A).sum() / chance_A.sum()
    residual = (chance_A * (value_A - exact_A) ** 2).sum()
    share = 1 - float(residual / (chance_A * (exact_A - mean) ** 2).sum())
    return batch.at_actions(value_A.float()), share


# ---------------------------------------------------------------------------------------- one batch


class Sampler:
    """Draws batches of a world for one estimator, with the columns that it declares."""

    def __init__(self, world: World, estimator: Estimator, values_BT: Tensor, seed: int):
        self.world = world
        self.generator = torch.Generator().manual_seed(seed)
        rows = []
        for number, trajectory in enumerate(world.plays.trajectories):
            rows += trajectory_rows(trajectory, number, estimator.columns)
        self.table = collate(rows, columns=estimator.columns)
        self.table.values_BT = values_BT
        plays = world.plays
        self.rows_of: list[list[int]] = [[] for _ in plays.trajectories]
        for row, play in enumerate(self.table.trajectory_B.tolist()):
            self.rows_of[play].append(row)
        self.plays_of = [
            (plays.question_N == question).nonzero()[:, 0] for question in range(plays.questions)
        ]

    def draw(self) -> tuple[Batch, Tensor]:
        """Return a batch, and the row of the table of each of its rows."""
        world = self.world
        order = torch.randperm(world.plays.questions, generator=self.generator)
        rows: list[int] = []
        trajectories: list[int] = []
        groups: list[str] = []
        count = 0
        for question in order[: world.questions_per_batch].tolist():
            places = self.plays_of[question]
            chances = world.plays.chance_N[places]
            sample = torch.multinomial(chances, world.group_size, True, generator=self.generator)
            for play in places[sample].tolist():
                rows += self.rows_of[play]
                trajectories += [count] * len(self.rows_of[play])
                groups += [str(question)] * len(self.rows_of[play])
                count += 1
        index_B = torch.tensor(rows)
        batch = replace(
            self.table[index_B], groups=groups, trajectory_B=torch.tensor(trajectories), metrics={}
        )
        return batch, index_B


Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


def episode_sum(advantages_BT: Tensor, mask_BT: Tensor, trajectory_B: Tensor) -> Tensor:
    """Divide by the number of episodes (`seq-mean-token-sum`): no token's weight is random."""
    return advantages_BT * mask_BT / len(trajectory_B.unique())


def token_mean(advantages_BT: Tensor, mask_BT: Tensor, trajectory_B: Tensor) -> Tensor:
    """Divide by the batch's action tokens (`actor.loss_aggregation=token-mean`)."""
    return advantages_BT * mask_BT / mask_BT.sum()


def episode_mean(advantages_BT: Tensor, mask_BT: Tensor, trajectory_B: Tensor) -> Tensor:
    """Divide by the episode's action tokens (`seq-mean-token-mean`, GRPO's own)."""
    episodes, index_B = trajectory_B.unique(return_inverse=True)
    tokens_N = mask_BT.new_zeros(len(episodes)).index_add(0, index_B, mask_BT.sum(1))
    return advantages_BT * mask_BT / tokens_N[index_B][:, None] / len(episodes)


def direction_weights(
    sampler: Sampler, estimator: Estimator, advantage: AdvantageConfig, weigh: Weigh
) -> Tensor:
    """Draw one batch. Return the weight of each action token of the table: [B, T]."""
    batch, index_B = sampler.draw()
    mask_BT = batch.mask_BT.clone()
    advantages_BT, _ = estimator(batch, advantage)
    if advantages_BT.shape != mask_BT.shape or not torch.isfinite(advantages_BT).all():
        raise AgentR1Error(
            f"the estimator returned advantages of shape {list(advantages_BT.shape)} for a batch "
            f"of shape {list(mask_BT.shape)}, or numbers that are not finite; return one finite "
            "number per token",
            code="bad_advantages",
        )
    weights_BT = weigh(advantages_BT.double(), mask_BT.double(), batch.trajectory_B)
    out_BT = torch.zeros(sampler.table.mask_BT.shape, dtype=torch.float64)
    out_BT[:, : mask_BT.shape[1]].index_add_(0, index_B, weights_BT)
    return out_BT


# ------------------------------------------------------------------------------------------ the row


@dataclass
class EstimatorRow:
    """What is known of one estimator in one world."""

    name: str
    weights: list[tuple[float, float]]
    """(mean reward of the question, weight that the estimator gives it), by reward. Weights have
    the mean 1. A question whose true gradient is zero has none."""
    bias: float
    """Norm of what no weights explain, over the norm of the mean direction."""
    bias_noise: float
    """The bias that one standard error would look like."""
    mean_cosine: float
    """Cosine of the mean direction with the gradient of the mean reward. nan: not defined."""
    batch_cosine: float
    """The same of one batch, on average."""
    variance: float
    """Mean squared distance of one batch's direction from the mean, over the latter's square."""
    gains: dict[str, tuple[float, float]]
    """By kind of question: the exact change of the mean reward after a step, and its error.

    The error is the standard error over batches.
    """
    kind_cosines: dict[str, float]
    """By kind of question: cosine of the mean direction of its questions with their gradient."""

    @property
    def is_biased(self) -> bool:
        """Whether the bias is at least .05, and its square four standard errors above zero."""
        return self.bias > max(0.05, 2 * self.bias_noise)

    @property
    def verdict(self) -> str:
        """What the row says about a bias; too much noise decides nothing."""
        if self.is_biased:
            return "BIASED"
        return "no bias seen" if self.bias_noise < 0.25 else "not decided, raise --batches"


def make_row(
    world: World,
    name: str,
    estimator: Estimator,
    advantage: AdvantageConfig,
    *,
    weigh: Weigh = episode_sum,
    values_BT: Tensor | None = None,
    batches: int = 200,
    seed: int = 0,
) -> EstimatorRow:
    """Compute the row of an estimator. `values_BT`: the critic's (default: the world's)."""
    critic_BT = world.critic_BT if values_BT is None else values_BT
    sampler = Sampler(world, estimator, critic_BT, seed)
    per_fold = max(math.ceil(batches / FOLDS), math.ceil(SINGLE_BATCHES / FOLDS))
    folds: list[Tensor] = []
    singles: list[Tensor] = []
    for _ in range(FOLDS):
        total_BT = torch.zeros(sampler.table.mask_BT.shape, dtype=torch.float64)
        for _ in range(per_fold):
            weights_BT = direction_weights(sampler, estimator, advantage, weigh)
            total_BT += weights_BT / per_fold
            if len(singles) < SINGLE_BATCHES:
                singles.append(world.push(weights_BT))
        folds.append(total_BT)
    mean = torch.stack(world.push_all(folds))
    parts = question_parts(world, torch.stack(folds).mean(0))
    weights, truths = fit_weights(world, parts)
    bias, bias_noise = bias_of(mean - truths)
    mean = mean.mean(0)
    norm = float(mean.norm()) or math.nan
    gains = [step_gain(world, single) for single in singles[:STEPS]]
    gain_of = {}
    for kind in sorted(gains[0]):
        values = [gain[kind] for gain in gains]
        gain_of[kind] = (fmean(values), stdev(values) / math.sqrt(len(values)))
    cosines = [cosine(single, world.truth) for single in singles if single.norm()]
    return EstimatorRow(
        name,
        weights,
        bias / norm,
        bias_noise / norm,
        math.nan if world.is_noise else cosine(mean, world.truth),
        math.nan if world.is_noise or not cosines else fmean(cosines),
        fmean(float((single - mean).norm() ** 2) for single in singles) / norm**2,
        gain_of,
        kind_cosines(world, parts),
    )


def question_parts(world: World, weights_BT: Tensor) -> list[Tensor]:
    """Return the part of a direction that comes from the plays of each question."""
    question_B = world.plays.question_N[world.plays.batch.trajectory_B]
    parts = []
    for question in range(world.plays.questions):
        own_BT = torch.where((question_B == question)[:, None], weights_BT, 0.0)
        parts.append(world.push(own_BT))
    return parts


def fit_weights(world: World, parts: list[Tensor]) -> tuple[list[tuple[float, float]], Tensor]:
    """Fit a weight to the true gradient of each question.

    Returns (mean reward, weight relative to the mean), by reward, and the weighted sum of the true
    gradients. That sum is the gradient of the objective that the weights define.
    """
    largest = max(float(truth.norm()) for truth in world.truth_Q)
    weight_of: dict[int, float] = {}
    truths = torch.zeros_like(world.truth)
    for question, truth in enumerate(world.truth_Q):
        # A question that is nearly solved, or never, has no direction to compare with.
        if float(truth.norm()) <= 1e-3 * largest:
            continue
        weight_of[question] = float(parts[question] @ truth / (truth @ truth))
        truths += weight_of[question] * truth
    if not weight_of:
        return [], truths
    scale = fmean(weight_of.values()) or 1.0
    rewards = world.plays.value_Q().tolist()
    return sorted((rewards[q], weight / scale) for q, weight in weight_of.items()), truths


def kind_cosines(world: World, parts: list[Tensor]) -> dict[str, float]:
    """Compare the direction of each kind of question with its true gradient. nan: not defined."""
    found = {}
    for kind in sorted(set(world.plays.kinds)):
        members = [q for q, own in enumerate(world.plays.kinds) if own == kind]
        direction = torch.stack([parts[q] for q in members]).sum(0)
        truth = torch.stack([world.truth_Q[q] for q in members]).sum(0)
        is_noise = world.noise_of.get(kind, 0.0) > MOST_NOISE
        found[kind] = math.nan if is_noise else cosine(direction, truth)
    return found


def bias_of(residuals: Tensor) -> tuple[float, float]:
    """Return the norm of the mean of independent residuals [FOLDS, parameters], and its noise.

    Products of different folds are used, because the square of one would count its noise. The
    second number is the norm at one standard error, by the jackknife.
    """
    products = residuals.double() @ residuals.double().T
    square = (float(products.sum()) - float(products.trace())) / (FOLDS * (FOLDS - 1))
    without = []
    for fold in range(FOLDS):
        others = [i for i in range(FOLDS) if i != fold]
        block = products[others][:, others]
        without.append((float(block.sum()) - float(block.trace())) / ((FOLDS - 1) * (FOLDS - 2)))
    middle = fmean(without)
    error = math.sqrt((FOLDS - 1) / FOLDS * sum((x - middle) ** 2 for x in without))
    return math.sqrt(max(0.0, square)), math.sqrt(error)


def step_gain(world: World, direction: Tensor) -> dict[str, float]:
    """Take one step of gradient ascent with the KL `KL`; return gains by kind."""
    plays = world.plays
    kinds = sorted(set(plays.kinds))
    if not direction.norm():
        return dict.fromkeys([*kinds, "all"], 0.0)
    _, change_N = take_step(world, direction, world.step_length)
    gain_Q = plays.value_Q(plays.chance_N * change_N.exp()) - plays.value_Q()
    gains = {"all": float(gain_Q.mean())}
    for kind in kinds:
        members = [gain for gain, k in zip(gain_Q.tolist(), plays.kinds, strict=True) if k == kind]
        gains[kind] = fmean(members)
    return gains


def take_step(world: World, direction: Tensor, length: float) -> tuple[float, Tensor]:
    """Look for the step with the KL `KL`, beginning with a length.

    Returns its length, and the change of each play's log-probability.
    """
    plays = world.plays
    norm = float(direction.norm())
    attempts = 0
    while True:
        attempts += 1
        with at_offset(world.model, direction, length / norm), torch.no_grad():
            change_N = play_logprobs(world.model, plays.batch, world.temperature) - world.logprob_N
        # Without a term that is 0 if the plays are all; with it, no part of the sum is negative.
        per_play_N = plays.chance_N * (torch.expm1(change_N) - change_N)
        kl = float(per_play_N.sum()) / plays.questions
        if abs(kl / KL - 1) < 0.02 or attempts == 5:
            return length, change_N
        # The KL is about quadratic in the step; a factor of 30 at most, for it is so only nearby.
        length *= min(30.0, math.sqrt(KL / max(kl, 1e-12)))


# ------------------------------------------------------------------------------------------- the KL


def kl_rows(world: World, reference: Decoder) -> dict[str, tuple[float, float]]:
    """Compare estimators of the KL with its true gradient.

    Each of k1, k2 and k3 is used as a reward and as a loss. Returns the cosine with the true
    gradient of KL(pi || reference), and the ratio of norms.
    """
    directions = kl_directions(world.model, reference, world.plays, world.temperature)
    truth = directions.pop("truth")
    return {
        name: (cosine(direction, truth), float(direction.norm() / truth.norm()))
        for name, direction in directions.items()
    }


def kl_directions(
    model: Decoder, reference: Decoder, plays: Plays, temperature: float
) -> dict[str, Tensor]:
    """Compute the expected gradient of each estimator of the KL, and the true one (`truth`).

    No batch is drawn: the expectations are added up over all plays. With d = log pi - log of the
    reference, per token, k1 = d, k2 = d^2 / 2 and k3 = exp(-d) - 1 + d.
    """
    with torch.no_grad():
        now_BT = token_logprobs_of(model, plays.batch, temperature)
        then_BT = token_logprobs_of(reference, plays.batch, temperature)
    apart_BT = now_BT - then_BT
    zero_N = torch.zeros(len(plays.trajectories), dtype=torch.float64)
    index_B = plays.batch.trajectory_B

    def as_reward(kl_BT: Tensor) -> Tensor:
        play_N = zero_N.index_add(0, index_B, kl_BT.sum(1))
        return plays.on_tokens(plays.chance_N * play_N)

    def as_loss(slope_BT: Tensor) -> Tensor:
        return plays.on_tokens(plays.chance_N) * slope_BT

    back_BT = torch.exp(-apart_BT)
    weights = {
        # The term in which log pi itself changes adds up to zero over all plays.
        "truth": as_reward(apart_BT),
        "k1 reward": as_reward(apart_BT),
        "k2 reward": as_reward(apart_BT**2 / 2),
        "k3 reward": as_reward(back_BT - 1 + apart_BT),
        # The derivatives of k1, k2 and k3 by log pi.
        "k1 loss": as_loss(torch.ones_like(apart_BT)),
        "k2 loss": as_loss(apart_BT),
        "k3 loss": as_loss(1 - back_BT),
    }
    directions = push_all(model, plays.batch, list(weights.values()), temperature)
    return dict(zip(weights, directions, strict=True))
